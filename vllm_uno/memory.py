"""What UNO takes of the device's memory, and what its sampling needs for a moment.

All of it must exist, or have existed, before vLLM sizes the KV cache:

    adapter, draft head          made while the model is loaded
    draft laws, buffers          made with the runner
    draft pass and sampling      run, or imitated, in vLLM's memory profile (`sampling_peak`)
    draft CUDA graphs            captured once for practice by vLLM's graph profile, all of them

Scratch of the draft pass's own attention metadata comes later; it is some KiB a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from vllm_uno.draft_fp8 import FP8_BUFFERS

_GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """Bytes on this rank.

    Attributes:
        adapter: A and B of all layers.
        draft_laws: fp32 [max_num_seqs, B, V]; 0 for greedy drafts.
        draft_head: the gathered rows of a draft vocabulary.
        fp8_weights: the draft view's own weights of targeted layers.
        buffers: inputs and outputs of the draft pass.
    """

    adapter: int
    draft_laws: int
    draft_head: int
    fp8_weights: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def line(self) -> str:
        parts = [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name) / _GIB:.2f}"
            for field in fields(self)
            if getattr(self, field.name)
        ]
        return f"{self.total / _GIB:.2f} GiB beside the model: {', '.join(parts)}"


def footprint(
    view: nn.Module,
    draft_laws: torch.Tensor | None,
    draft_head: Iterable[torch.Tensor],
    device: torch.device,
    *buffer_owners: Any,
) -> Footprint:
    """Count tensors, each storage once.

    Args:
        view: the draft view; its buffers named `uno_*` are the adapter, those of draft_fp8.py
            apart.
        draft_laws: the cache of draft laws.
        draft_head: the reduced head's own tensors.
        device: the GPU; tensors elsewhere do not count.
        buffer_owners: objects with tensors as attributes; not searched deeper.
    """
    ours: tuple[list[torch.Tensor], ...] = ([], [])
    for name, buffer in view.named_buffers():
        last = name.rpartition(".")[2]
        if last.startswith("uno_"):
            ours[last in FP8_BUFFERS].append(buffer)
    seen: set[int] = set()
    return Footprint(
        adapter=_bytes(ours[False], seen),
        draft_laws=_bytes([] if draft_laws is None else [draft_laws], seen),
        draft_head=_bytes(draft_head, seen),
        fp8_weights=_bytes(ours[True], seen),
        buffers=_bytes(_tensors_of(buffer_owners, device), seen),
    )


def _tensors_of(owners: Iterable[Any], device: torch.device) -> Iterator[torch.Tensor]:
    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, torch.Tensor) and value.device == device:
                yield value


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def sampling_peak(
    draft_logits: Callable[[torch.Tensor], torch.Tensor],
    verify_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    *,
    draft_rows: int,
    copied_rows: int,
    filtered_rows: int,
    verify_rows: int,
    chunk_rows: int,
) -> None:
    """Hold for a moment what the largest batch's draft and verification sampling hold.

    vLLM's own profile samples one row a request. The heads really run, so that the
    ranks' gathered copies of the logits count; the copies that processing makes are
    empty tensors.

    Args:
        draft_logits, verify_logits: [rows, H] -> [rows, V], the two heads.
        hidden_states: [any, H], for dtype, device and H.
        draft_rows: whose logits are held, and processed in fp32, at a time.
        copied_rows: of these, whose logits are copied first.
        filtered_rows: of these, whose z / T is held at a time.
        verify_rows: of the largest batch, whose logits are held all at once.
        chunk_rows: of these, processed in fp32 at a time.
    """
    hidden_size = hidden_states.shape[-1]
    logits = draft_logits(hidden_states.new_zeros(draft_rows, hidden_size))
    # Copies, z, and z / T of the rows that are filtered at a time.
    held = [torch.empty_like(logits[:copied_rows])]
    held += [
        torch.empty_like(rows, dtype=torch.float32) for rows in (logits, logits[:filtered_rows])
    ]
    del logits, held
    logits = verify_logits(hidden_states.new_zeros(verify_rows, hidden_size))
    chunk = logits[:chunk_rows]
    held = [torch.empty_like(chunk, dtype=torch.float32) for _ in range(2)]
    del logits, chunk, held
