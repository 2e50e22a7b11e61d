"""Draft laws and tokens from logits: two kernels over rows, and vLLM's own filter between.

For each draft row, with the logits of any dtype taken to fp32:

    z     = logits, where min_p, top-k and top-p keep the token of z / T; -inf elsewhere
    law   = z, in the cache that the rejection test reads (and divides by T again)
    token = argmax(z / T + Gumbel noise), the noise of vLLM's `gumbel_sample` when drafting

bitwise what vLLM's kernels make of the same logits one after the other (temperature, min_p,
top-k and top-p, `gumbel_sample` with a cache), without their copies: the logits stay as the
head wrote them and z exists in the cache only. Each row takes its own way by what its request
asks for, read on the GPU, so one captured launch serves any batch:

    padding (no request)      nothing is written but token 0
    request does not draft    token 0, surely: its law is one-hot there
    T = 0, or no cache        argmax of the logits; no law (verification never reads it)
    T > 0, `one_hot`          argmax of the logits, surely: its law is one-hot there
    T > 0                     as above; top-k and top-p cost memory traffic only where used

`one_hot` is for requests with a grammar. vLLM marks the first draft that breaks the grammar and
draws from p in its place, not from what p has more of than q: exact only if q is all on the draft
(measured otherwise: a probability of 0.46 where plain has 0.58). The likeliest token is then the
best draft.

Top-k and top-p are vLLM's `apply_top_k_top_p` on z / T. Its sums of probabilities have no order
that another kernel could promise to repeat, nor have its ties; row 0 must keep exactly what
verification keeps of the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vllm_uno.vllm_hooks.runner_api import (
    SamplingStates,
    apply_top_k_top_p,
    gumbel_noised_argmax,
    tl,
    triton,
)

_WIDTH = 2048  # tokens of a row in one program

# vLLM's filter has one program per row and at most one per SM (132): more rows at a time only
# cost memory (78 MB at 128 rows of 152k).
FILTER_ROWS = 128


@dataclass(frozen=True)
class LawRows:
    """What the law of each draft row depends on beside its logits; persistent buffers.

    vLLM keeps its sampling parameters in views that rotate between buffers when requests come
    and go, which a captured kernel must not read; `gather` copies what the batch needs.

    Attributes:
        block_size: B.
        request: int64 [R * B], request-state slot of each row; -1 for padding (draft_inputs.py).
        positions: int64 [R * B], of each row, which key the noise.
        drafting: bool [R], by batch row (draft_inputs.py).
        one_hot: bool [R], by batch row.
        temperature: fp32 [R], by batch row, as the next two.
        min_p: fp32 [R]; 0 where unused.
        seeds: int64 [R].
        top_k: int32 [R * B], by row, as vLLM's filter takes it; the vocabulary's size where
            unused.
        top_p: fp32 [R * B]; 1 where unused.
    """

    block_size: int
    request: torch.Tensor
    positions: torch.Tensor
    drafting: torch.Tensor
    one_hot: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    @classmethod
    def allocate(
        cls,
        block_size: int,
        vocab_size: int,
        *,
        request: torch.Tensor,
        positions: torch.Tensor,
        drafting: torch.Tensor,
    ) -> LawRows:
        """Rows over the given buffers of the draft inputs, all greedy so far."""
        max_num_reqs, device = len(drafting), drafting.device
        num_rows = max_num_reqs * block_size
        return cls(
            block_size,
            request[:num_rows],
            positions[:num_rows],
            drafting,
            one_hot=torch.zeros(max_num_reqs, dtype=torch.bool, device=device),
            temperature=torch.zeros(max_num_reqs, device=device),
            min_p=torch.zeros(max_num_reqs, device=device),
            seeds=torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
            top_k=torch.full((num_rows,), vocab_size, dtype=torch.int32, device=device),
            top_p=torch.ones(num_rows, device=device),
        )

    def part(self, start: int, stop: int) -> LawRows:
        """Views of batch rows start ... stop-1."""
        block = self.block_size
        parts = {}
        for field in fields(self):
            if field.name != "block_size":
                buffer = getattr(self, field.name)
                rows = field.name in ("request", "positions", "top_k", "top_p")
                parts[field.name] = (
                    buffer[start * block : stop * block] if rows else (buffer[start:stop])
                )
        return LawRows(block, **parts)

    def gather(
        self,
        idx_mapping: torch.Tensor,
        states: SamplingStates,
        one_hot: torch.Tensor,
        padded_reqs: int,
    ) -> None:
        """Copy the sampling parameters of a batch; must run eagerly.

        Args:
            idx_mapping: int64 [n], batch row -> request-state slot.
            states: vLLM's sampling state of all requests.
            one_hot: bool [slots].
            padded_reqs: rows of the graph to replay; those past n become greedy.
        """
        _gather_kernel[(padded_reqs,)](
            self.one_hot,
            self.temperature,
            self.min_p,
            self.seeds,
            self.top_k,
            self.top_p,
            idx_mapping,
            one_hot,
            states.temperature.gpu,
            states.min_p.gpu,
            states.seeds.gpu,
            states.top_k.gpu,
            states.top_p.gpu,
            idx_mapping.shape[0],
            states.vocab_size,
            B=self.block_size,
            ROWS=triton.next_power_of_2(self.block_size),
        )


# Not specialised: or batches of 1, of 16, ... requests would compile anew.
@triton.jit(do_not_specialize=["num_reqs"])
def _gather_kernel(
    one_hot_out_ptr,
    temperature_out_ptr,
    min_p_out_ptr,
    seeds_out_ptr,
    top_k_out_ptr,
    top_p_out_ptr,
    idx_mapping_ptr,
    one_hot_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    num_reqs,
    vocab_size,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch_row = tl.program_id(0)
    real = batch_row < num_reqs
    slot = tl.load(idx_mapping_ptr + batch_row, mask=real, other=0)
    temperature = tl.load(temperature_ptr + slot, mask=real, other=0.0)
    one_hot = tl.load(one_hot_ptr + slot, mask=real, other=0)
    tl.store(one_hot_out_ptr + batch_row, one_hot)
    # The likeliest token's filters change nothing.
    sampled = real & (temperature != 0.0) & (one_hot == 0)
    tl.store(temperature_out_ptr + batch_row, temperature)
    tl.store(min_p_out_ptr + batch_row, tl.load(min_p_ptr + slot, mask=sampled, other=0.0))
    tl.store(seeds_out_ptr + batch_row, tl.load(seeds_ptr + slot, mask=sampled, other=0))
    top_k = tl.load(top_k_ptr + slot, mask=sampled, other=vocab_size)
    top_p = tl.load(top_p_ptr + slot, mask=sampled, other=1.0)
    i = tl.arange(0, ROWS)
    row = batch_row * B + i
    tl.store(top_k_out_ptr + row, top_k + tl.zeros_like(i), mask=i < B)
    tl.store(top_p_out_ptr + row, top_p + tl.zeros((ROWS,), tl.float32), mask=i < B)


# Parts of a batch begin anywhere in these buffers, and a variant for each alignment of scalars
# would only cost compile time.
_SCALARS = [
    "request_ptr", "positions_ptr", "drafting_ptr", "one_hot_ptr", "temperature_ptr", "min_p_ptr",
    "seeds_ptr", "top_k_ptr", "top_p_ptr", "out_ptr",
]  # fmt: skip


@triton.jit
def _scaled(z, temperature):
    # vLLM leaves logits alone at temperature 1.
    return tl.where(temperature == 1.0, z, z / temperature)


@triton.jit
def _min_p_floor(block_max_ptr, row, min_p, num_blocks, BLOCKS: tl.constexpr):
    """What min_p keeps of z / T: the values from here up."""
    i = tl.arange(0, BLOCKS)
    highest = tl.load(
        block_max_ptr + row * num_blocks + i, mask=i < num_blocks, other=float("-inf")
    )
    return tl.max(highest, axis=0) + tl.log(min_p)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _block_max_kernel(
    block_max_ptr,
    logits_ptr,
    logits_stride,
    temperature_ptr,
    min_p_ptr,
    vocab_size,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Maxima of z / T in each block of tokens, of rows with min_p."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(min_p_ptr + row // B) == 0.0:
        return
    temperature = tl.load(temperature_ptr + row // B)
    block = tl.program_id(1)
    token = block * WIDTH + tl.arange(0, WIDTH)
    z = tl.load(
        logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")
    ).to(tl.float32)
    highest = tl.max(_scaled(z, temperature), axis=0)
    tl.store(block_max_ptr + row * tl.num_programs(1) + block, highest)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _filter_input_kernel(
    x_ptr,
    logits_ptr,
    logits_stride,
    block_max_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x = z / T after min_p, of rows with top-k or top-p; the others' stay as they are."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(top_k_ptr + row) >= vocab_size) & (tl.load(top_p_ptr + row) >= 1.0):
        return
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = token < vocab_size
    z = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=float("-inf"))
    x = _scaled(z.to(tl.float32), tl.load(temperature_ptr + row // B))
    min_p = tl.load(min_p_ptr + row // B)
    if min_p != 0.0:
        floor = _min_p_floor(block_max_ptr, row, min_p, tl.num_programs(1), BLOCKS)
        x = tl.where(x < floor, float("-inf"), x)
    tl.store(x_ptr + row * vocab_size + token, x, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _law_kernel(
    # outputs
    local_max_ptr,
    local_token_ptr,
    cache_ptr,
    cache_stride_request,
    cache_stride_row,
    # logits and what is kept of them
    logits_ptr,
    logits_stride,
    x_ptr,
    block_max_ptr,
    # LawRows
    request_ptr,
    positions_ptr,
    drafting_ptr,
    one_hot_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    FILTERS: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """One block of a row: its part of the law, and the best token in it."""
    row = tl.program_id(0).to(tl.int64)
    batch_row = row // B
    slot = tl.load(request_ptr + row)
    if slot < 0:
        return
    block = tl.program_id(1)
    token = block * WIDTH + tl.arange(0, WIDTH)
    mask = token < vocab_size
    temperature = 0.0
    if HAS_CACHE:
        temperature = tl.load(temperature_ptr + batch_row)
        law_ptr = cache_ptr + slot * cache_stride_request + (row % B) * cache_stride_row + token
    if tl.load(drafting_ptr + batch_row) == 0:
        # Such a request still has draft tokens scheduled. Testing token 0 against another law
        # (a stale one) would bias its output.
        if HAS_CACHE:
            tl.store(law_ptr, tl.where(token == 0, 0.0, float("-inf")), mask=mask)
        return
    z = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=float("-inf"))
    z = z.to(tl.float32)
    if HAS_CACHE and temperature != 0.0:
        if FILTERS:
            if (tl.load(top_k_ptr + row) < vocab_size) | (tl.load(top_p_ptr + row) < 1.0):
                x = tl.load(x_ptr + row * vocab_size + token, mask=mask, other=0.0)
                z = tl.where(x == float("-inf"), float("-inf"), z)
            else:
                min_p = tl.load(min_p_ptr + batch_row)
                if min_p != 0.0:
                    floor = _min_p_floor(block_max_ptr, row, min_p, tl.num_programs(1), BLOCKS)
                    z = tl.where(_scaled(z, temperature) < floor, float("-inf"), z)
        one_hot = tl.load(one_hot_ptr + batch_row) != 0
        # `_pick_kernel` adds the token to a one-hot law.
        tl.store(law_ptr, tl.where(one_hot, float("-inf"), z), mask=mask)
        temperature = tl.where(one_hot, 0.0, temperature)
    # A NaN could win with an index past the vocabulary.
    z = tl.where(z == z, z, float("-inf"))
    value, best = gumbel_noised_argmax(
        z,
        token,
        mask,
        tl.load(seeds_ptr + batch_row),
        tl.load(positions_ptr + row),
        temperature,
        IS_DRAFTING=True,
        USE_FP64=USE_FP64,
    )
    local = row * tl.num_programs(1) + block
    tl.store(local_max_ptr + local, value)
    tl.store(local_token_ptr + local, block * WIDTH + best)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _pick_kernel(
    out_ptr,
    local_max_ptr,
    local_token_ptr,
    cache_ptr,
    cache_stride_request,
    cache_stride_row,
    request_ptr,
    drafting_ptr,
    one_hot_ptr,
    temperature_ptr,
    num_blocks,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(request_ptr + row)
    if (slot < 0) | (tl.load(drafting_ptr + row // B) == 0):
        tl.store(out_ptr + row, 0)
        return
    i = tl.arange(0, BLOCKS)
    value = tl.load(local_max_ptr + row * num_blocks + i, mask=i < num_blocks, other=float("-inf"))
    best = tl.argmax(value, axis=0)
    token = tl.load(local_token_ptr + row * num_blocks + best).to(tl.int64)
    tl.store(out_ptr + row, token)
    if HAS_CACHE:
        one_hot = tl.load(one_hot_ptr + row // B) != 0
        law_ptr = cache_ptr + slot * cache_stride_request + (row % B) * cache_stride_row
        sampled = tl.load(temperature_ptr + row // B) != 0.0
        tl.store(law_ptr + token, 0.0, mask=one_hot & sampled)


def sample_draft_rows(
    logits: torch.Tensor,
    rows: LawRows,
    cache: torch.Tensor | None,
    out: torch.Tensor,
    *,
    filters: bool,
    use_fp64: bool = False,
) -> None:
    """Write the law and a token of each row (the module's docstring says which).

    May be captured; reads no host state of the requests.

    Args:
        logits: [n * B, V], any float dtype; not changed.
        rows: of n requests.
        cache: fp32 [max_num_reqs, B, V], by request-state slot; None: every row is greedy.
        out: int64 [n * B], contiguous.
        filters: whether a request may use min_p, top-k or top-p. False saves launches where the
            host knows that none does.
        use_fp64: the sampler's `use_fp64_gumbel`.
    """
    filters = filters and cache is not None
    num_reqs, block = len(rows.drafting), rows.block_size
    step = num_reqs
    if filters and num_reqs * block > FILTER_ROWS:
        # Parts of equal size: vLLM's filter takes another algorithm for few rows.
        parts = triton.cdiv(num_reqs, max(1, FILTER_ROWS // block))
        step = triton.cdiv(num_reqs, parts)
    for start in range(0, num_reqs, step):
        stop = min(start + step, num_reqs)
        part = slice(start * block, stop * block)
        _sample_part(logits[part], rows.part(start, stop), cache, out[part], filters, use_fp64)


def _sample_part(
    logits: torch.Tensor,
    rows: LawRows,
    cache: torch.Tensor | None,
    out: torch.Tensor,
    filters: bool,
    use_fp64: bool,
) -> None:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _WIDTH)
    grid = (num_rows, num_blocks)
    sizes = {"B": rows.block_size, "BLOCKS": triton.next_power_of_2(num_blocks)}
    x = block_max = None
    if filters:
        block_max = logits.new_empty(grid, dtype=torch.float32)
        _block_max_kernel[grid](
            block_max,
            logits,
            logits.stride(0),
            rows.temperature,
            rows.min_p,
            vocab_size,
            B=rows.block_size,
            WIDTH=_WIDTH,
        )
        x = logits.new_empty(num_rows, vocab_size, dtype=torch.float32)
        _filter_input_kernel[grid](
            x,
            logits,
            logits.stride(0),
            block_max,
            rows.temperature,
            rows.min_p,
            rows.top_k,
            rows.top_p,
            vocab_size,
            WIDTH=_WIDTH,
            **sizes,
        )
        # Rows without top-k and top-p hold garbage, which it leaves alone.
        x = apply_top_k_top_p(x, rows.top_k, rows.top_p)
    local_max = logits.new_empty(grid, dtype=torch.float64 if use_fp64 else torch.float32)
    local_token = logits.new_empty(grid, dtype=torch.int32)
    law = (cache, *((0, 0) if cache is None else cache.stride()[:2]))
    _law_kernel[grid](
        local_max,
        local_token,
        *law,
        logits,
        logits.stride(0),
        x,
        block_max,
        rows.request,
        rows.positions,
        rows.drafting,
        rows.one_hot,
        rows.temperature,
        rows.min_p,
        rows.seeds,
        rows.top_k,
        rows.top_p,
        vocab_size,
        WIDTH=_WIDTH,
        HAS_CACHE=cache is not None,
        FILTERS=filters,
        USE_FP64=use_fp64,
        **sizes,
    )
    _pick_kernel[(num_rows,)](
        out,
        local_max,
        local_token,
        *law,
        rows.request,
        rows.drafting,
        rows.one_hot,
        rows.temperature,
        num_blocks,
        HAS_CACHE=cache is not None,
        **sizes,
    )


def draft_law_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """The laws of drafting rows with a temperature, [rows, V] fp32: the kernels' oracle.

    Args:
        logits: [rows, V].
        temperature, min_p, top_p: fp32 [rows]; temperature is not 0.
        top_k: int32 [rows].
    """
    z = logits.float()
    x = z / temperature[:, None]
    floor = x.max(dim=-1, keepdim=True).values + min_p[:, None].log()
    x = x.masked_fill(x < floor, float("-inf"))
    kept = apply_top_k_top_p(x, top_k, top_p)
    return z.masked_fill(kept == float("-inf"), float("-inf"))
