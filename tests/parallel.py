"""Engines over several workers, and what tests read from them."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from probes import start_recording, take_records
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


@contextmanager
def workers(
    model: Path, uno: dict[str, Any] | None = None, backend: str = "mp", **settings: Any
) -> Iterator[LLM]:
    """An engine of this process over two tensor-parallel workers, each in its own."""
    if uno is not None:
        settings["speculative_config"] = {"method": "uno", **uno}
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "block_size": 32,
        "seed": 0,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": backend,
    }
    llm = LLM(str(model), **(defaults | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[list[int]]:
    """The first completion's token ids, per prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(p)} for p in prompts],
        params,  # type: ignore[arg-type]
        use_tqdm=False,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


def drafts_of_ranks(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[torch.Tensor]]:
    """By rank, the token ids [n, B] of every draft pass: seeds and noise."""
    llm.collective_rpc(start_recording)
    tokens(llm, prompts, params)
    return [[record.ids for record in rank] for rank in llm.collective_rpc(take_records)]


def sampled(count: int) -> list[SamplingParams]:
    """With a seed of their own and, every other, without: then the engine makes one up."""
    return [
        SamplingParams(
            temperature=1.0, max_tokens=20, ignore_eos=True, seed=None if i % 2 else 7 + i
        )
        for i in range(count)
    ]


def worker_pid(worker: Any) -> int:
    """For `collective_rpc`."""
    return os.getpid()


def processes(name: str) -> list[psutil.Process]:
    """Descendants of this process that call themselves `name` (vLLM names its own)."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def check_draft_example(out: str) -> None:
    """What examples/ray_tp.py prints with the bundled model, which drafts well."""
    answers = re.findall(
        r"^(?:'.*'|\".*\") -> (?:'.+'|\".+\") \((\d+) tokens\)$", out, re.MULTILINE
    )
    assert len(answers) == 3, out
    found = re.search(r"^([\d.]+) tokens per cycle; accepted by position: ([\d. ]+)$", out, re.M)
    assert found, out
    accepted = [float(share) for share in found[2].split()]
    assert float(found[1]) > 3 and len(accepted) == 8 and accepted[0] == 1.0, out
