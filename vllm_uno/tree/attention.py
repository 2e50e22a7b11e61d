"""Attention of verify rows that form a tree: three versions of one operator.

A request's n verify rows lie together in the batch: row 0 is its last emitted token at position
C = seq_len - n, row j+1 is node j of its tree, whose KV lies in cache slot C+1+j. Every row attends
to the C+1 positions up to and with row 0; a node's row also to its ancestors' rows and itself:

    out[row] = softmax(scale * q[row] . k[visible]) v[visible]

Row 0 counts as context, because every row sees it: the context is never empty, and what is left
for the mask is the V x V square of the nodes. A request without a tree (slot CAUSAL) attends
causally; one without rows (a graph's padding) is left alone.

    tree_attention_reference   plain PyTorch, fp32 inside: the oracle, and the CPU backend's code
    tree_attention_triton      any device: flash decoding over splits of the context, the nodes in
                               the last split, then a merge by log-sum-exp
    tree_attention_flash       FlashAttention over the context, then one small kernel that adds the
                               nodes in place

None reads KV slots outside a request's seq_len, or block-table entries past them. Numbers that
change from step to step are no compile-time constants: contexts of 1 to 128k run the same code.

Split attention and merging by log-sum-exp follow Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_uno.tree.state import unpack_ancestors
from vllm_uno.vllm_hooks.runner_api import tl, triton

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class TreeBatch:
    """Requests to attend for.

    Attributes:
        query_start_loc: int32 [n + 1], a request's first row of the query.
        seq_lens: int32 [n], positions with KV, the request's rows included.
        block_table: int32 [n, blocks].
        ancestors: int64 [slots, V, ceil(V / 64)]: see `TreeState`.
        slots: int32 [at least n]: see `TreeState`.
        max_rows: the most rows of any request, at most V + 1; a host number.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    ancestors: torch.Tensor
    slots: torch.Tensor
    max_rows: int


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeBatch,
    scale: float,
    out: torch.Tensor,
) -> None:
    """The operator in plain PyTorch, one request at a time.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim], any strides; values likewise.
        batch: the requests.
        scale: factor of the scores.
        out: [tokens, heads, head_dim], written for the requests' rows only.
    """
    block_size = key_cache.shape[1]
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        if starts[r] == starts[r + 1]:
            continue
        blocks = batch.block_table[r, : -(-length // block_size)].long()
        keys = key_cache[blocks].flatten(0, 1)[:length]
        values = value_cache[blocks].flatten(0, 1)[:length]
        visible = visible_positions(batch, r, rows.stop - rows.start, length)
        out[rows] = attend(query[rows], keys, values, visible, scale).to(out.dtype)


def visible_positions(batch: TreeBatch, request: int, rows: int, length: int) -> torch.Tensor:
    """bool [rows, length]: which positions each verify row of a request attends to."""
    context = max(length - rows + 1, 0)
    slot = int(batch.slots[request])
    if slot < 0:
        nodes = torch.ones(rows - 1, rows - 1, dtype=torch.bool).tril()
    else:
        nodes = unpack_ancestors(batch.ancestors[slot])[: rows - 1, : rows - 1]
    visible = torch.zeros(rows, length, dtype=torch.bool, device=batch.slots.device)
    visible[:, :context] = True
    visible[1:, context:] = nodes[:, : length - context]
    return visible


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """fp32 [rows, heads, head_dim]: attention of one request, masked; 0 where nothing is visible.

    Args:
        query: [rows, heads, head_dim].
        keys: [length, kv_heads, head_dim], values likewise; heads are consecutive by KV head.
        visible: bool [rows, length].
        scale: factor of the scores.
    """
    rows, heads, dim = query.shape
    grouped = query.float().view(rows, keys.shape[1], -1, dim)
    scores = torch.einsum("rkgd,lkd->kgrl", grouped, keys.float()) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return torch.einsum("kgrl,lkd->rkgd", weights, values.float()).reshape(rows, heads, dim)


@triton.jit
def _online_softmax_step(q, k, v, visible, best, total, acc, scale_log2):
    """Adds keys [D, N] and values [N, D] to the running softmax of rows [M]."""
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(best - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _load_kv(
    k_ptr,
    v_ptr,
    table_ptr,
    position,
    exists,
    d,
    in_head,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    KV_BLOCK: tl.constexpr,
):
    """Keys [D, N] and values [N, D] of one head at positions [N]; 0 where none exists."""
    block = tl.load(table_ptr + position // KV_BLOCK, mask=exists, other=0).to(tl.int64)
    offset = position % KV_BLOCK
    k_row = k_ptr + block * k_block_stride + offset * k_slot_stride
    v_row = v_ptr + block * v_block_stride + offset * v_slot_stride
    k = tl.load(k_row[None, :] + d[:, None], mask=exists[None, :] & in_head[:, None], other=0.0)
    v = tl.load(v_row[:, None] + d[None, :], mask=exists[:, None] & in_head[None, :], other=0.0)
    return k, v


@triton.jit
def _visible_nodes(
    ancestors_ptr,
    slot,
    node,
    first,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
):
    """[M, NODE_BLOCK]: which of nodes first, first + 1, ... the rows of `node` [M] see.

    NODE_BLOCK divides 64 and `first`, so that one word holds them all.
    """
    i = tl.arange(0, NODE_BLOCK)
    has_tree = (slot >= 0) & (node >= 0) & (node < V)
    word_index = (tl.maximum(slot, 0).to(tl.int64) * V + node) * WORDS + first // 64
    word = tl.load(ancestors_ptr + word_index, mask=has_tree, other=0)
    bits = (word[:, None] >> ((first % 64) + i)[None, :].to(tl.int64)) & 1
    causal = (first + i)[None, :] <= node[:, None]
    return tl.where(slot >= 0, bits != 0, causal)


# Not specialised: what changes between batches must not compile anew.
@triton.jit(do_not_specialize=["num_splits", "num_tokens", "table_stride"])
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    ancestors_ptr,
    slots_ptr,
    scale_log2,
    num_splits,
    num_tokens,
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    FINAL: tl.constexpr,
):
    split = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    kv_head = tl.program_id(1).to(tl.int64)  # its offset may not fit 32 bits
    request = tl.program_id(2)

    start = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - start
    if tile * BLOCK_M >= num_rows * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    slot = tl.load(slots_ptr + request)
    context = tl.maximum(seq_len - num_rows + 1, 0)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = row < num_rows
    token = (start + row).to(tl.int64)
    d = tl.arange(0, D_PAD)
    in_head = d < D
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)

    per_split = tl.cdiv(tl.cdiv(context, num_splits), BLOCK_N) * BLOCK_N
    low = split * per_split
    high = tl.minimum(low + per_split, context)
    last = split == num_splits - 1
    if (low < high) | last:
        q_offset = token * q_token_stride + head * q_head_stride
        mask = is_row[:, None] & in_head[None, :]
        q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
        for begin in range(low, high, BLOCK_N):
            position = begin + tl.arange(0, BLOCK_N)
            exists = position < high
            k, v = _load_kv(
                k_ptr, v_ptr, table_ptr, position, exists, d, in_head,
                k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, KV_BLOCK,
            )  # fmt: skip
            best, total, acc = _online_softmax_step(
                q, k, v, exists[None, :], best, total, acc, scale_log2
            )
        if last:
            for first in range(0, num_rows - 1, NODE_BLOCK):
                position = context + first + tl.arange(0, NODE_BLOCK)
                exists = position < seq_len
                k, v = _load_kv(
                    k_ptr, v_ptr, table_ptr, position, exists, d, in_head,
                    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, KV_BLOCK,
                )  # fmt: skip
                seen = _visible_nodes(ancestors_ptr, slot, row - 1, first, V, WORDS, NODE_BLOCK)
                best, total, acc = _online_softmax_step(
                    q, k, v, seen & exists[None, :], best, total, acc, scale_log2
                )

    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    mask = is_row[:, None] & in_head[None, :]
    if FINAL:
        out_offset = token * out_token_stride + head * out_head_stride
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_offset[:, None] + d[None, :], out, mask=mask)
    else:
        # An empty split leaves its part of partial_out unwritten: lse -inf says so.
        lse = tl.where(total > 0, best + tl.log2(divisor), float("-inf"))
        index = (split.to(tl.int64) * num_tokens + token) * HEADS + head
        tl.store(partial_lse_ptr + index, lse, mask=is_row)
        partial = partial_out_ptr + index[:, None] * D + d[None, :]
        tl.store(partial, acc, mask=mask & (lse > float("-inf"))[:, None])


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "num_tokens"])
def _merge_splits_kernel(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    query_start_loc_ptr,
    num_reqs,
    num_splits,
    num_tokens,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    token = tl.program_id(0)
    # Tokens past the last request are a graph's padding.
    if token >= tl.load(query_start_loc_ptr + num_reqs):
        return
    token = token.to(tl.int64)
    g = tl.arange(0, GROUP_PAD)
    head = tl.program_id(1) * GROUP + g
    d = tl.arange(0, D_PAD)
    in_group = g < GROUP
    mask = in_group[:, None] & (d < D)[None, :]
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    for split in range(num_splits):
        index = (split * num_tokens + token) * HEADS + head
        lse = tl.load(partial_lse_ptr + index, mask=in_group, other=float("-inf"))
        written = mask & (lse > float("-inf"))[:, None]
        partial = partial_out_ptr + index[:, None] * D + d[None, :]
        part = tl.load(partial, mask=written, other=0.0)
        new_best = tl.maximum(best, lse)
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay, weight = tl.exp2(best - shift), tl.exp2(lse - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        best = new_best
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offset = token * out_token_stride + head * out_head_stride
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + d[None, :], out, mask=mask)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def default_splits(programs: int, device: torch.device) -> int:
    """Splits of the context: two programs for each multiprocessor, known without the context."""
    return max(1, min(64, 2 * _num_multiprocessors(device) // programs))


def tree_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeBatch,
    scale: float,
    out: torch.Tensor,
    num_splits: int | None = None,
) -> None:
    """The operator as Triton kernels; arguments as for `tree_attention_reference`.

    Launches and scratch depend on shapes alone, so it can be captured in a CUDA graph and replayed
    with other contents of the batch's tensors.

    Args:
        query: [tokens, heads, head_dim], fp16, bf16 or fp32; the last dimension is dense.
        key_cache: [blocks, block_size, kv_heads, head_dim] of the same dtype; values likewise.
        batch: the requests.
        scale: factor of the scores.
        out: [tokens, heads, head_dim], written for the requests' rows only.
        num_splits: parts of the context worked on at a time; by the device's size if None.
    """
    tokens, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    num_reqs = batch.seq_lens.shape[0]
    if num_reqs == 0:
        return
    group = heads // kv_heads
    dim_pad = triton.next_power_of_2(dim)
    wide = query.dtype == torch.float32 or dim_pad > 128
    # By the largest tree, not by this batch's: each value is a variant to compile.
    most = (batch.ancestors.shape[1] + 1) * group
    block_m = min(32 if wide else 64, max(16, triton.next_power_of_2(most)))
    tiles = triton.cdiv(most, block_m)
    if num_splits is None:
        num_splits = default_splits(tiles * kv_heads * num_reqs, query.device)
    final = num_splits == 1
    rows = 0 if final else tokens
    partial_out = query.new_empty(num_splits, rows, heads, dim, dtype=torch.float32)
    partial_lse = query.new_empty(num_splits, rows, heads, dtype=torch.float32)
    _split_kernel[(num_splits * tiles, kv_heads, num_reqs)](
        query,
        key_cache,
        value_cache,
        out,
        partial_out,
        partial_lse,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.ancestors,
        batch.slots,
        scale * _LOG2_E,
        num_splits,
        tokens,
        batch.block_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        HEADS=heads,
        GROUP=group,
        D=dim,
        D_PAD=dim_pad,
        V=batch.ancestors.shape[1],
        WORDS=batch.ancestors.shape[2],
        KV_BLOCK=block_size,
        TILES=tiles,
        BLOCK_M=block_m,
        BLOCK_N=32 if wide else 64,
        NODE_BLOCK=_node_block(batch, wide),
        FINAL=final,
        num_warps=4,
        num_stages=_stages(query.dtype, dim_pad),
    )
    if final:
        return
    _merge_splits_kernel[(tokens, kv_heads)](
        out,
        partial_out,
        partial_lse,
        batch.query_start_loc,
        num_reqs,
        num_splits,
        tokens,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        D=dim,
        D_PAD=dim_pad,
        num_warps=4,
    )


def _stages(dtype: torch.dtype, dim_pad: int) -> int:
    """Key and value tiles in flight: what fits into 100 KiB of shared memory."""
    if dtype == torch.float32:
        return 1 if dim_pad > 128 else 2
    return 2 if dim_pad > 128 else 3


def _node_block(batch: TreeBatch, wide: bool) -> int:
    """Nodes worked on at a time: a power of two that divides 64, for one mask word."""
    nodes = triton.next_power_of_2(batch.ancestors.shape[1])
    return min(32 if wide else 64, max(16, nodes))


@triton.jit(do_not_specialize=["lse_head_stride", "table_stride"])
def _add_nodes_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    ancestors_ptr,
    slots_ptr,
    scale_log2,
    lse_head_stride,
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    LOG2_E: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)  # its offset may not fit 32 bits
    request = tl.program_id(2)

    start = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - start
    # Row 0 sees no node: its attention over the context is final.
    if tile * BLOCK_M >= (num_rows - 1) * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    slot = tl.load(slots_ptr + request)
    context = tl.maximum(seq_len - num_rows + 1, 0)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = 1 + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = row < num_rows
    token = (start + row).to(tl.int64)
    d = tl.arange(0, D_PAD)
    in_head = d < D
    mask = is_row[:, None] & in_head[None, :]
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride

    q_offset = token * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    for first in range(0, num_rows - 1, NODE_BLOCK):
        position = context + first + tl.arange(0, NODE_BLOCK)
        exists = position < seq_len
        k, v = _load_kv(
            k_ptr, v_ptr, table_ptr, position, exists, d, in_head,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, KV_BLOCK,
        )  # fmt: skip
        seen = _visible_nodes(ancestors_ptr, slot, row - 1, first, V, WORDS, NODE_BLOCK)
        best, total, acc = _online_softmax_step(
            q, k, v, seen & exists[None, :], best, total, acc, scale_log2
        )

    # Without context FlashAttention leaves nothing to count on: its version 2 writes +inf.
    has_context = context > 0
    lse_ptrs = lse_ptr + head.to(tl.int64) * lse_head_stride + token
    lse = tl.load(lse_ptrs, mask=is_row & has_context, other=float("-inf")) * LOG2_E
    out_ptrs = out_ptr + (token * out_token_stride + head * out_head_stride)[:, None] + d[None, :]
    of_context = tl.load(out_ptrs, mask=mask & has_context, other=0.0).to(tl.float32)
    new_best = tl.maximum(best, lse)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay, weight = tl.exp2(best - shift), tl.exp2(lse - shift)
    total = total * decay + weight
    acc = acc * decay[:, None] + of_context * weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def add_nodes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeBatch,
    scale: float,
    out: torch.Tensor,
    context_lse: torch.Tensor,
) -> None:
    """Turns attention over the context into attention over context and nodes, in place.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim]; values likewise.
        batch: the requests.
        scale: factor of the scores.
        out: [tokens, heads, head_dim]; on entry attention over the first `context_lens` positions.
        context_lse: fp32 [heads, tokens], natural log-sum-exp of that attention's scores.
    """
    heads, dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    num_reqs = batch.seq_lens.shape[0]
    group = heads // kv_heads
    rows = (batch.max_rows - 1) * group
    if num_reqs == 0 or rows == 0:
        return
    dim_pad = triton.next_power_of_2(dim)
    wide = query.dtype == torch.float32 or dim_pad > 128
    # Small tiles while they leave multiprocessors idle: this kernel is all latency.
    spare = 2 * _num_multiprocessors(query.device) >= triton.cdiv(rows, 32) * kv_heads * num_reqs
    block_m = 16 if spare or wide else 32
    _add_nodes_kernel[(triton.cdiv(rows, block_m), kv_heads, num_reqs)](
        query,
        key_cache,
        value_cache,
        out,
        context_lse,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.ancestors,
        batch.slots,
        scale * _LOG2_E,
        context_lse.stride(0),
        batch.block_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        LOG2_E=_LOG2_E,
        GROUP=group,
        D=dim,
        D_PAD=dim_pad,
        V=batch.ancestors.shape[1],
        WORDS=batch.ancestors.shape[2],
        KV_BLOCK=block_size,
        BLOCK_M=block_m,
        NODE_BLOCK=_node_block(batch, wide),
        num_warps=4,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["num_reqs", "padded_reqs"])
