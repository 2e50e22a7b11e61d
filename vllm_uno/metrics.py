"""Acceptance of real drafts, counted on the GPU without a sync.

vLLM pads a cached one-token prefill with placeholder drafts and counts them as
rejected, and a request near `max_model_len` does not draft; its counters then
understate acceptance. These count real drafts only, in the draft-input kernel, and
not the last two cycles of a request: in the one its end lies, the other begins past
it (asynchronous scheduling learns of an end one step late; seen on an H200 as one cycle
in 15 at tau 8, and tau 5 % too low).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftStats:
    """A snapshot.

    Attributes:
        cycles: verified real drafts (a cycle: one draft pass, one verify pass).
        emitted: tokens those cycles emitted.
        proposed: [B], drafts verified at each position of the block. In tree mode: nodes verified
            at each depth, of which one a cycle at most can be accepted.
        accepted: [B], drafts accepted at each position. In tree mode: at each depth (a chain of
            V > B nodes may go deeper; that counts in `emitted` only).
    """

    cycles: int
    emitted: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_cycle(self) -> float:
        """tau of the paper."""
        return self.emitted / self.cycles if self.cycles else float("nan")

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Accepted over proposed, position by position (unconditional)."""
        return tuple(
            a / p if p else float("nan") for a, p in zip(self.accepted, self.proposed, strict=True)
        )

    @property
    def accepted_per_cycle(self) -> tuple[float, ...]:
        """Share of the cycles that accepted a draft at each position (tree mode: depth)."""
        return tuple(a / self.cycles if self.cycles else float("nan") for a in self.accepted)

    @property
    def proposed_per_cycle(self) -> tuple[float, ...]:
        """Drafts a cycle at each position; in tree mode nodes at each depth."""
        return tuple(p / self.cycles if self.cycles else float("nan") for p in self.proposed)


class DraftCounters:
    """int64 counters on the device, added to by the draft-input kernel.

    Attributes:
        all: [2 + 2 B], of which the others are parts: cycles, emitted, proposed, accepted.
        resets: how often they were set back, counted on the host.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.resets = 0
        self.all = torch.zeros(2 + 2 * block_size, dtype=torch.int64, device=device)
        self.cycles, self.emitted, self.proposed, self.accepted = self.all.split(
            [1, 1, block_size, block_size]
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.cycles, self.emitted, self.proposed, self.accepted

    def snapshot(self) -> DraftStats:
        """Read the counters; waits for the device."""
        return DraftStats(
            cycles=int(self.cycles),
            emitted=int(self.emitted),
            proposed=tuple(self.proposed.tolist()),
            accepted=tuple(self.accepted.tolist()),
        )

    def reset(self) -> None:
        self.all.zero_()
        self.resets += 1
