"""Inputs of the draft pass, from the GPU's own state: one kernel, no host sync.

Row layout: request r of the batch owns rows r*B ... r*B+B-1,

    token     [seed, noise_1, ..., noise_{B-1}]
    position  [C,    C+1,     ..., C+B-1      ]

with C the request's computed tokens after the step just verified (the seed's KV
is not computed yet). A request drafts only if it has sampled (it is past its
prefill) and C + B <= max_model_len; the rows of one that does not are inert:
token 0, positions 0..B-1, no KV slot.

A row's KV slot is PAD where its block is not allocated or is the null block:
block-table entries past `num_blocks` are stale and would hit other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_uno.noise import noise_token_id, noise_token_ids_reference
from vllm_uno.vllm_hooks.runner_api import (
    PAD_SLOT_ID,
    BlockTables,
    InputBuffers,
    load_ptr,
    tl,
    triton,
)

_PAD = tl.constexpr(PAD_SLOT_ID)


@dataclass(frozen=True)
class DraftRows:
    """What the draft rows carry besides the model's inputs; persistent buffers.

    Attributes:
        slots: int64 [KV groups, max_num_reqs * B], KV slot or PAD.
        request: int64 [max_num_reqs * B], request-state slot; -1 for padding rows.
        drafting: bool [max_num_reqs], by batch row: the request really drafts.
        drafted: bool [max_num_reqs], by request-state slot: its last draft was real.
        pending: int32 [max_num_reqs, 2, 1 + B], by request-state slot: its last two cycles, older
            one first, which the counters do not have yet: tokens emitted (0: no cycle), and drafts
            proposed at each position.
    """

    slots: torch.Tensor
    request: torch.Tensor
    drafting: torch.Tensor
    drafted: torch.Tensor
    pending: torch.Tensor

    @classmethod
    def allocate(
        cls, num_groups: int, max_num_reqs: int, block_size: int, device: torch.device
    ) -> DraftRows:
        rows = max_num_reqs * block_size
        return cls(
            slots=torch.full((num_groups, rows), PAD_SLOT_ID, dtype=torch.int64, device=device),
            request=torch.full((rows,), -1, dtype=torch.int64, device=device),
            drafting=torch.zeros(max_num_reqs, dtype=torch.bool, device=device),
            drafted=torch.zeros(max_num_reqs, dtype=torch.bool, device=device),
            pending=torch.zeros(max_num_reqs, 2, 1 + block_size, dtype=torch.int32, device=device),
        )


# Not specialised: or the first batch of 1, of 16, ... requests would compile anew.
@triton.jit(do_not_specialize=["padded_reqs", "live", "noise_seed"])
def _draft_inputs_kernel(
    # outputs
    input_ids_ptr,
    positions_ptr,
    is_padding_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slots_ptr,
    slots_stride,
    row_request_ptr,
    drafting_ptr,
    drafted_ptr,
    pending_ptr,
    # counters of verified steps (metrics.py)
    cycles_ptr,
    emitted_ptr,
    proposed_at_ptr,
    accepted_at_ptr,
    depths_ptr,
    # state
    idx_mapping_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    num_computed_ptr,
    prefill_len_ptr,
    last_sampled_ptr,
    seeds_ptr,
    block_table_ptrs,
    block_table_strides,
    kv_block_sizes_ptr,
    num_blocks_ptr,
    num_blocks_stride,
    # scalars
    padded_reqs,
    max_model_len,
    noise_seed,
    noise_low,
    noise_high,
    live,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
    NODES_PADDED: tl.constexpr,
    PAD_CHUNK: tl.constexpr,
):
    batch_row = tl.program_id(0)
    num_reqs = tl.num_programs(0) - 1
    if batch_row == num_reqs:
        # Graph padding: zero-length requests whose rows own no slot.
        first = num_reqs * BLOCK_SIZE
        last = padded_reqs * BLOCK_SIZE
        for start in range(first, last, PAD_CHUNK):
            row = start + tl.arange(0, PAD_CHUNK)
            mask = row < last
            tl.store(is_padding_ptr + row, 1, mask=mask)
            tl.store(row_request_ptr + row, -1, mask=mask)
            for group in range(NUM_GROUPS):
                tl.store(slots_ptr + group * slots_stride + row, _PAD, mask=mask)
        for start in range(num_reqs, padded_reqs + 1, PAD_CHUNK):
            req = start + tl.arange(0, PAD_CHUNK)
            tl.store(query_start_loc_ptr + req, first, mask=req <= padded_reqs)
            tl.store(seq_lens_ptr + req, 0, mask=req < padded_reqs)
        return

    slot = tl.load(idx_mapping_ptr + batch_row)
    num_sampled = tl.load(num_sampled_ptr + batch_row)
    context = tl.load(num_computed_ptr + slot).to(tl.int64)
    active = (live != 0) & (num_sampled > 0) & (context + BLOCK_SIZE <= max_model_len)

    i = tl.arange(0, ROWS)
    in_block = i < BLOCK_SIZE

    # Count the verification of the previous *real* draft. A step that started
    # inside the prefill has placeholder drafts at most. A cycle counts when two more of its
    # request are verified: the one in which a request ends has drafts past the end, and by then
    # asynchronous scheduling has begun another, whose tokens nobody gets.
    if live != 0:
        was_drafted = tl.load(drafted_ptr + slot)
        prefill_len = tl.load(prefill_len_ptr + slot)
        num_rejected = tl.load(num_rejected_ptr + batch_row)
        in_prefill = context - num_sampled < prefill_len
        cycle = pending_ptr + slot.to(tl.int64) * (2 * (1 + BLOCK_SIZE))
        if in_prefill:  # of a new request
            tl.store(cycle, 0)
            tl.store(cycle + 1 + BLOCK_SIZE, 0)
        counts = (was_drafted != 0) & (num_sampled > 0) & (in_prefill == 0)
        # A step without drafts (the scheduler had no room) is no cycle.
        counts = counts & (num_sampled + num_rejected > 1)
        if counts:
            verified = num_sampled - 1 + num_rejected
            if NODES > 0:
                node = tl.arange(0, NODES_PADDED)
                depth = tl.load(
                    depths_ptr + slot * NODES + node,
                    mask=(node < NODES) & (node < verified),
                    other=BLOCK_SIZE,
                )
                proposed = tl.sum((depth[None, :] == i[:, None]).to(tl.int32), axis=1)
            else:
                proposed = (i < verified).to(tl.int32)
            newer = cycle + 1 + BLOCK_SIZE
            emitted = tl.load(cycle)
            before = tl.load(cycle + 1 + i, mask=in_block, other=0)
            if emitted > 0:
                tl.atomic_add(cycles_ptr, 1)
                tl.atomic_add(emitted_ptr, emitted.to(tl.int64))
                tl.atomic_add(proposed_at_ptr + i, before.to(tl.int64), mask=in_block)
                one = tl.full((ROWS,), 1, tl.int64)
                tl.atomic_add(accepted_at_ptr + i, one, mask=in_block & (i < emitted - 1))
            tl.store(cycle, tl.load(newer))
            tl.store(cycle + 1 + i, tl.load(newer + 1 + i, mask=in_block, other=0), mask=in_block)
            tl.store(newer, num_sampled)
            tl.store(newer + 1 + i, proposed, mask=in_block)
        tl.store(drafted_ptr + slot, active)
    tl.store(drafting_ptr + batch_row, active)

    seed_token = tl.load(last_sampled_ptr + slot).to(tl.int64)
    request_seed = tl.load(seeds_ptr + slot).to(tl.int64)
    position = tl.where(active, context + i, i).to(tl.int64)
    noise = noise_token_id(noise_seed, request_seed, position, noise_low, noise_high)
    token = tl.where(active, tl.where(i == 0, seed_token, noise), 0)

    row = batch_row * BLOCK_SIZE + i
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=in_block)
    tl.store(positions_ptr + row, position, mask=in_block)
    tl.store(is_padding_ptr + row, active == 0, mask=in_block)
    tl.store(row_request_ptr + row, tl.where(live != 0, slot, -1).to(tl.int64), mask=in_block)
    tl.store(query_start_loc_ptr + batch_row, batch_row * BLOCK_SIZE)
    seq_len = tl.where(active, context + BLOCK_SIZE, BLOCK_SIZE)
    tl.store(seq_lens_ptr + batch_row, seq_len.to(tl.int32))

    for group in range(NUM_GROUPS):
        table = load_ptr(block_table_ptrs + group, tl.int32)
        stride = tl.load(block_table_strides + group)
        kv_block_size = tl.load(kv_block_sizes_ptr + group)
        num_blocks = tl.load(num_blocks_ptr + group * num_blocks_stride + slot)
        block = position // kv_block_size
        allocated = in_block & active & (block < num_blocks)
        block_id = tl.load(table + batch_row * stride + block, mask=allocated, other=0)
        writable = allocated & (block_id != 0)
        kv_slot = block_id.to(tl.int64) * kv_block_size + position % kv_block_size
        tl.store(
            slots_ptr + group * slots_stride + row,
            tl.where(writable, kv_slot, _PAD),
            mask=in_block,
        )


def prepare_draft_inputs(
    buffers: InputBuffers,
    rows: DraftRows,
    counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_len: torch.Tensor,
    last_sampled: torch.Tensor,
    seeds: torch.Tensor,
    block_tables: BlockTables,
    block_size: int,
    padded_reqs: int,
    max_model_len: int,
    noise_seed: int,
    noise_range: tuple[int, int],
    live: bool,
    verified_depths: torch.Tensor | None = None,
) -> None:
    """Fill `buffers` and `rows` for one draft pass of `idx_mapping.shape[0]` requests.

    Must run eagerly: `prefill_len`, `seeds` and `num_blocks` are views that
    rotate between buffers, so a graph must not read them.

    Args:
        counters: (cycles [1], emitted [1], proposed_at [B], accepted_at [B]), int64; of cycles that
            two more of their request have followed.
        idx_mapping: int64 [num_reqs], batch row -> request-state slot.
        num_sampled, num_rejected: int32 [num_reqs] of the step just verified.
        num_computed_tokens: int32 [max_num_reqs], by slot, after that step.
        prefill_len: int32 [max_num_reqs], by slot.
        last_sampled: int64 [max_num_reqs, 1], by slot.
        seeds: int64 [max_num_reqs], by slot.
        block_tables: vLLM's; its `input_block_tables` are those of this batch.
        block_size: B.
        padded_reqs: requests of the graph to replay (num_reqs where there is none).
        live: False for dummy batches, whose rows all stay inert.
        verified_depths: int32 [max_num_reqs, V], by slot: of the nodes just verified, in tree mode.
    """
    num_reqs = idx_mapping.shape[0]
    cycles, emitted, proposed_at, accepted_at = counters
    low, high = noise_range
    nodes = 0 if verified_depths is None else verified_depths.shape[1]
    _draft_inputs_kernel[(num_reqs + 1,)](
        buffers.input_ids,
        buffers.positions,
        buffers.is_padding,
        buffers.query_start_loc,
        buffers.seq_lens,
        rows.slots,
        rows.slots.stride(0),
        rows.request,
        rows.drafting,
        rows.drafted,
        rows.pending,
        cycles,
        emitted,
        proposed_at,
        accepted_at,
        verified_depths,
        idx_mapping,
        num_sampled,
        num_rejected,
        num_computed_tokens,
        prefill_len,
        last_sampled,
        seeds,
        block_tables.input_block_table_ptrs,
        block_tables.block_table_strides,
        block_tables.block_sizes_tensor,
        block_tables.num_blocks.gpu,
        block_tables.num_blocks.gpu.stride(0),
        padded_reqs,
        max_model_len,
        noise_seed,
        low,
        high,
        int(live),
        NUM_GROUPS=block_tables.num_kv_cache_groups,
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(block_size),
        NODES=nodes,
        NODES_PADDED=triton.next_power_of_2(max(1, nodes)),
        PAD_CHUNK=1024,
    )


def draft_inputs_reference(
    *,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled: torch.Tensor,
    seeds: torch.Tensor,
    input_block_tables: list[torch.Tensor],
    kv_block_sizes: list[int],
    num_blocks: torch.Tensor,
    block_size: int,
    max_model_len: int,
    noise_seed: int,
    noise_range: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """The kernel's oracle, for the rows of real requests.

    Args and layout as `prepare_draft_inputs`; `num_blocks` is [groups, max_num_reqs].

    Returns:
        active [n], input_ids [n, B], positions [n, B], seq_lens [n], slots [groups, n, B].
    """
    context = num_computed_tokens[idx_mapping].long()
    active = (num_sampled > 0) & (context + block_size <= max_model_len)
    offsets = torch.arange(block_size)
    positions = torch.where(active[:, None], context[:, None] + offsets, offsets)
    ids = noise_token_ids_reference(
        noise_seed, seeds[idx_mapping][:, None], positions, noise_range[0], noise_range[1]
    )
    ids[:, 0] = last_sampled[idx_mapping, 0]
    ids = torch.where(active[:, None], ids, 0)
    slots = []
    for group, (table, kv_block_size) in enumerate(
        zip(input_block_tables, kv_block_sizes, strict=True)
    ):
        block = positions // kv_block_size
        allocated = active[:, None] & (block < num_blocks[group, idx_mapping][:, None])
        block_id = table[: len(idx_mapping)].gather(1, block.clamp(max=table.shape[1] - 1)).long()
        writable = allocated & (block_id != 0)
        slot = block_id * kv_block_size + positions % kv_block_size
        slots.append(torch.where(writable, slot, PAD_SLOT_ID))
    return {
        "active": active,
        "input_ids": ids,
        "positions": positions,
        "seq_lens": torch.where(active, context + block_size, block_size),
        "slots": torch.stack(slots),
    }
