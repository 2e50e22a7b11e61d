"""What tests look at inside a running engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from vllm_uno.lora_linear import slow_layers


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
    block, buffers = speculator.block_size, speculator.input_buffers
    compute_logits = speculator.compute_logits
    records: list[DraftRecord] = []

    def record(hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute_logits(hidden_states)
        shape = (len(logits) // block, block)
        rows = slice(0, len(logits))  # small batches: one part
        records.append(
            DraftRecord(
                context=buffers.positions[rows].view(shape)[:, 0].tolist(),
                ids=buffers.input_ids[rows].view(shape).long().cpu(),
                logits=logits.float().view(*shape, -1).cpu().clone(),
            )
        )
        return logits

    with (
        mock.patch.object(speculator, "compute_logits", record),
        # A replayed graph calls nothing.
        mock.patch.object(speculator, "sampling_graphs", None),
    ):
        yield records


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


def layers_without_kernels(worker: Any) -> int:
    """Layers of the draft view whose LoRA runs in plain PyTorch; for `collective_rpc`."""
    worker = getattr(worker, "worker", worker)
    return len(slow_layers(worker.model_runner.speculator.model))


def draft_block_size(worker: Any) -> int:
    worker = getattr(worker, "worker", worker)
    return int(worker.model_runner.speculator.block_size)
