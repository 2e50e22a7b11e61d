"""Which batch sizes get CUDA graphs: few, for every graph takes time at every start.

Mixed batches (with prefills) run in PIECEWISE graphs, verification in FULL ones, the draft pass in
graphs of its own. On an 8B model they take 0.11, 0.07 and 0.1 s each to capture. A batch runs in
the next larger graph. Up to some 128 rows, where the GPU reads weights, padding is free; above, it
costs what it takes to fill a product's tiles (docs/decisions.md has both measured).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_CAPTURED_TOKENS = 2048
"""Ceiling of the sizes we add. FlashAttention 3 keeps a fixed split count, and its workspace, up to
the largest captured size, so it costs memory."""


@dataclass(frozen=True)
class GraphSizes:
    """Token counts to capture, ascending.

    Attributes:
        mixed: of batches with prefills.
        verify: of uniform verify batches, multiples of K + 1.
        all: these, and the largest draft: what vLLM is told.
        room: rows that the outputs of all graphs fit in.
    """

    mixed: list[int]
    verify: list[int]
    all: list[int]

    @property
    def room(self) -> int:
        return max(self.mixed[-1:] + self.verify[-1:], default=0)


def graph_sizes(
    largest: int,
    block_size: int,
    verify_rows: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    more: Iterable[int] = (),
) -> GraphSizes:
    """Sizes for an engine.

    Args:
        largest: of vLLM's own sizes.
        block_size: B.
        verify_rows: K + 1.
        more: sizes for mixed batches that are to be among them.
    """
    limit = min(MAX_CAPTURED_TOKENS, max_num_batched_tokens)
    moderate = range(640, 1025, 128)
    mixed = {1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, 513, 64), *moderate}
    mixed = {size for size in mixed if size < largest} | {largest, *more}
    if max_num_seqs * verify_rows > largest:
        # With a prompt's, verify rows of a moderate load are more than vLLM's largest size. An 8B
        # model's products pay up to 3.7 ms for the padding, smaller ones' launches take longer; a
        # larger batch takes longer than its launches.
        mixed |= {n for n in moderate if largest < n <= limit}
    most = min(max_num_seqs, limit // verify_rows)
    counts = {1, 2, 3, *range(4, 17, 2), *_from_16_on(most)}
    verify = {n * verify_rows for n in counts if n <= most}
    draft = min(max_num_seqs, limit // block_size) * block_size
    everything = mixed | verify | {draft}
    return GraphSizes(
        *(sorted(size for size in sizes if size > 0) for sizes in (mixed, verify, everything))
    )


def draft_graph_sizes(largest: int, block_size: int, max_num_seqs: int) -> list[int]:
    """Row counts of the draft pass to capture.

    Args:
        largest: token count that no graph may exceed.
        block_size: B.

    Returns:
        Multiples of B, ascending.
    """
    most = min(max_num_seqs, largest // block_size)
    step = 4 if block_size <= 8 else 2
    counts = {1, 2, *range(4, 17, step), *_from_16_on(most)}
    return [n * block_size for n in sorted(counts) if 0 < n <= most]


def _from_16_on(most: int) -> set[int]:
    """Numbers of requests, up to `most`, a quarter apart at most."""
    return {*range(16, 65, 4), *range(80, 129, 16), *range(160, most, 32), most}


def covered_requests(capture_sizes: list[int], rows: int, max_num_seqs: int) -> int:
    """Largest n such that every uniform batch of 1 ... n requests has a graph.

    Args:
        capture_sizes: captured token counts of the compilation config.
        rows: rows per request.
    """
    if not capture_sizes:
        return 0
    largest = capture_sizes[-1]
    fitting = [
        n
        for size in capture_sizes
        if (n := -(-size // rows)) * rows <= largest and n <= max_num_seqs
    ]
    return max(fitting, default=0)
