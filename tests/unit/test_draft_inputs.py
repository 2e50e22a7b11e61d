"""The draft-input kernel and the noise against their PyTorch oracles, poisoned outputs.

On the CPU the kernel runs in Triton's interpreter, with a GPU it is compiled.
"""

import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.draft_inputs import (  # noqa: E402
    DraftRows,
    draft_inputs_reference,
    prepare_draft_inputs,
)
from vllm_uno.noise import NOISE_DOMAIN, noise_token_ids_reference  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import (  # noqa: E402
    PAD_SLOT_ID,
    InputBuffers,
    murmur3_hash32,
    tl,
    triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77


def fake_block_tables(
    generator: torch.Generator, num_reqs: int, max_reqs: int, groups: int, width: int
) -> types.SimpleNamespace:
    tables = [
        torch.randint(0, 50, (max_reqs, width), generator=generator, dtype=torch.int32)
        for _ in range(groups)
    ]
    sizes = [(16, 32, 8)[g % 3] for g in range(groups)]
    num_blocks = torch.randint(0, width + 1, (groups, max_reqs), generator=generator).int()
    on_device = [t.to(DEVICE) for t in tables]
    return types.SimpleNamespace(
        num_kv_cache_groups=groups,
        input_block_tables=tables,
        kept=on_device,
        input_block_table_ptrs=torch.tensor(
            [t.data_ptr() for t in on_device], dtype=torch.uint64, device=DEVICE
        ),
        block_table_strides=torch.tensor([width] * groups, dtype=torch.int64, device=DEVICE),
        block_sizes=sizes,
        block_sizes_tensor=torch.tensor(sizes, dtype=torch.int32, device=DEVICE),
        num_blocks=types.SimpleNamespace(gpu=num_blocks.to(DEVICE)),
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 5),
    block_size=st.integers(1, 17),
    groups=st.integers(1, 3),
    padding=st.integers(0, 3),
    live=st.booleans(),
    nodes=st.sampled_from([0, 0, 2, 5, 33]),
)
def test_kernel_equals_oracle(
    seed: int, num_reqs: int, block_size: int, groups: int, padding: int, live: bool, nodes: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    max_reqs = num_reqs + padding + 1
    width, max_model_len = 12, 90
    idx = torch.randperm(max_reqs, generator=g)[:num_reqs]
    verified = nodes or block_size  # drafts of a request; nodes of a tree in tree mode
    num_sampled = torch.randint(0, min(verified, block_size) + 2, (num_reqs,), generator=g).int()
    num_rejected = torch.where(num_sampled > 0, verified + 1 - num_sampled, 0).int()
    depths = torch.zeros(max_reqs, nodes, dtype=torch.int32)
    for node in range(1, nodes):
        depths[:, node] = torch.randint(1, node + 1, (max_reqs,), generator=g)
    context = torch.randint(block_size + 1, max_model_len, (max_reqs,), generator=g).int()
    prefill_len = torch.randint(1, max_model_len, (max_reqs,), generator=g).int()
    last = torch.randint(0, 1000, (max_reqs, 1), generator=g)
    seeds = torch.randint(-(2**62), 2**62, (max_reqs,), generator=g)
    tables = fake_block_tables(g, num_reqs, max_reqs, groups, width)

    buffers = InputBuffers(max_reqs, max_reqs * block_size, DEVICE)
    rows = DraftRows.allocate(groups, max_reqs, block_size, DEVICE)
    for t in (buffers.input_ids, buffers.positions, buffers.seq_lens, buffers.query_start_loc):
        t.fill_(POISON)
    rows.slots.fill_(POISON)
    rows.request.fill_(POISON)
    was_drafted = torch.rand(max_reqs, generator=g) < 0.5
    rows.drafted.copy_(was_drafted)
    pending = torch.randint(0, 4, rows.pending.shape, generator=g).int()
    rows.pending.copy_(pending)
    counters = tuple(
        torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (1, 1, block_size, block_size)
    )
    common = {
        "noise_seed": seed % 1000,
        "noise_range": (1, 901),
        "max_model_len": max_model_len,
        "block_size": block_size,
    }
    prepare_draft_inputs(
        buffers,
        rows,
        counters,  # type: ignore[arg-type]
        idx_mapping=idx.to(DEVICE),
        num_sampled=num_sampled.to(DEVICE),
        num_rejected=num_rejected.to(DEVICE),
        num_computed_tokens=context.to(DEVICE),
        prefill_len=prefill_len.to(DEVICE),
        last_sampled=last.to(DEVICE),
        seeds=seeds.to(DEVICE),
        block_tables=tables,  # type: ignore[arg-type]
        padded_reqs=num_reqs + padding,
        live=live,
        verified_depths=depths.to(DEVICE) if nodes else None,
        **common,  # type: ignore[arg-type]
    )
    want = draft_inputs_reference(
        idx_mapping=idx,
        num_sampled=num_sampled if live else torch.zeros_like(num_sampled),
        num_computed_tokens=context,
        last_sampled=last,
        seeds=seeds,
        input_block_tables=tables.input_block_tables,
        kv_block_sizes=tables.block_sizes,
        num_blocks=tables.num_blocks.gpu.cpu(),
        **common,  # type: ignore[arg-type]
    )
    n, t, padded = num_reqs, num_reqs * block_size, (num_reqs + padding) * block_size
    shape = (n, block_size)
    assert torch.equal(buffers.input_ids[:t].cpu().view(shape).long(), want["input_ids"])
    assert torch.equal(buffers.positions[:t].cpu().view(shape), want["positions"])
    assert torch.equal(buffers.seq_lens[:n].cpu().long(), want["seq_lens"])
    assert torch.equal(rows.slots[:, :t].cpu().view(groups, *shape), want["slots"])
    assert torch.equal(rows.drafting[:n].cpu(), want["active"])
    assert torch.equal(
        buffers.query_start_loc[: n + padding + 1].cpu().long(),
        torch.arange(n + padding + 1).clamp(max=n) * block_size,
    )
    owner = idx.repeat_interleave(block_size) if live else torch.full((t,), -1)
    assert torch.equal(rows.request[:t].cpu(), owner)
    # padding
    assert (buffers.seq_lens[n : n + padding] == 0).all()
    assert (rows.slots[:, t:padded] == PAD_SLOT_ID).all()
    assert (rows.request[t:padded] == -1).all()
    assert buffers.is_padding[t:padded].all()
    real = want["active"].repeat_interleave(block_size)
    assert torch.equal(buffers.is_padding[:t].cpu(), ~real)
    # nothing is written past the graph's rows
    assert (rows.slots[:, padded:] == POISON).all()
    assert (buffers.input_ids[padded:] == POISON).all()

    # counters: real drafts, verified after the prefill
    counted = was_drafted[idx] & (num_sampled > 0) & live
    counted &= context[idx] - num_sampled >= prefill_len[idx]
    cycles, emitted, proposed, accepted = (c.cpu() for c in counters)
    offsets = torch.arange(block_size)
    older = pending[idx[counted], 0].long()  # the cycle before the last one
    older = older[older[:, 0] > 0]
    assert int(cycles) == len(older)
    assert int(emitted) == int(older[:, 0].sum())
    assert torch.equal(proposed, older[:, 1:].sum(0))
    assert torch.equal(accepted, (offsets < older[:, :1] - 1).sum(0))
    for r, slot in enumerate(idx.tolist()):
        if counted[r]:
            at = depths[slot] if nodes else offsets
            last = [int(num_sampled[r]), *((at == d).sum() for d in range(block_size))]
            pending[slot] = torch.stack([pending[slot, 1], torch.tensor(last).int()])
        elif live and context[slot] - num_sampled[r] < prefill_len[slot]:
            pending[slot, :, 0] = 0
    assert torch.equal(rows.pending.cpu(), pending)
    drafted = was_drafted.clone()
    if live:
        drafted[idx] = want["active"]
    assert torch.equal(rows.drafted.cpu(), drafted)


@triton.jit
def _hash_kernel(seed_ptr, pos_ptr, out_ptr, noise_seed, D: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    seed = tl.load(seed_ptr + i)
    pos = tl.load(pos_ptr + i)
    offset = (noise_seed + tl.zeros_like(pos)).to(tl.uint32)
    tl.store(out_ptr + i, murmur3_hash32(seed, pos, offset, domain=D).to(tl.int64))


@pytest.mark.parametrize("noise_seed", [0, 1, 2**31 - 1])
def test_noise_reference_is_vllms_hash_in_our_domain(noise_seed: int) -> None:
    g = torch.Generator().manual_seed(noise_seed)
    seeds = torch.randint(-(2**62), 2**62, (64,), generator=g)
    positions = torch.randint(0, 2**20, (64,), generator=g)
    got = torch.empty(64, dtype=torch.int64, device=DEVICE)
    arguments = (seeds.to(DEVICE), positions.to(DEVICE), got, noise_seed)
    _hash_kernel[(1,)](*arguments, D=NOISE_DOMAIN, N=64)
    whole = noise_token_ids_reference(noise_seed, seeds, positions, 0, 2**31)
    assert torch.equal(got.cpu() >> 1, whole)
    _hash_kernel[(1,)](*arguments, D=0, N=64)
    assert not torch.equal(got.cpu() >> 1, whole)


def test_noise_is_uniform_and_keyed_by_seed_and_position() -> None:
    low, high, n = 3, 19, 40_000
    positions = torch.arange(n)
    ids = noise_token_ids_reference(0, torch.tensor([5]), positions, low, high)
    assert ids.min() == low and ids.max() == high - 1
    counts = torch.bincount(ids - low, minlength=high - low).double()
    expected = n / (high - low)
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 15 dof: p = 1e-4
    for other in (
        noise_token_ids_reference(1, torch.tensor([5]), positions, low, high),
        noise_token_ids_reference(0, torch.tensor([6]), positions, low, high),
        noise_token_ids_reference(0, torch.tensor([5]), positions + 1, low, high),
    ):
        same = (ids == other).double().mean()
        assert abs(same - 1 / (high - low)) < 0.01
