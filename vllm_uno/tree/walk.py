"""The walk: which nodes of a tree the target's own samples go through.

Verify rows of a request: row 0 is the seed, row j + 1 node j. The target has sampled one token
at every row. From row 0, if a child of the row's node carries the row's token, the walk goes on
at that child's row; else it ends. It emits the tokens of the rows it has passed.

As no two children of a node carry the same token (candidates of one row are distinct, a filling
node is an only child), at most one child matches, and a node is accepted exactly if it and all
its ancestors match their parents' rows: one test of ancestor masks per node, without a loop, so
nothing in the buffers can make it hang.

A row's token is compared as it was verified (vLLM's `draft_sampled`), not as it is in the tree
buffers: rows that vLLM padded with placeholders carry -1, which matches nothing. A request with
fewer than V + 1 rows walks the nodes that have one; with one row, a prefill's, it emits that
row's token.
"""

from __future__ import annotations

import torch

from vllm_uno.tree.builder import TreeBuffers
from vllm_uno.vllm_hooks.runner_api import tl, triton


@triton.jit
def _walk_kernel(
    path_ptr,
    num_sampled_ptr,
    sampled_ptr,
    sampled_stride,
    target_ptr,
    row_tokens_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    idx_stride,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    V: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request * idx_stride).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + request + 1) - start).to(tl.int32)
    i = tl.arange(0, ROWS)
    path_at = path_ptr + slot * (V + 1)
    sampled_at = sampled_ptr + request * sampled_stride
    if (slot < 0) | (num_rows <= 0):
        tl.store(num_sampled_ptr + request, 0)
        tl.store(sampled_at + i, tl.zeros((ROWS,), tl.int64), mask=i <= V)
        tl.store(path_at + i, tl.zeros((ROWS,), tl.int32), mask=(i <= V) & (slot >= 0))
        return

    node = tl.arange(0, NODES)
    there = (node < V) & (node + 1 < num_rows)
    parent = tl.load(parents_ptr + slot * V + node, mask=there, other=-1)
    depth = tl.load(depths_ptr + slot * V + node, mask=there, other=0)
    token = tl.load(row_tokens_ptr + start + node + 1, mask=there, other=-1).to(tl.int64)
    there = there & (parent >= -1) & (parent < node) & (token >= 0)
    wanted = tl.load(target_ptr + start + parent + 1, mask=there, other=-2)
    matches = there & (wanted == token)
    accepted = matches
    for word in tl.static_range(NUM_WORDS):
        bit = tl.full((NODES,), 1, tl.int64) << (node % 64)
        matching = tl.sum(tl.where(matches & (node // 64 == word), bit, 0), axis=0)
        at = (slot * V + node) * NUM_WORDS + word
        ancestors = tl.load(ancestors_ptr + at, mask=there, other=0)
        accepted = accepted & ((ancestors & ~matching) == 0)

    # The accepted nodes' depths are 0, 1, ... in node order.
    accepted = accepted & (depth >= 0) & (depth < V)
    length = tl.sum(accepted.to(tl.int32), axis=0)
    last = tl.max(tl.where(accepted, node + 1, 0), axis=0)
    tl.store(path_at + depth + 1, node + 1, mask=accepted)
    tl.store(path_at + i, tl.zeros((ROWS,), tl.int32), mask=(i == 0) | ((i > length) & (i <= V)))
    tl.store(sampled_at + depth, token, mask=accepted)
    bonus = tl.load(target_ptr + start + last)
    rest = tl.where(i == length, bonus, tl.zeros((ROWS,), tl.int64))
    tl.store(sampled_at + i, rest, mask=(i >= length) & (i <= V))
    tl.store(num_sampled_ptr + request, length + 1)


def walk_trees(
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    sampled: torch.Tensor,
    *,
    target_tokens: torch.Tensor,
    row_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    trees: TreeBuffers,
) -> None:
    """Walk the trees of n requests; one launch, nothing allocated, no host sync.

    Args:
        path: int32 [max_num_reqs, V + 1], written by slot: the verify rows of the path, the seed's
            row 0 first; 0 past its end.
        num_sampled: int32 [n], written: accepted nodes + 1; 0 for slot -1 or no rows.
        sampled: int64 [n, V + 1], written: tokens along the path; 0 past its end.
        target_tokens: int64 [rows], what the target samples at each verify row.
        row_tokens: int [rows], the token each row was computed on; -1 for a placeholder. Those
            of first rows are not read.
        cu_num_logits: int32 [n + 1], where each request's rows begin.
        idx_mapping: int [n], batch row -> request-state slot, any stride.
        trees: the trees that the rows are of.
    """
    num_reqs, num_nodes = sampled.shape[0], sampled.shape[1] - 1
    assert trees.parents.shape[1] == num_nodes and path.shape[1] == num_nodes + 1
    assert path.is_contiguous() and sampled.stride(1) == 1
    if num_reqs == 0:
        return
    _walk_kernel[(num_reqs,)](
        path,
        num_sampled,
        sampled,
        sampled.stride(0),
        target_tokens,
        row_tokens,
        cu_num_logits,
        idx_mapping,
        idx_mapping.stride(0),
        trees.parents,
        trees.depths,
        trees.ancestors,
        V=num_nodes,
        NUM_WORDS=trees.ancestors.shape[2],
        NODES=triton.next_power_of_2(num_nodes),
        ROWS=triton.next_power_of_2(num_nodes + 1),
        num_warps=1,
    )


def walk_reference(
    target_tokens: list[int], row_tokens: list[int], parents: list[int]
) -> tuple[list[int], list[int]]:
    """The kernel's oracle, of one request, step by step.

    Args:
        target_tokens, row_tokens: of the request's verify rows.
        parents: of the tree's nodes.

    Returns:
        path (verify rows, 0 first) and the tokens sampled along it.
    """
    path = [0]
    while True:
        children = [
            node + 1
            for node, parent in enumerate(parents[: len(row_tokens) - 1])
            if parent + 1 == path[-1] and row_tokens[node + 1] == target_tokens[path[-1]]
        ]
        if not children:
            return path, [target_tokens[row] for row in path]
        (child,) = children
        path.append(child)
