"""The verify rows of trees: their positions, and the tokens they are computed on.

vLLM numbers a request's rows C, C + 1, ... and finds their KV slots by that. A node's *position*
is its depth's: what rotary embeddings, noise and position-dependent sampling parameters must see
to be those of the plain run. So once the slots are known, the positions of node rows are written
over with C + 1 + depth, in vLLM's own buffer, which the verify graphs read.
"""

from __future__ import annotations

import torch

from vllm_uno.vllm_hooks.runner_api import InputBatch, tl, triton


@triton.jit
def _depth_positions_kernel(
    positions_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    depths_ptr,
    V: tl.constexpr,
    NODES: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    end = tl.load(query_start_loc_ptr + request + 1)
    rows = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request)
    first = end - rows
    node = tl.arange(0, NODES)
    mask = (node < V) & (node < rows - 1)
    depth = tl.load(depths_ptr + slot * V + node, mask=mask, other=0)
    context = tl.load(positions_ptr + first)
    tl.store(positions_ptr + first + 1 + node, context + 1 + depth, mask=mask)


def write_depth_positions(batch: InputBatch, num_drafted: int, depths: torch.Tensor) -> None:
    """Give the node rows of the leading requests their depths' positions, in place.

    One launch; after vLLM has computed the slots and before the forward pass.

    Args:
        batch: a verify batch.
        num_drafted: leading requests that carry drafts.
        depths: int32 [max_num_reqs, V], by request-state slot.
    """
    if num_drafted == 0:
        return
    num_nodes = depths.shape[1]
    _depth_positions_kernel[(num_drafted,)](
        batch.positions,
        batch.query_start_loc,
        batch.cu_num_logits,
        batch.idx_mapping,
        depths,
        V=num_nodes,
        NODES=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )


# Not specialised: or batches of 16 rows would compile anew.
@triton.jit(do_not_specialize=["num_rows"])
def _gather_rows_kernel(
    tokens_ptr,
    pos_ptr,
    input_ids_ptr,
    positions_ptr,
    logits_indices_ptr,
    slots_ptr,
    local_pos_ptr,
    prefill_len_ptr,
    num_rows,
    N: tl.constexpr,
):
    row = tl.program_id(0) * N + tl.arange(0, N)
    mask = row < num_rows
    at = tl.load(logits_indices_ptr + row, mask=mask, other=0)
    local = tl.load(local_pos_ptr + row, mask=mask, other=0)
    first = tl.load(logits_indices_ptr + row - local, mask=mask, other=0)
    slot = tl.load(slots_ptr + row, mask=mask, other=0)
    context = tl.load(positions_ptr + first, mask=mask, other=0)
    prefill_len = tl.load(prefill_len_ptr + slot, mask=mask, other=0)
    # Drafts come only from requests past their prefill: in a step that starts within it they
    # are placeholders.
    placeholder = (local > 0) & (context < prefill_len)
    token = tl.load(input_ids_ptr + at, mask=mask, other=0)
    tl.store(tokens_ptr + row, tl.where(placeholder, -1, token), mask=mask)
    tl.store(pos_ptr + row, tl.load(positions_ptr + at, mask=mask, other=0), mask=mask)


def gather_rows(batch: InputBatch, prefill_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row with logits was computed on.

    Args:
        batch: a verify batch, its positions those of depths.
        prefill_len: int32 [max_num_reqs], by request-state slot.

    Returns:
        tokens int32 [rows], -1 for placeholders that vLLM put in a draft's place, and
        positions int64 [rows].
    """
    num_rows = batch.logits_indices.shape[0]
    tokens = batch.input_ids.new_empty(num_rows)
    pos = batch.positions.new_empty(num_rows)
    width = 1024
    _gather_rows_kernel[(triton.cdiv(num_rows, width),)](
        tokens,
        pos,
        batch.input_ids,
        batch.positions,
        batch.logits_indices,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        prefill_len,
        num_rows,
        N=width,
    )
    return tokens, pos
