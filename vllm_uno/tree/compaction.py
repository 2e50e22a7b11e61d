"""KV compaction: the accepted path's keys and values, moved to where a chain's would lie.

Node j's KV lies in slot C + 1 + j; a path of m accepted nodes needs slots C + 1 ... C + m. So for
i = 1 ... m the KV of slot C + path[i] moves to slot C + i, in every layer, byte for byte, before
anything else of the next step reads or writes the cache.

vLLM 0.32 keeps one cache tensor a layer, of logical shape [blocks, heads, block size, content],
with K and V of a head side by side in the content, [K | V] (and with per-token-head scales
[K | scale | V | scale]). FlashAttention and Triton take any `KVCacheLayout`: head-major or
token-major blocks, layers of a block side by side, heads outermost; these are strides only,
which is all that this module looks at. Of caches that keep K and V apart, give both views.

Overlaps are safe: path ascends and path[i] >= i, so a slot that has been written is never read
later, and a program reads a few nodes whole before it writes them, in ascending order. At 32
requests, 6 accepted nodes and the Qwen3-8B cache (36 layers of 4 KB a token) 28 MB are read and
as much is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_uno.vllm_hooks.runner_api import BlockTables, load_ptr, tl, triton

_FIELDS = tl.constexpr(9)
_TILE = 4096  # units a program holds in registers
_HEADS = 8  # heads a program


@dataclass(frozen=True)
class KVCaches:
    """Where the caches lie: made once for a set of cache tensors, outside any capture.

    Attributes:
        table: int64 [caches, 9] on the device: address, KV group, heads, block size, content,
            then the strides of block, head, token and content; content and strides in units.
        unit: bytes moved as one: 8, or fewer for oddly shaped or aligned caches.
        heads, content: the largest of any cache.
        kept: the tensors, so that they outlive their addresses.
    """

    table: torch.Tensor
    unit: int
    heads: int
    content: int
    kept: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor], groups: Sequence[int]) -> KVCaches:
        """Of every layer's cache; layers that share one cache count once.

        Args:
            caches: [blocks, heads, block size, content] each, any strides and dtype: one tensor
                a layer, as vLLM binds it, or its K and V views where they lie apart.
            groups: of each, the index of its KV cache group, for the block table.

        Raises:
            ValueError: there is no cache, or one is no such view.
        """
        rows = []
        for cache, group in zip(caches, groups, strict=True):
            if cache.dim() != 4 or 0 in cache.shape:
                raise ValueError(f"KV cache of shape {list(cache.shape)}, not [B, H, N, content]")
            size = cache.element_size()
            _, heads, tokens, content = cache.shape
            # A dimension of one has any stride.
            strides = [
                s * size if n > 1 else 0 for n, s in zip(cache.shape, cache.stride(), strict=True)
            ]
            rows.append([cache.data_ptr(), group, heads, tokens, content * size, *strides, size])
        if not rows:
            raise ValueError("no KV cache to compact")
        # Elements that lie apart are moved one by one, anything else in words.
        apart = {size for *_, stride, size in rows if stride not in (0, size)}
        sizes = sorted(apart)[:1] or [8, 4, 2, 1]
        fits = [u for u in sizes if not any(x % u for row in rows for x in (row[0], *row[4:8]))]
        if len(apart) > 1 or not fits:
            raise ValueError("KV caches of several dtypes whose content is not contiguous")
        unit = fits[0]
        table = []
        for address, group, heads, tokens, *spans, stride, size in rows:
            step = 1 if stride in (0, size) else stride // unit
            row = [address, group, heads, tokens, *(x // unit for x in spans), step]
            if row not in table:
                table.append(row)
        return cls(
            table=torch.tensor(table, dtype=torch.int64, device=caches[0].device),
            unit=unit,
            heads=max(row[2] for row in table),
            content=max(row[4] for row in table),
            kept=tuple(caches),
        )


@triton.jit
def _compact_kernel(
    table_ptr,
    path_ptr,
    path_stride,
    num_sampled_ptr,
    idx_mapping_ptr,
    idx_stride,
    positions_ptr,
    cu_num_logits_ptr,
    block_table_ptrs,
    block_table_strides,
    block_sizes_ptr,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    HEADS: tl.constexpr,
    CONTENT: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request * idx_stride).to(tl.int64)
    accepted = tl.load(num_sampled_ptr + request) - 1
    if (slot < 0) | (accepted <= 0):
        return
    context = tl.load(positions_ptr + tl.load(cu_num_logits_ptr + request)).to(tl.int64)

    fields = table_ptr + tl.program_id(0) * _FIELDS
    group = tl.load(fields + 1)
    tokens = tl.load(fields + 3)
    block_stride = tl.load(fields + 5)
    token_stride = tl.load(fields + 7)
    if UNIT == 8:
        cache = _load_cache_ptr(fields, tl.int64)
    elif UNIT == 4:
        cache = _load_cache_ptr(fields, tl.int32)
    elif UNIT == 2:
        cache = _load_cache_ptr(fields, tl.int16)
    else:
        cache = _load_cache_ptr(fields, tl.int8)
    block_table = load_ptr(block_table_ptrs + group, tl.int32)
    block_table += request * tl.load(block_table_strides + group)
    block_size = tl.load(block_sizes_ptr + group).to(tl.int64)

    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :, None]
    unit = tl.arange(0, CONTENT)[None, None, :]
    inside = (head < tl.load(fields + 2)) & (unit < tl.load(fields + 4))
    within = head * tl.load(fields + 6) + unit * tl.load(fields + 8)
    for first in range(1, accepted + 1, STEPS):
        i = first + tl.arange(0, STEPS)
        row = tl.load(path_ptr + slot * path_stride + i, mask=i <= accepted, other=0)
        moves = (i <= accepted) & (row > i)
        source = context + row
        target = context + i
        # vLLM's slot numbers count in its block size; the cache's own may be smaller.
        source_block = tl.load(block_table + source // block_size, mask=moves, other=0)
        target_block = tl.load(block_table + target // block_size, mask=moves, other=0)
        source = source_block.to(tl.int64) * block_size + source % block_size
        target = target_block.to(tl.int64) * block_size + target % block_size
        source = source // tokens * block_stride + source % tokens * token_stride
        target = target // tokens * block_stride + target % tokens * token_stride
        mask = moves[:, None, None] & inside
        data = tl.load(cache + source[:, None, None] + within, mask=mask)
        # Another thread's load of what this one stores to must have been done.
        tl.debug_barrier()
        tl.store(cache + target[:, None, None] + within, data, mask=mask)


@triton.jit
def _load_cache_ptr(ptr_to_ptr, elem_dtype):
    """vLLM's `load_ptr` promises 16 bytes of alignment, which a view within a cache may lack."""
    return tl.cast(tl.load(ptr_to_ptr).to(tl.uint64), tl.pointer_type(elem_dtype))


