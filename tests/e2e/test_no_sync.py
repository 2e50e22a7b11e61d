"""The host waits for nothing in a draft pass: it never reads a tensor of the device's.

Nor in the verification of trees, which is ours; that of chains is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Engine, engine
from no_sync import DeviceRead, device_reads_fail
from prompts import make_prompts
from vllm import SamplingParams

from vllm_uno.tree import verification
from vllm_uno.tree.drafting import TreeDrafter
from vllm_uno.tree.verification import TreeSampler

MODES: dict[str, dict[str, Any]] = {
    "linear": {"num_speculative_tokens": 3},
    "tree": {
        "uno_mode": "tree",
        "uno_block_size": 3,
        "uno_tree_top_k": 4,
        "num_speculative_tokens": 6,
    },
}
ENDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
BATCHES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{}, {"temperature": 0.7}],
    "filters": [{"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}],
    "processors": [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logit_bias": {7: 2.0}, "top_k": 20},
        {"bad_words": ["ba", "ce"]},
        {"min_tokens": 8, "stop_token_ids": [5]},
    ],
    "logprobs": [{"logprobs": 2}, {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.2}],
}


@pytest.fixture(scope="module", params=MODES)
def uno(request: Any, model: Path, adapter: Path) -> Iterator[Engine]:
    with engine(model, {"uno_lora_path": str(adapter), **MODES[request.param]}) as running:
        yield running


def _run(uno: Engine, batch: list[dict[str, Any]]) -> None:
    prompts = make_prompts(2048, len(batch), lengths=(5, 9, 17, 33))
    uno.tokens(prompts, [SamplingParams(**(ENDS | params)) for params in batch])


@dataclass
class Checked:
    """Draft passes and verifications of trees, and those in which the host read a device tensor."""

    passes: int = 0
    verified: int = 0
    reads: list[str] = field(default_factory=list)


@contextmanager
def _reads_fail(input_batch: Any) -> Iterator[None]:
    if not torch.cuda.is_available():
        with device_reads_fail([input_batch.seq_lens_cpu_upper_bound]):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _checked(uno: Engine) -> Iterator[Checked]:
    """Checks every pass. A draft pass that reads has no drafts, so that the engine goes on."""
    propose, verify = uno.speculator.propose, uno.runner.rejection_sampler
    checked = Checked()

    def check(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        checked.passes += 1
        try:
            with _reads_fail(input_batch):
                return propose(input_batch, *args, **kwargs)
        except (DeviceRead, RuntimeError) as error:
            checked.reads.append(str(error))
            width = uno.speculator.num_speculative_steps
            device = input_batch.idx_mapping.device
            return torch.zeros(input_batch.num_reqs, width, dtype=torch.int64, device=device)

    def check_verification(logits: torch.Tensor, input_batch: Any, *args: Any) -> Any:
        checked.verified += 1
        try:
            with _reads_fail(input_batch):
                return verify(logits, input_batch, *args)
        except (DeviceRead, RuntimeError) as error:
            checked.reads.append(str(error))
            return verify(logits, input_batch, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(uno.speculator, "propose", check))
        if isinstance(verify, TreeSampler):
            stack.enter_context(
                mock.patch.object(uno.runner, "rejection_sampler", check_verification)
            )
        yield checked


@pytest.mark.parametrize("name", BATCHES)
def test_a_draft_pass_reads_nothing_back(uno: Engine, name: str) -> None:
    with _checked(uno) as checked:
        _run(uno, BATCHES[name])
    assert checked.passes >= 4
    assert checked.reads == []
    if isinstance(uno.runner.rejection_sampler, TreeSampler):
        assert checked.verified >= 4


READS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t.any()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu().numpy(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "repeat": lambda t: t.repeat_interleave(torch.ones_like(t, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_seen(uno: Engine, name: str) -> None:
    temperature = uno.runner.sampler.sampling_states.temperature.gpu
    tree = isinstance(uno.runner.rejection_sampler, TreeSampler)
    # Where drafts are sampled.
    owner: Any = TreeDrafter if tree else type(uno.speculator.draft_sampler.rows)
    method = "__call__" if tree else "gather"
    original = getattr(owner, method)

    def read(*args: Any) -> Any:
        READS[name](temperature)
        return original(*args)

    with mock.patch.object(owner, method, read), _checked(uno) as checked:
        _run(uno, [{"max_tokens": 4}])
    assert len(checked.reads) >= 2


@pytest.mark.parametrize("uno", ["tree"], indirect=True)
def test_a_read_in_the_walk_is_seen(uno: Engine) -> None:
    walk = verification.walk_trees

    def read(path: torch.Tensor, num_sampled: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        walk(path, num_sampled, *args, **kwargs)
        num_sampled.max().item()

    with mock.patch.object(verification, "walk_trees", read), _checked(uno) as checked:
        _run(uno, [{"max_tokens": 4}])
    assert len(checked.reads) >= 2
