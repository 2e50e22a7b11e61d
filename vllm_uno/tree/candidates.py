"""The best K tokens of every noise row, with log-probabilities over the whole vocabulary.

A full sort of 152k logits a row would cost ten times its bytes. Instead, exactly and in
fixed shapes:

 1. One pass over the logits keeps the best token (highest logit, then lowest id) of each group
    of 256 tokens, and each split's maximum and sum of exponentials.
 2. A token among the row's best K lies in one of the K groups whose bests are best: were its
    group not among them, K other tokens would come before it. So one program a row takes the
    top K of the group bests, reads those groups again, takes by the same argument the top K of
    the vectors of 8 tokens they are made of, and the top K of those vectors' tokens. Ties need
    no care: a key holds the token id, no two are equal.

A group is one thread's own elements (vectors of 8, a stride apart), so pass 1 reduces in
registers and is bound by its bytes. Counts for a vocabulary of 151,936 in bf16, K = 32: 304 kB a
row read once, 5 kB of group bests written and read, 16 kB read again. Pass 1 takes fifteen
instructions a token, one exponential among them; pass 2 takes the best of 1,024 groups, 1,024
vectors and 256 tokens K times each, six instructions a token and two reductions a time.
(Triton's `topk` there came to 20,000 instructions a thread and a minute of compiling, and its
interpreter takes seconds for a row.) At B = 16, 15 rows a request: 4.6 MB at 1 request, 146 MB
at 32, which is 36 µs of reading at 4.1 TB/s.

Candidates are ranked by their logits, so ties by lower token id are of logits, and NaN counts
as -inf. A row without any finite logit, or with +inf, has log-probabilities -inf throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_uno.tree.keys import (
    NO_KEY,
    NO_ORDER,
    float_order,
    key_order,
    key_tie,
    order_float,
    pack_key,
)
from vllm_uno.vllm_hooks.runner_api import tl, triton

MAX_TOP_K = 128
TOP_K_WARPS = 4  # a row of pass 2, for up to 32 candidates

_VEC = 8  # tokens a vector: 16 bytes of a half-precision type
_STEPS = 32  # vectors a group
_LANES = 64  # groups a program of pass 1
_CHUNK = _LANES * _STEPS * _VEC
_NO_KEY = tl.constexpr(NO_KEY)
_NO_ORDER = tl.constexpr(NO_ORDER)
_LAST_TOKEN = tl.constexpr(2**31 - 1)
_LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class Candidates:
    """Candidates of the noise rows and the scratch of their kernels.

    Attributes:
        tokens: int32 [max_num_reqs, B - 1, K]: [r, d - 1] are those of draft row d (row 0 gives
            the root, which is sampled), best first.
        log_probs: float32, the same shape.
        group_best: int64 [max_rows, groups], scratch.
        split_max, split_sum: float32 [max_rows, splits], scratch.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    group_best: torch.Tensor
    split_max: torch.Tensor
    split_sum: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        block_size: int,
        top_k: int,
        vocab_size: int,
        device: torch.device,
        max_chunk_reqs: int | None = None,
    ) -> Candidates:
        """`max_chunk_reqs`: requests of one call, where logits come in chunks (scratch only).

        Raises:
            ValueError: K is not in 1 ... 128 or exceeds the vocabulary.
        """
        if not 1 <= top_k <= min(MAX_TOP_K, vocab_size):
            raise ValueError(
                f"{top_k} candidates a position: need 1 to {min(MAX_TOP_K, vocab_size)}"
            )
        rows = (max_chunk_reqs or max_num_reqs) * (block_size - 1)
        splits = triton.cdiv(vocab_size, _CHUNK)
        shape = (max_num_reqs, block_size - 1, top_k)
        return cls(
            tokens=torch.zeros(shape, dtype=torch.int32, device=device),
            log_probs=torch.full(shape, -math.inf, device=device),
            group_best=torch.empty(rows, splits * _LANES, dtype=torch.int64, device=device),
            split_max=torch.empty(rows, splits, device=device),
            split_sum=torch.empty(rows, splits, device=device),
        )


