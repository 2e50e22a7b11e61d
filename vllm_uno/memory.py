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

_GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """Bytes on this rank.

    Attributes:
        adapter: A and B of all layers.
        draft_laws: fp32 [max_num_seqs, B, V]; 0 for greedy drafts.
        draft_head: the gathered rows of a draft vocabulary.
        buffers: inputs and outputs of the draft pass.
    """

    adapter: int
    draft_laws: int
    draft_head: int
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
        view: the draft view; its buffers named `uno_*` are the adapter.
        draft_laws: the cache of draft laws.
        draft_head: the reduced head's own tensors.
        device: the GPU; tensors elsewhere do not count.
        buffer_owners: objects with tensors as attributes; not searched deeper.
    """
    adapter = (b for name, b in view.named_buffers() if name.rpartition(".")[2][:4] == "uno_")
    seen: set[int] = set()
    return Footprint(
        adapter=_bytes(adapter, seen),
        draft_laws=_bytes([] if draft_laws is None else [draft_laws], seen),
        draft_head=_bytes(draft_head, seen),
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
    max_num_reqs: int,
    block_size: int,
    verify_rows: int,
    max_chunk_rows: int,
) -> None:
    """Hold for a moment what the largest batch's draft and verification sampling hold.

    vLLM's own profile samples one row a request. The heads really run, so that the
    ranks' gathered copies of the logits count; the copies that processing makes are
    empty tensors.

    Args:
        draft_logits, verify_logits: [rows, H] -> [rows, V], the two heads.
        hidden_states: [any, H], for dtype, device and H.
        max_num_reqs: requests of a batch.
        block_size: B.
        verify_rows: of a request.
        max_chunk_rows: rows that are processed in fp32 at a time.
    """
    hidden_size = hidden_states.shape[-1]
    draft_rows = min(max_num_reqs * block_size, max_chunk_rows)
    logits = draft_logits(hidden_states.new_zeros(draft_rows, hidden_size))
    # z, the filtered copy that decides what is kept, and the mask between them.
    held = [torch.empty_like(logits, dtype=kind) for kind in _DRAFT_COPIES]
    del logits, held
    logits = verify_logits(hidden_states.new_zeros(max_num_reqs * verify_rows, hidden_size))
    chunk = logits[:max_chunk_rows]
    held = [torch.empty_like(chunk, dtype=kind) for kind in _VERIFY_COPIES]
    del logits, chunk, held


_DRAFT_COPIES = (torch.float32, torch.float32, torch.bool)
_VERIFY_COPIES = (torch.float32, torch.float32)
