"""The best-first builder: candidates of the draft rows -> a tree of V nodes, per request.

Node 0 is the clean token; a node of depth d is a candidate of draft row d. Nodes are taken in
the order of their total log-probability (the root's counts 0), then shallower, then lower rank
among the candidates, then lower token id, then lower parent: as SGLang's UNO. A child's total
never exceeds its parent's, so only the frontier has to be compared, and of the children of one
parent only the best one not yet taken: one pending child per parent, a step is one maximum
over V of them.

Every slot of the V is filled. Where the candidates run out (start-up refuses such settings)
and past the end of a given chain, node j is token 0 under node j - 1: as lawful as any other,
for verification accepts what the target samples, and nothing else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from vllm_uno.tree.candidates import Candidates
from vllm_uno.tree.keys import (
    NO_KEY,
    float_order,
    key_order,
    key_tie,
    order_float,
    pack_key,
)
from vllm_uno.tree.state import chain_ancestors
from vllm_uno.vllm_hooks.runner_api import tl, triton

MAX_NODES = 128

_NO_KEY = tl.constexpr(NO_KEY)


@dataclass(frozen=True)
class TreeBuffers:
    """The tree of each request, by request-state slot; persistent device buffers.

    A parent's index is below its child's, so any first nodes of a tree are a tree, too.

    Attributes:
        tokens: int32 [max_num_reqs, V].
        parents: int32 [max_num_reqs, V]; -1 for the root, node 0.
        depths: int32 [max_num_reqs, V]; 0 for the root, at most the node's index.
        ancestors: int64 [max_num_reqs, V, W], W = ceil(V / 64): bit i % 64 of word i // 64 is
            set for node i among node j's ancestors and for j itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def allocate(cls, max_num_reqs: int, num_nodes: int, device: torch.device) -> TreeBuffers:
        """Slots that were never drafted hold a chain of token 0."""
        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(f"a tree of {num_nodes} nodes: need 1 to {MAX_NODES}")
        node = torch.arange(num_nodes, dtype=torch.int32)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.expand(max_num_reqs, *x.shape).contiguous().to(device)

        return cls(
            tokens=rows(torch.zeros_like(node)),
            parents=rows(node - 1),
            depths=rows(node),
            ancestors=rows(chain_ancestors(num_nodes, torch.device("cpu"))),
        )


