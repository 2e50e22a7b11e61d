"""Engines over several workers, and what tests read from them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from engines import SMALL
from probes import start_recording, take_records
from serving import ask_all, client, random_request, serve, serve_client
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


@contextmanager
def workers(
    model: Path, uno: dict[str, Any] | None = None, backend: str = "mp", **settings: Any
) -> Iterator[LLM]:
    """An engine of this process over two tensor-parallel workers, each in its own."""
    if uno is not None:
        settings["speculative_config"] = {"method": "uno", **uno}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    llm = LLM(str(model), **(SMALL | two | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        if backend == "ray":
            import ray

            ray.shutdown()  # or the next engine would wait for this one's place
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


def kill_while_generating(
    llm: LLM, pid: int, prompts: Sequence[Sequence[int]]
) -> BaseException | None:
    """The error that ends `generate` when a worker is killed under it."""
    ends: list[BaseException] = []
    started = threading.Event()
    step = llm.llm_engine.step

    def watched() -> Any:
        outputs = step()
        started.set()
        return outputs

    llm.llm_engine.step = watched  # type: ignore[method-assign]

    def generate() -> None:
        try:
            tokens(llm, prompts, SamplingParams(max_tokens=300, ignore_eos=True))
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    assert started.wait(120)
    psutil.Process(pid).kill()
    thread.join(120)
    assert not thread.is_alive(), "generate hangs"
    return ends[0] if ends else None


def check_killed_worker(folder: Path) -> None:
    """A worker dies while its server streams: the client gets an error, and all ends by itself."""
    with serve(folder, {"num_speculative_tokens": 4}, "--tensor-parallel-size", "2") as url:
        ranks = processes("VLLM::Worker")
        assert len(ranks) == 2
        # The engine and the API server.
        above = itertools.takewhile(lambda p: p.pid != os.getpid(), ranks[0].parents())
        everyone = [*ranks, *above]
        assert len(everyone) == 4
        with pytest.raises(openai.APIError):
            asyncio.run(stream_and_kill(url))
        _, alive = psutil.wait_procs(everyone, timeout=120)
        assert not alive
    log = (folder / "server.log").read_text()
    assert re.search(r"Worker proc .* died unexpectedly", log)
    assert "EngineDeadError" in log or "EngineCore encountered" in log


async def stream_and_kill(url: str) -> None:
    """Kill a worker after the first token of a long answer, and read on."""
    async with client(url) as to:
        stream = await to.completions.create(
            model="bundled",
            prompt="Tom has",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        killed = False
        async for _ in stream:
            if not killed:
                processes("VLLM::Worker_TP1")[0].kill()
                killed = True


def check_data_parallel(plain_folder: Path, uno_folder: Path) -> None:
    """A server of two engines answers as a plain one does; both draft, and both are counted."""
    requests = [
        dataclasses.replace(random_request(seed, greedy=True), leave_after=None, patience=None)
        for seed in range(500, 518)
    ]
    # A grammar rejects drafts, which do not know it, even in row 0.
    requests = [r for r in requests if "structured_outputs" not in r.body["extra_body"]]
    with serve(plain_folder) as url:
        plain = asyncio.run(ask_all(url, requests, 8))
    options = ("--data-parallel-size", "2")
    uno = {"num_speculative_tokens": 4}
    # To each in turn: vLLM's own choice may be one engine for all, when requests come slowly.
    placed = [
        dataclasses.replace(
            r, body={**r.body, "extra_headers": {"X-data-parallel-rank": str(number % 2)}}
        )
        for number, r in enumerate(requests)
    ]
    with serve(uno_folder, uno, *options) as url:
        replies = asyncio.run(ask_all(url, placed, 8))
        metrics = scrape(url)
    cycles = by_engine(metrics, "vllm_uno:cycles_total")
    first = by_engine(metrics, "vllm_uno:accepted_tokens_total", 'position="0"')
    assert [r.tokens for r in replies] == [r.tokens for r in plain]
    assert set(cycles) == {"0", "1"} and min(cycles.values()) > 0, cycles
    assert first == cycles, (first, cycles)  # greedy: row 0 is right


def scrape(url: str) -> list[str]:
    """The server's metrics, of one moment."""
    with serve_client.LOCAL.open(f"{url}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return text.splitlines()


def by_engine(metrics: list[str], name: str, label: str = "") -> dict[str, float]:
    """A counter of each engine."""
    return {
        re.search(r'engine="(\d+)"', line)[1]: float(line.split()[-1])  # type: ignore[index]
        for line in metrics
        if line.startswith(f"{name}{{") and label in line
    }