@triton.jit
def _row_temperature(temperature_ptr, slot):
    """T, with the greedy 0 as 1."""
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=1.0).to(tl.float32)
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _finite(x):
    """A maximum to subtract: that of nothing, -inf, as 0."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _group_best_kernel(
    group_best_ptr,
    split_max_ptr,
    split_sum_ptr,
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    idx_stride,
    temperature_ptr,
    vocab_size,
    B: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    out_row = tl.program_id(1).to(tl.int64)
    request = out_row // (B - 1)
    slot = tl.load(idx_mapping_ptr + request * idx_stride).to(tl.int64)
    if slot < 0:
        return
    row = request * B + out_row % (B - 1) + 1

    # A lane's tokens are one thread's own, TILE vectors of them in registers at a time.
    step = tl.arange(0, TILE)[:, None, None]
    lane = tl.arange(0, LANES)[None, :, None]
    element = tl.arange(0, VEC)[None, None, :]
    scale = 1.0 / _row_temperature(temperature_ptr, slot) * _LOG2_E
    best = tl.full((LANES,), float("-inf"), tl.float32)
    first = tl.full((LANES,), _LAST_TOKEN, tl.int32)
    mass = tl.zeros((LANES,), tl.float32)
    left = tl.cdiv(vocab_size - split * (STEPS * LANES * VEC), LANES * VEC)
    for start in range(0, tl.minimum(left, STEPS), TILE):
        token = split * (STEPS * LANES * VEC) + ((start + step) * LANES + lane) * VEC + element
        x = tl.load(
            logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")
        ).to(tl.float32)
        x = tl.where(x != x, float("-inf"), x)
        highest = tl.max(tl.max(x, axis=2), axis=0)
        at = tl.where(x == highest[None, :, None], token, _LAST_TOKEN)
        at = tl.min(tl.min(at, axis=2), axis=0)
        first = tl.where((highest > best) | (start == 0), at, first)
        highest = tl.maximum(best, highest)
        mass *= tl.exp2((best - _finite(highest)) * scale)
        e = tl.exp2((x - _finite(highest)[None, :, None]) * scale)
        mass += tl.sum(tl.sum(e, axis=2), axis=0)
        best = highest

    highest = tl.max(best, axis=0)
    mass = tl.sum(mass * tl.exp2((best - _finite(highest)) * scale), axis=0)
    group = split * LANES + tl.arange(0, LANES)
    tl.store(
        group_best_ptr + out_row * (num_splits * LANES) + group, pack_key(float_order(best), first)
    )
    tl.store(split_max_ptr + out_row * num_splits + split, highest)
    tl.store(split_sum_ptr + out_row * num_splits + split, mass)


@triton.jit
def _load_tokens(logits_ptr, row_start, token, vocab_size):
    """Orders of tokens' logits; `_NO_ORDER` past the vocabulary."""
    there = token < vocab_size
    x = tl.load(logits_ptr + row_start + token, mask=there, other=float("-inf")).to(tl.float32)
    return tl.where(there, float_order(tl.where(x != x, float("-inf"), x)), _NO_ORDER)


@triton.jit
def _take_best(order, token, K: tl.constexpr, K_PADDED: tl.constexpr):
    """The best K of [ROWS, N], one by one: orders and tokens [ROWS, K_PADDED], best first.

    Where there are fewer, `_NO_ORDER` and `_LAST_TOKEN`.
    """
    rank = tl.arange(0, K_PADDED)[None, :]
    orders = tl.full((order.shape[0], K_PADDED), _NO_ORDER, tl.int32)
    tokens = tl.full((order.shape[0], K_PADDED), _LAST_TOKEN, tl.int32)
    for i in range(K):
        best = tl.max(order, axis=1)[:, None]
        first = tl.min(tl.where(order == best, token, _LAST_TOKEN), axis=1)[:, None]
        order = tl.where(token == first, _NO_ORDER, order)
        orders = tl.where(rank == i, best, orders)
        tokens = tl.where(rank == i, first, tokens)
    return orders, tl.where(orders == _NO_ORDER, _LAST_TOKEN, tokens)