# Not specialised: or batches of 1, of 16, ... requests would compile anew.
@triton.jit(do_not_specialize=["num_reqs"])
def _build_kernel(
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ancestors_ptr,
    draft_tokens_ptr,
    draft_stride,
    idx_mapping_ptr,
    idx_stride,
    roots_ptr,
    roots_stride,
    is_chain_ptr,
    chain_tokens_ptr,
    chain_stride,
    chain_len,
    candidate_tokens_ptr,
    log_probs_ptr,
    num_reqs,
    B: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    HAS_CHAINS: tl.constexpr,
    REQS: tl.constexpr,
):
    # REQS requests side by side: 1 where compiled; the interpreter's time is by operation.
    request = (tl.program_id(0) * REQS + tl.arange(0, REQS)).to(tl.int64)[:, None]
    real = request < num_reqs
    slot = tl.load(idx_mapping_ptr + request * idx_stride, mask=real, other=-1).to(tl.int64)
    live = slot >= 0
    node = tl.arange(0, NODES)[None, :]

    # Of each node: its total, the rank of its pending child and that child's keys, of which the
    # second decides where the first are equal. The root's first child is pending.
    root = tl.load(roots_ptr + request * roots_stride, mask=live, other=0).to(tl.int32)
    tokens = tl.where(node == 0, root, 0)
    parents = tl.full((REQS, NODES), -1, tl.int32)
    depths = tl.zeros((REQS, NODES), tl.int32)
    totals = tl.zeros((REQS, NODES), tl.float32)
    ranks = tl.zeros((REQS, NODES), tl.int32)
    keys = tl.full((REQS, NODES), _NO_KEY, tl.int64)
    ties = tl.full((REQS, NODES), _NO_KEY, tl.int64)
    renewed = live & (node == 0)

    word = tl.arange(0, WORDS)[None, None, :]
    own_word = (node // 64)[:, :, None] == word
    own_bit = tl.where(own_word, tl.full((1, 1, 1), 1, tl.int64) << (node % 64)[:, :, None], 0)
    ancestors = tl.where((node == 0)[:, :, None], own_bit, tl.zeros((REQS, 1, 1), tl.int64))
    depth = tl.zeros((REQS, 1), tl.int32)
    for taken in range(1, V):
        # Pending children of the node just taken and of its parent. Row d has those of
        # depth d + 1.
        there = renewed & (ranks < K) & (depths < B - 1)
        at = (request * (B - 1) + depths) * K + ranks
        log_prob = tl.load(log_probs_ptr + at, mask=there, other=float("-inf"))
        child = tl.load(candidate_tokens_ptr + at, mask=there, other=0)
        total = totals + log_prob
        total = tl.where(total != total, float("-inf"), total)
        key = pack_key(float_order(total), ((depths + 1) << 16) | ranks)
        keys = tl.where(renewed, tl.where(there, key, _NO_KEY), keys)
        ties = tl.where(renewed, pack_key(0 - child, node), ties)

        # Take the best.
        best = tl.max(keys, axis=1)[:, None]
        tie = tl.max(tl.where(keys == best, ties, _NO_KEY), axis=1)[:, None]
        found = best != _NO_KEY
        parent = tl.where(found, key_tie(tie), taken - 1)
        depth = tl.where(found, key_tie(best) >> 16, depth + 1)
        is_parent = node == parent
        inherited = tl.sum(tl.where(is_parent[:, :, None], ancestors, 0), axis=1)[:, None, :]
        new = node == taken
        tokens = tl.where(new, tl.where(found, 0 - key_order(tie), 0), tokens)
        parents = tl.where(new, parent, parents)
        depths = tl.where(new, depth, depths)
        ancestors = tl.where(new[:, :, None], inherited | own_bit, ancestors)
        totals = tl.where(new, order_float(key_order(best)), totals)
        ranks = tl.where(is_parent, ranks + 1, ranks)
        renewed = (new | is_parent) & found

    if HAS_CHAINS:
        chain = tl.load(is_chain_ptr + request, mask=live, other=0) != 0
        given = tl.load(
            chain_tokens_ptr + request * chain_stride + node,
            mask=chain & (node < chain_len),
            other=0,
        )
        tokens = tl.where(chain, given.to(tl.int32), tokens)
        parents = tl.where(chain, node - 1, parents)
        depths = tl.where(chain, node, depths)
        # All bits up to the node's own (2 << 63 is 0), all of the words before, none after.
        line = tl.where(own_word, (own_bit << 1) - 1, -1)
        line = tl.where((node // 64)[:, :, None] < word, 0, line)
        ancestors = tl.where(chain[:, :, None], line, ancestors)

    out = slot * V + node
    mask = live & (node < V)
    tl.store(tokens_ptr + out, tokens, mask=mask)
    tl.store(parents_ptr + out, parents, mask=mask)
    tl.store(depths_ptr + out, depths, mask=mask)
    num_words = (V + 63) // 64
    tl.store(
        ancestors_ptr + out[:, :, None] * num_words + word,
        ancestors,
        mask=mask[:, :, None] & (word < num_words),
    )
    draft = tl.where(live, tokens, 0).to(tl.int64)
    tl.store(draft_tokens_ptr + request * draft_stride + node, draft, mask=real & (node < V))


def build_trees(
    out: TreeBuffers,
    draft_tokens: torch.Tensor,
    candidates: Candidates,
    *,
    idx_mapping: torch.Tensor,
    roots: torch.Tensor,
    is_chain: torch.Tensor | None = None,
    chain_tokens: torch.Tensor | None = None,
) -> None:
    """Write the trees of n requests to their slots of `out`, and their tokens for vLLM.

    One launch, nothing allocated, no host sync: may be captured.

    Args:
        draft_tokens: int64 [n, V], written: node tokens in node order; 0 for inactive requests.
        candidates: of the same n requests, by batch row.
        idx_mapping: int [n], batch row -> request-state slot, any stride; -1 for inactive
            requests, for which no slot is written.
        roots: int [n], any stride: each request's clean token.
        is_chain: bool [n]: requests that take `chain_tokens` instead (node 0 included).
        chain_tokens: int64 [n, any width], of which up to V count; token 0 past its width.
    """
    num_reqs, num_nodes = draft_tokens.shape
    _, noise_rows, top_k = candidates.tokens.shape
    assert out.tokens.shape[1] == num_nodes and draft_tokens.stride(1) == 1
    assert num_reqs <= candidates.tokens.shape[0] or noise_rows == 0
    assert (is_chain is None) == (chain_tokens is None)
    if num_reqs == 0:
        return
    reqs = 1 if draft_tokens.is_cuda else min(16, triton.next_power_of_2(num_reqs))
    _build_kernel[(triton.cdiv(num_reqs, reqs),)](
        out.tokens,
        out.parents,
        out.depths,
        out.ancestors,
        draft_tokens,
        draft_tokens.stride(0),
        idx_mapping,
        idx_mapping.stride(0),
        roots,
        roots.stride(0),
        is_chain,
        chain_tokens,
        0 if chain_tokens is None else chain_tokens.stride(0),
        0 if chain_tokens is None else chain_tokens.shape[1],
        candidates.tokens,
        candidates.log_probs,
        num_reqs,
        B=noise_rows + 1,
        K=top_k,
        V=num_nodes,
        WORDS=1 if num_nodes <= 64 else 2,
        NODES=triton.next_power_of_2(num_nodes),
        HAS_CHAINS=is_chain is not None,
        REQS=reqs,
        num_warps=1,
    )


def tree_reference(
    root: int, tokens: np.ndarray, log_probs: np.ndarray, num_nodes: int
) -> tuple[list[int], list[int], list[int]]:
    """The builder's oracle, of one request, by a heap that holds *every* child of taken nodes.

    Args:
        root: the clean token.
        tokens, log_probs: [B - 1, K], of draft rows 1 ... B - 1; totals are summed in float32.

    Returns:
        tokens, parents and depths of the V nodes.
    """
    log_probs = np.where(np.isnan(log_probs), -np.inf, log_probs).astype(np.float32)
    rows, top_k = tokens.shape
    nodes, parents, depths = [root], [-1], [0]
    totals = [np.float32(0)]
    heap: list[tuple[float, int, int, int, int]] = []
    while len(nodes) < num_nodes:
        parent = len(nodes) - 1
        if depths[parent] < rows:
            for rank in range(top_k):
                total = totals[parent] + log_probs[depths[parent], rank]
                token = int(tokens[depths[parent], rank])
                heapq.heappush(heap, (-float(total), depths[parent] + 1, rank, token, parent))
        if not heap:
            parents += range(parent, num_nodes - 1)
            depths += range(depths[parent] + 1, depths[parent] + num_nodes - parent)
            nodes += [0] * (num_nodes - 1 - parent)
            break
        negated, depth, _, token, parent = heapq.heappop(heap)
        nodes.append(token)
        parents.append(parent)
        depths.append(depth)
        totals.append(np.float32(-negated))
    return nodes, parents, depths


def ancestors_reference(parents: torch.Tensor) -> torch.Tensor:
    """Ancestor masks int64 [n, V, W] of parents [n, V], as `TreeBuffers.ancestors`."""
    num_words = (parents.shape[1] + 63) // 64
    masks = []
    for row in parents.tolist():
        bits: list[int] = []
        for node, parent in enumerate(row):
            bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
        masks.append([[b >> 64 * w & (2**64 - 1) for w in range(num_words)] for b in bits])
    return torch.from_numpy(np.array(masks, dtype=np.uint64).view(np.int64))
