"""The host waits for nothing in a draft pass: it never reads a tensor of the device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

BLOCK_SIZE = 3
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
}


@pytest.fixture(scope="module")
def uno(model: Path, adapter: Path) -> Iterator[Engine]:
    with engine(
        model, {"uno_lora_path": str(adapter), "num_speculative_tokens": BLOCK_SIZE}
    ) as running:
        yield running


def _run(uno: Engine, batch: list[dict[str, Any]]) -> None:
    prompts = make_prompts(2048, len(batch), lengths=(5, 9, 17, 33))
    uno.tokens(prompts, [SamplingParams(**(ENDS | params)) for params in batch])


@dataclass
class Checked:
    """Draft passes, and those in which the host read a device tensor."""

    passes: int = 0
    reads: list[str] = field(default_factory=list)


@contextmanager
def _checked(uno: Engine) -> Iterator[Checked]:
    """Checks every draft pass. One that reads has no drafts, so that the engine goes on."""
    propose = uno.speculator.propose
    checked = Checked()

    @contextmanager
    def reads_fail(input_batch: Any) -> Iterator[None]:
        if not torch.cuda.is_available():
            with device_reads_fail([input_batch.seq_lens_cpu_upper_bound]):
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def check(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        checked.passes += 1
        try:
            with reads_fail(input_batch):
                return propose(input_batch, *args, **kwargs)
        except (DeviceRead, RuntimeError) as error:
            checked.reads.append(str(error))
            device = input_batch.idx_mapping.device
            return torch.zeros(input_batch.num_reqs, BLOCK_SIZE, dtype=torch.int64, device=device)

    with mock.patch.object(uno.speculator, "propose", check):
        yield checked


@pytest.mark.parametrize("name", BATCHES)
def test_a_draft_pass_reads_nothing_back(uno: Engine, name: str) -> None:
    with _checked(uno) as checked:
        _run(uno, BATCHES[name])
    assert checked.passes >= 4
    assert checked.reads == []


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
    rows = type(uno.speculator.draft_sampler.rows)
    gather = rows.gather

    def read(rows: Any, *args: Any) -> None:
        gather(rows, *args)
        READS[name](rows.temperature)

    with mock.patch.object(rows, "gather", read), _checked(uno) as checked:
        _run(uno, [{"max_tokens": 4}])
    assert len(checked.reads) >= 2
