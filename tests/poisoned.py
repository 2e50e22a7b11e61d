"""Memory of a GPU in which a value that was not written shows."""

from __future__ import annotations

from collections.abc import Callable

import torch


def poison() -> None:
    """Fills free memory that the next allocations get."""
    blocks = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(6, 24)]
    del blocks


def check_a_thousand_replays(work: Callable[[], torch.Tensor]) -> None:
    """A graph of `work` gives, between poisonings, what `work` gives, bit for bit."""
    want = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    for number in range(1000):
        if number % 100 == 0:
            poison()
            got.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
