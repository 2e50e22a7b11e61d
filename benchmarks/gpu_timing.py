"""Time of GPU work by replaying it in a CUDA graph: no launch of the host's is in the figure."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(work: Callable[[], object], copies: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of `work`, `copies` times, after two runs of it to warm up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int = 8) -> float:
    """Of one replay, the mean of `replays` in a row."""
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / replays
