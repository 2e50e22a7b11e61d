"""Which requests of a batch are verified as trees: what attention needs, in one place.

Attention backends are built by vLLM deep inside the model, out of reach of the proposer. They find
the process's one `TreeState` here: `install` before the engine makes its metadata builders.

The state has two kinds of content. The tensors are persistent device buffers, read by kernels,
also from FULL CUDA graphs. `active` and `num_drafted` are read by the metadata builders on the
host, each step; in a FULL graph their values at capture count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CAUSAL = -1
"""In `TreeState.slots`: the request's rows attend causally."""


@dataclass
class TreeState:
    """Trees of all requests, and the batch of the current verify pass.

    Attributes:
        num_nodes: V, nodes of a tree. A request's verify rows are row 0 (the seed) and row j+1 for
            node j; fewer where the scheduler cut drafts off (parents precede their children, so
            what is left is a tree).
        ancestors: int64 [max_num_seqs, V, ceil(V / 64)], by request-state slot: bit i % 64 of word
            i // 64 of node j is set where node i is an ancestor of node j or j itself.
        slots: int32 [max_num_seqs], by batch row: request-state slot, or CAUSAL for a request
            without a tree and for the padding rows of a graph.
        num_drafted: leading batch rows that carry drafts (vLLM sorts them to the front).
        active: a verify pass is being prepared.
    """

    num_nodes: int
    ancestors: torch.Tensor
    slots: torch.Tensor
    num_drafted: int = 0
    active: bool = False

    @classmethod
    def allocate(cls, max_num_seqs: int, num_nodes: int, device: torch.device) -> TreeState:
        """Every request causal, every tree a chain."""
        return cls(
            num_nodes=num_nodes,
            ancestors=chain_ancestors(num_nodes, device).repeat(max_num_seqs, 1, 1),
            slots=torch.full((max_num_seqs,), CAUSAL, dtype=torch.int32, device=device),
        )

    @classmethod
    def over(cls, ancestors: torch.Tensor) -> TreeState:
        """Of the trees whose ancestor masks these are."""
        max_num_seqs, num_nodes, _ = ancestors.shape
        slots = torch.full((max_num_seqs,), CAUSAL, dtype=torch.int32, device=ancestors.device)
        return cls(num_nodes=num_nodes, ancestors=ancestors, slots=slots)

    @contextmanager
    def verifying(self, idx_mapping: torch.Tensor, num_drafted: int) -> Iterator[None]:
        """While open, metadata builders prepare tree attention. No host sync.

        Open it around the model state's `prepare_attn` of every verify batch, also where
        `for_capture`; never around the draft pass. Everything the forward pass reads is in
        persistent buffers or in the metadata when it closes.

        Args:
            idx_mapping: int [at least num_drafted], batch row -> request-state slot.
            num_drafted: leading batch rows with drafts; 0 at capture and in dummy runs.
        """
        self.slots[:num_drafted].copy_(idx_mapping[:num_drafted])
        self.slots[num_drafted:].fill_(CAUSAL)
        self.num_drafted, self.active = num_drafted, True
        try:
            yield
        finally:
            self.active = False


def chain_ancestors(num_nodes: int, device: torch.device) -> torch.Tensor:
    """int64 [V, ceil(V / 64)]: ancestor words of a chain, node j under node j - 1."""
    return pack_ancestors(torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril()).to(device)


def pack_ancestors(visible: torch.Tensor) -> torch.Tensor:
    """int64 [V, ceil(V / 64)] from bool [V, V] (node j, node i): oracle of the bit layout."""
    num_nodes = visible.shape[0]
    words = torch.zeros(num_nodes, -(-num_nodes // 64), dtype=torch.int64)
    for i in range(num_nodes):
        # 1 << 63 does not fit a signed word as a number, only as a bit.
        bit = -(2**63) if i % 64 == 63 else 1 << (i % 64)
        words[:, i // 64] |= torch.where(visible[:, i], bit, 0)
    return words


def unpack_ancestors(words: torch.Tensor) -> torch.Tensor:
    """bool [V, V] (node j, node i) from int64 [V, ceil(V / 64)]."""
    i = torch.arange(words.shape[0], device=words.device)
    return ((words[:, i // 64] >> (i % 64)) & 1).bool()


_installed: TreeState | None = None


def install(state: TreeState | None) -> None:
    """Make `state` the process's tree state; None takes it away."""
    global _installed
    _installed = state


def installed() -> TreeState | None:
    return _installed