# Not specialised: or batches of 1, of 16, ... rows would compile anew.
@triton.jit(do_not_specialize=["num_rows"])
def _top_k_kernel(
    tokens_ptr,
    log_probs_ptr,
    group_best_ptr,
    split_max_ptr,
    split_sum_ptr,
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    idx_stride,
    temperature_ptr,
    num_rows,
    vocab_size,
    num_splits,
    B: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    request = out_row // (B - 1)
    slot = tl.load(idx_mapping_ptr + request * idx_stride, mask=out_row < num_rows, other=-1).to(
        tl.int64
    )
    live = slot >= 0
    if tl.max(slot, axis=0) < 0:
        return
    # A padding row reads the chunk's first.
    row = tl.where(live, request * B + out_row % (B - 1) + 1, 0)

    # The row's normaliser.
    split = tl.arange(0, SPLITS)[None, :]
    there = live[:, None] & (split < num_splits)
    at = out_row[:, None] * num_splits + split
    maxima = tl.load(split_max_ptr + at, mask=there, other=float("-inf"))
    sums = tl.load(split_sum_ptr + at, mask=there, other=0.0)
    temperature = _row_temperature(temperature_ptr, slot)
    highest = _finite(tl.max(maxima, axis=1))
    weights = tl.exp2((maxima - highest[:, None]) * (1.0 / temperature * _LOG2_E)[:, None])
    log_mass = tl.log(tl.sum(sums * weights, axis=1))

    # The best groups; a key's token tells its group.
    group = tl.arange(0, GROUPS)[None, :]
    num_groups = num_splits * LANES
    keys = tl.load(
        group_best_ptr + out_row[:, None] * num_groups + group,
        mask=live[:, None] & (group < num_groups),
        other=_NO_KEY,
    )
    _, token = _take_best(key_order(keys), key_tie(keys), K, K_PADDED)
    chunk = STEPS * LANES * VEC
    first = token // chunk * chunk + token // VEC % LANES * VEC
    beyond = num_splits * chunk
    first = tl.where(token < vocab_size, first, beyond)

    # The best of their vectors.
    row_start = (row * logits_stride)[:, None, None]
    step = tl.arange(0, STEPS)[None, None, :]
    element = tl.arange(0, VEC)[None, None, :]
    vector = tl.reshape(first[:, :, None] + step * (LANES * VEC), [ROWS, K_PADDED * STEPS])
    token = tl.multiple_of(vector, [1, VEC])[:, :, None] + element
    order = _load_tokens(logits_ptr, row_start, token, vocab_size)
    best = tl.max(order, axis=2)
    token = tl.min(tl.where(order == best[:, :, None], token, _LAST_TOKEN), axis=2)
    _, token = _take_best(best, token, K, K_PADDED)

    # The best of their tokens.
    vector = tl.where(token < vocab_size, token // VEC * VEC, beyond)
    token = tl.reshape(vector[:, :, None] + element, [ROWS, K_PADDED * VEC])
    order = _load_tokens(logits_ptr, (row * logits_stride)[:, None], token, vocab_size)
    order, token = _take_best(order, token, K, K_PADDED)

    log_prob = (order_float(order) - highest[:, None]) / temperature[:, None] - log_mass[:, None]
    log_prob = tl.where(log_prob != log_prob, float("-inf"), log_prob)
    rank = tl.arange(0, K_PADDED)[None, :]
    out = out_row[:, None] * K + rank
    wanted = live[:, None] & (rank < K)
    tl.store(tokens_ptr + out, token, mask=wanted)
    tl.store(log_probs_ptr + out, log_prob, mask=wanted)


def select_candidates(
    out: Candidates,
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    first_request: int = 0,
) -> None:
    """Fill `out.tokens` and `out.log_probs` of requests first_request ... first_request + n - 1.

    Two launches, nothing allocated, no host sync: may be captured, if `temperature` may be
    (vLLM's own rotates between buffers).

    Args:
        logits: [n * B, vocab], any float dtype, contiguous within a row.
        idx_mapping: int [n], batch row -> request-state slot, any stride; rows of -1 are left
            alone.
        temperature: float [max_num_reqs], by slot; 0 counts as 1.
        first_request: batch row of the chunk's first request.
    """
    num_reqs = idx_mapping.shape[0]
    _, noise_rows, top_k = out.tokens.shape
    block_size = noise_rows + 1
    num_rows, vocab_size = num_reqs * noise_rows, logits.shape[1]
    splits = triton.cdiv(vocab_size, _CHUNK)
    assert logits.shape[0] == num_reqs * block_size and logits.stride(1) == 1
    assert num_rows <= out.group_best.shape[0] and out.split_max.shape[1] == splits
    if num_rows == 0:
        return
    shape = {"B": block_size, "STEPS": _STEPS, "LANES": _LANES, "VEC": _VEC}
    _group_best_kernel[(splits, num_rows)](
        out.group_best,
        out.split_max,
        out.split_sum,
        logits,
        logits.stride(0),
        idx_mapping,
        idx_mapping.stride(0),
        temperature,
        vocab_size,
        **shape,
        TILE=8,
        num_warps=_LANES // 32,
    )
    k_padded = triton.next_power_of_2(top_k)
    # The interpreter's time is by operation, not by element.
    rows = 1 if logits.is_cuda else 16
    chunk = slice(first_request, first_request + num_reqs)
    _top_k_kernel[(triton.cdiv(num_rows, rows),)](
        out.tokens[chunk],
        out.log_probs[chunk],
        out.group_best,
        out.split_max,
        out.split_sum,
        logits,
        logits.stride(0),
        idx_mapping,
        idx_mapping.stride(0),
        temperature,
        num_rows,
        vocab_size,
        splits,
        **shape,
        K=top_k,
        K_PADDED=k_padded,
        GROUPS=max(triton.next_power_of_2(splits * _LANES), k_padded),
        SPLITS=triton.next_power_of_2(splits),
        ROWS=rows,
        num_warps=TOP_K_WARPS if k_padded <= 32 else 16,
    )


def candidates_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' oracle, by a stable sort of whole rows, in float64.

    Args:
        logits: [n, B, vocab].
        temperature: [n].

    Returns:
        tokens int64 and log-probabilities float64, [n, B - 1, K].
    """
    x = logits[:, 1:].double()
    x = torch.where(x.isnan(), -math.inf, x)
    tokens = x.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    t = torch.where(temperature == 0, 1.0, temperature.double())[:, None, None]
    log_probs = (x / t).log_softmax(dim=-1).gather(-1, tokens)
    return tokens, torch.where(log_probs.isnan(), -math.inf, log_probs)
