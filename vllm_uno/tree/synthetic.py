"""An imposed acceptance, for benchmarks: how many nodes are accepted is left to chance.

`rejection_sample_method: "synthetic"` with vLLM's `synthetic_acceptance_rates` (or `_length`):
rate i is that of accepting at least i + 1 nodes. Which nodes is of no interest, their tokens make
no sense; they are the last ones, so that the KV of every accepted node has to move, as it mostly
has with real trees.
"""

from __future__ import annotations

import torch

from vllm_uno.vllm_hooks.runner_api import murmur3_hash32, tl, triton

_DOMAIN = tl.constexpr(0x554E4F02)


@triton.jit
def _impose_kernel(
    path_ptr,
    num_sampled_ptr,
    sampled_ptr,
    sampled_stride,
    target_ptr,
    row_tokens_ptr,
    positions_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    seeds_ptr,
    rates_ptr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + request + 1) - start).to(tl.int32)
    i = tl.arange(0, ROWS)
    row_token = tl.load(row_tokens_ptr + start + i, mask=i < num_rows, other=-1)
    drafts = tl.sum(((i > 0) & (row_token >= 0)).to(tl.int32), axis=0)

    # One uniform number a cycle against unconditional rates: as many nodes on average.
    seed = tl.load(seeds_ptr + slot)
    context = tl.load(positions_ptr + start)
    u = murmur3_hash32(seed, context, context * 0, domain=_DOMAIN).to(tl.float32) * 2.0**-32
    rates = tl.load(rates_ptr + i, mask=i < V, other=0.0)
    accepted = tl.minimum(tl.sum((u < rates).to(tl.int32), axis=0), drafts)

    row = tl.where((i > 0) & (i <= accepted), num_rows - 1 - accepted + i, 0)
    tl.store(path_ptr + slot * (V + 1) + i, row, mask=i <= V)
    token = tl.load(row_tokens_ptr + start + num_rows - accepted + i, mask=i < accepted, other=0)
    last = tl.where(accepted > 0, num_rows - 1, 0)
    bonus = tl.load(target_ptr + start + last)
    emitted = tl.where(i < accepted, token.to(tl.int64), tl.where(i == accepted, bonus, bonus * 0))
    tl.store(sampled_ptr + request * sampled_stride + i, emitted, mask=i <= V)
    tl.store(num_sampled_ptr + request, accepted + 1)


def impose_paths(
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    sampled: torch.Tensor,
    *,
    target_tokens: torch.Tensor,
    row_tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    rates: torch.Tensor,
) -> None:
    """In the place of `walk_trees`: its outputs, of `rates` and not of the trees.

    Args:
        positions: int64 [rows], of the verify rows.
        seeds: int64 [max_num_reqs], by slot.
        rates: fp32 [V], non-increasing: of accepting at least i + 1 nodes.
    """
    num_reqs, num_nodes = sampled.shape[0], sampled.shape[1] - 1
    if num_reqs == 0:
        return
    _impose_kernel[(num_reqs,)](
        path,
        num_sampled,
        sampled,
        sampled.stride(0),
        target_tokens,
        row_tokens,
        positions,
        cu_num_logits,
        idx_mapping,
        seeds,
        rates,
        V=num_nodes,
        ROWS=triton.next_power_of_2(num_nodes + 1),
        num_warps=1,
    )