def compact_kv(
    caches: KVCaches,
    *,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    cu_num_logits: torch.Tensor,
    block_tables: BlockTables,
) -> None:
    """Move the accepted paths' KV of n requests; one launch, no host sync, nothing allocated.

    Args:
        path: int32 [max_num_reqs, V + 1], by slot, as `walk_trees` writes it.
        num_sampled: int32 [n]: accepted nodes + 1; with 1 or less (a prefill, a chunk of one)
            nothing moves.
        idx_mapping: int [n], batch row -> request-state slot, any stride; -1 moves nothing.
        positions: int64 [rows]: of the verify rows; a request's first is C.
        cu_num_logits: int32 [n + 1], where each request's rows begin in `positions`.
        block_tables: vLLM's; its `input_block_tables` are those of this batch.
    """
    num_reqs = num_sampled.shape[0]
    if num_reqs == 0:
        return
    heads = min(_HEADS, triton.next_power_of_2(caches.heads))
    content = triton.next_power_of_2(caches.content)
    grid = (caches.table.shape[0], num_reqs, triton.cdiv(caches.heads, heads))
    _compact_kernel[grid](
        caches.table,
        path,
        path.stride(0),
        num_sampled,
        idx_mapping,
        idx_mapping.stride(0),
        positions,
        cu_num_logits,
        block_tables.input_block_table_ptrs,
        block_tables.block_table_strides,
        block_tables.block_sizes_tensor,
        UNIT=caches.unit,
        STEPS=max(1, min(8, _TILE // (heads * content))),
        HEADS=heads,
        CONTENT=content,
        num_warps=4,
    )


def compact_reference(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    context: int,
    path: Sequence[int],
) -> None:
    """The kernel's oracle: one request, one cache, node by node, in place.

    Args:
        cache: [blocks, heads, tokens, content].
        block_table: int [blocks of the request], in blocks of `block_size` tokens.
        context: C.
        path: verify rows, 0 first.
    """
    tokens = cache.shape[2]

    def at(position: int) -> torch.Tensor:
        slot = int(block_table[position // block_size]) * block_size + position % block_size
        return cache[slot // tokens, :, slot % tokens]

    for i, row in enumerate(path):
        at(context + i).copy_(at(context + row).clone())