def _context_lens_kernel(
    out_ptr, query_start_loc_ptr, seq_lens_ptr, num_reqs, padded_reqs, BLOCK: tl.constexpr
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = r < num_reqs
    start = tl.load(query_start_loc_ptr + r, mask=real, other=0)
    rows = tl.load(query_start_loc_ptr + r + 1, mask=real, other=0) - start
    seq_len = tl.load(seq_lens_ptr + r, mask=real, other=0)
    context = tl.where(rows > 0, tl.maximum(seq_len - rows + 1, 0), 0)
    tl.store(out_ptr + r, context, mask=r < padded_reqs)


def write_context_lens(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor
) -> None:
    """out[r] = positions every row of request r sees: up to and with its row 0; 0 elsewhere.

    Args:
        query_start_loc: int32 [n + 1].
        seq_lens: int32 [n].
        out: int32 [at least n], filled with 0 past n.
    """
    size = out.shape[0]
    _context_lens_kernel[(triton.cdiv(size, 128),)](
        out, query_start_loc, seq_lens, seq_lens.shape[0], size, BLOCK=128
    )


def tree_attention_flash(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeBatch,
    scale: float,
    out: torch.Tensor,
    *,
    context_lens: torch.Tensor,
    max_context: int,
    **flash_options: Any,
) -> None:
    """The operator with vLLM's FlashAttention over the context; CUDA, fp16 or bf16.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim]; values likewise.
        batch: the requests.
        scale: factor of the scores.
        out: [tokens, heads, head_dim], written for the requests' rows only.
        context_lens: int32 [n], by `write_context_lens`.
        max_context: no context is longer; a host number.
        flash_options: for `flash_attn_varlen_func`: fa_version, num_splits, scheduler_metadata
            (of a non-causal call over `context_lens`), descale factors.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    _, lse, *_ = flash_attn_varlen_func(
        q=query,
        k=key_cache,
        v=value_cache,
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=batch.max_rows,
        seqused_k=context_lens,
        max_seqlen_k=max_context,
        softmax_scale=scale,
        causal=False,
        block_table=batch.block_table,
        return_softmax_lse=True,
        **flash_options,
    )
    add_nodes(query, key_cache, value_cache, batch, scale, out, lse)
