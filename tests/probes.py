"""What tests look at inside a running engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftRecord:
    """One draft pass.

    Attributes:
        context: C of each request.
        ids: int64 [n, B], the rows' tokens.
        logits: fp32 [n, B, V], the draft view's, before any sampling parameter.
    """

    context: list[int]
    ids: torch.Tensor
    logits: torch.Tensor


@contextmanager
def draft_records(speculator: Any) -> Iterator[list[DraftRecord]]:
    """Records every draft pass of an in-process `UnoProposer` while it is open."""
    sampler = speculator.draft_sampler
    law, block = sampler._draft_law, sampler.block_size
    records: list[DraftRecord] = []

    def record(logits: torch.Tensor, batch: Any, start: int, stop: int) -> torch.Tensor:
        rows = slice(start * block, stop * block)
        shape = (stop - start, block)
        records.append(
            DraftRecord(
                context=batch.positions[rows].view(shape)[:, 0].tolist(),
                ids=batch.input_ids[rows].view(shape).long().cpu(),
                logits=logits.float().view(*shape, -1).cpu().clone(),
            )
        )
        return law(logits, batch, start, stop)

    sampler._draft_law = record
    sampler._bare_argmax = lambda slots: False  # the shortcut makes no full-width logits
    try:
        yield records
    finally:
        sampler._draft_law = law
        del sampler._bare_argmax


# For `llm.collective_rpc`, where the engine is in other processes.


def start_recording(worker: Any) -> None:
    worker = getattr(worker, "worker", worker)
    worker.uno_recorder = draft_records(worker.model_runner.speculator)
    worker.uno_records = worker.uno_recorder.__enter__()


def take_records(worker: Any) -> list[DraftRecord]:
    """What was recorded since the last call."""
    worker = getattr(worker, "worker", worker)
    records = list(worker.uno_records)
    worker.uno_records.clear()
    return records


def draft_block_size(worker: Any) -> int:
    worker = getattr(worker, "worker", worker)
    return int(worker.model_runner.speculator.block_size)
