"""A draft pass that reads part of the context (`uno_draft_context`).

With many requests and long contexts, most of a draft pass is reading the KV cache. A draft is
scratch, so its attention may see less: the first tokens, which models attend to whatever the text
(attention sinks; StreamingLLM, arXiv 2309.17453), and the last ones. Verification sees everything:
the output stays lossless, and what is lost is acceptance (self-speculation over such a cache:
MagicDec, arXiv 2408.11049).

Keys are cached with their rotary positions in them. So nothing of the cache is moved, and every
attention backend will do: the draft's block table leaves blocks out in the middle, and its sequence
is as much shorter.

    blocks of the request   0 1 2 3 4 5 6 7        seq_len 8 * 16 - 3
    of the draft pass       0       5 6 7          seq_len 4 * 16 - 3
"""

from __future__ import annotations

import torch

from vllm_uno.vllm_hooks.runner_api import BlockTables, tl, triton

SINK_BLOCKS = 1


@triton.jit
def _shorten_kernel(
    out_ptr,
    out_stride,
    seq_lens_ptr,
    table_ptr,
    table_stride,
    LAST: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    blocks = (seq_len + KV_BLOCK - 1) // KV_BLOCK
    dropped = tl.maximum(blocks - SINK - LAST, 0)
    kept = tl.minimum(blocks, SINK + LAST)
    for start in range(0, SINK + LAST, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = column < kept
        source = tl.where(column < SINK, column, column + dropped)
        block = tl.load(table_ptr + request * table_stride + source, mask=mask, other=0)
        tl.store(out_ptr + request * out_stride + column, block, mask=mask)
    tl.store(seq_lens_ptr + request, seq_len - dropped * KV_BLOCK)


class DraftBlocks:
    """Block tables of the draft pass's attention: the first block and the last ones.

    Stands in for vLLM's `BlockTables` where attention metadata is built.

    Args:
        block_tables: vLLM's, of one group.
        context: tokens before the seed that draft rows see at least, the sink not counted.
        block_size: B.

    Attributes:
        kept_blocks: at most, of a request.
        table: int32 [max_num_reqs, columns], persistent.
    """

    def __init__(self, block_tables: BlockTables, context: int, block_size: int) -> None:
        self._vllms = block_tables
        (whole,) = block_tables.input_block_tables
        (self._kv_block,) = block_tables.block_sizes
        # The rows B and `context` before them may begin anywhere in a block.
        last = -(-(context + block_size - 1) // self._kv_block) + 1
        self._last = min(last, whole.shape[1])
        self.kept_blocks = min(SINK_BLOCKS + self._last, whole.shape[1])
        # As wide as vLLM's, although fewer columns are read: backends may look at the width.
        self.table = torch.zeros_like(whole)
        self.cp_size = 1  # read where graphs refresh metadata; context parallelism is refused

    @property
    def input_block_tables(self) -> list[torch.Tensor]:
        """One for each group."""
        return [self.table]

    @property
    def max_seq_len(self) -> int:
        """Of a draft pass, its rows included."""
        return self.kept_blocks * self._kv_block

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Of the first requests, for a graph."""
        return (self.table[:num_reqs],)

    def shorten(self, seq_lens: torch.Tensor, num_reqs: int) -> None:
        """Make the tables of this batch, and its sequences as much shorter in place.

        Args:
            seq_lens: int32 [>= num_reqs], whole lengths including the draft rows.
            num_reqs: requests of the batch, whose vLLM block tables are gathered.
        """
        (whole,) = self._vllms.input_block_tables
        _shorten_kernel[(num_reqs,)](
            self.table,
            self.table.stride(0),
            seq_lens,
            whole,
            whole.stride(0),
            LAST=self._last,
            KV_BLOCK=self._kv_block,
            SINK=SINK_BLOCKS,
            COLUMNS=128,
        )


def shorten_reference(
    table: torch.Tensor, seq_lens: torch.Tensor, kv_block: int, last_blocks: int
) -> tuple[list[list[int]], torch.Tensor]:
    """The kernel's oracle.

    Args:
        table: int32 [n, columns].
        seq_lens: int32 [n].

    Returns:
        The blocks that each request's draft rows see, and their sequences' lengths [n].
    """
    tables, lengths = [], []
    for row, length in zip(table.tolist(), seq_lens.tolist(), strict=True):
        blocks = row[: -(-length // kv_block)]
        kept = blocks
        if len(blocks) > SINK_BLOCKS + last_blocks:
            kept = blocks[:SINK_BLOCKS] + blocks[len(blocks) - last_blocks :]
        tables.append(kept)
        lengths.append(length - (len(blocks) - len(kept)) * kv_block)
    return tables, torch.tensor(lengths, dtype=seq_lens.dtype)
