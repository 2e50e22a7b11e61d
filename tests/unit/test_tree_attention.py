"""Tree attention against a brute-force softmax, in caches poisoned outside the valid slots.

On the CPU the kernels run in Triton's interpreter, with a GPU they are compiled.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.attention import (  # noqa: E402
    TreeBatch,
    add_nodes,
    attend,
    tree_attention_flash,
    tree_attention_reference,
    tree_attention_triton,
    write_context_lens,
)
from vllm_uno.tree.state import CAUSAL, TreeState, pack_ancestors, unpack_ancestors  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import tl  # noqa: E402

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    def _bf16_as_fp32(operand):
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        wide = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(wide.view(np.float32), tl.float32)

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _create_bf16_dot(self, a, b, d, *rest):
        """Triton's interpreter multiplies the bits of bf16 as if they were integers."""
        return _create_dot(self, _bf16_as_fp32(a), _bf16_as_fp32(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = _create_bf16_dot

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: TreeBatch
    scale: float
    parents: dict[int, list[int]]
    """By request-state slot."""

    def out(self) -> torch.Tensor:
        return torch.full_like(self.query, NAN)


def random_parents(nodes: int, g: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(0, j, (1,), generator=g)) for j in range(1, nodes)]


def ancestors_of(parents: list[int]) -> torch.Tensor:
    """int64 [V, words]."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for j, parent in enumerate(parents):
        if parent >= 0:
            visible[j] |= visible[parent]
    return pack_ancestors(visible)


def make_case(
    seed: int,
    contexts: list[int],
    rows: list[int],
    *,
    nodes: int,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: frozenset[int] = frozenset(),
    padding: int = 0,
    poison: float = NAN,
) -> Case:
    """Requests with `contexts` tokens before row 0 and `rows` verify rows each.

    Every KV slot that no request owns is poison, and block tables end in a block of nothing but
    poison. The last `padding` requests have no rows.
    """
    g = torch.Generator().manual_seed(seed)
    n = len(contexts) + padding
    lengths = [c + r for c, r in zip(contexts, rows, strict=True)] + [0] * padding
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=g) + 1  # block 0 is poison
    cache = torch.full((sum(counts) + 1, kv_heads, block_size, 2 * dim), poison)
    table = torch.zeros(n, max(counts) + 2, dtype=torch.int32)
    firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
    for r, length in enumerate(lengths):
        blocks = order[firsts[r] : firsts[r + 1]]
        table[r, : counts[r]] = blocks.int()
        for b, block in enumerate(blocks.tolist()):
            filled = min(block_size, length - b * block_size)
            cache[block, :, :filled] = torch.randn(kv_heads, filled, 2 * dim, generator=g)
    max_slots = n + 2
    slots = torch.randperm(max_slots, generator=g)[:n].int()
    parents = {s: random_parents(nodes, g) for s in range(max_slots)}
    ancestors = torch.stack([ancestors_of(parents[s]) for s in range(max_slots)])
    for r in range(n):
        if r in causal or r >= len(contexts):
            slots[r] = CAUSAL
    starts = torch.tensor([0, *rows] + [0] * padding).cumsum(0).int()
    # Rows as vLLM's qkv projection leaves them: a slice, not dense.
    tokens = sum(rows) + 3
    packed = torch.randn(tokens, kv_heads * group + 1, dim, generator=g).to(DEVICE, dtype)
    keys, values = cache.to(DEVICE, dtype).transpose(1, 2).split(dim, dim=-1)
    return Case(
        query=packed[:, : kv_heads * group],
        key_cache=keys,
        value_cache=values,
        batch=TreeBatch(
            query_start_loc=starts.to(DEVICE),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            block_table=table.to(DEVICE),
            ancestors=ancestors.to(DEVICE),
            slots=slots.to(DEVICE),
            max_rows=nodes + 1,
        ),
        scale=dim**-0.5,
        parents=parents,
    )


def brute_force(case: Case) -> torch.Tensor:
    """One row at a time, from parents, in fp64."""
    out = torch.full(case.query.shape, NAN, dtype=torch.float64)
    starts = case.batch.query_start_loc.tolist()
    block_size, kv_heads = case.key_cache.shape[1:3]
    group = case.query.shape[1] // kv_heads
    for r, length in enumerate(case.batch.seq_lens.tolist()):
        rows = starts[r + 1] - starts[r]
        context = length - rows
        slot = int(case.batch.slots[r])
        for row in range(rows):
            positions = list(range(context + 1))
            node = row - 1
            while node >= 0:
                positions.append(context + 1 + node)
                node = node - 1 if slot == CAUSAL else case.parents[slot][node]
            where = torch.tensor(positions)
            block = case.batch.block_table[r].cpu()[where // block_size].long()
            keys = case.key_cache.cpu()[block, where % block_size].double()
            values = case.value_cache.cpu()[block, where % block_size].double()
            heads = torch.arange(case.query.shape[1]) // group
            q = case.query[starts[r] + row].cpu().double()
            weights = ((keys[:, heads] * q).sum(-1) * case.scale).softmax(0)
            out[starts[r] + row] = (weights[..., None] * values[:, heads]).sum(0)
    return out


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal where a request has rows; untouched (NaN) elsewhere."""
    assert torch.equal(found.isnan().cpu(), expected.isnan().cpu())
    torch.testing.assert_close(
        found.double().cpu(),
        expected.double().cpu(),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
        equal_nan=True,
    )


def flash_context(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashAttention leaves for `add_nodes`: attention over the context and its LSE."""
    out = case.out()
    heads = case.query.shape[1]
    lse = torch.full((heads, case.query.shape[0]), NAN, device=DEVICE)
    starts = case.batch.query_start_loc.tolist()
    block_size = case.key_cache.shape[1]
    for r, length in enumerate(case.batch.seq_lens.tolist()):
        rows = slice(starts[r], starts[r + 1])
        context = length - (rows.stop - rows.start) + 1
        if rows.start == rows.stop:
            continue
        blocks = case.batch.block_table[r, : -(-context // block_size)].long()
        keys = case.key_cache[blocks].flatten(0, 1)[:context]
        values = case.value_cache[blocks].flatten(0, 1)[:context]
        visible = torch.ones(rows.stop - rows.start, context, dtype=torch.bool, device=DEVICE)
        out[rows] = attend(case.query[rows], keys, values, visible, case.scale).to(out.dtype)
        grouped = keys.float().repeat_interleave(heads // keys.shape[1], 1)
        scores = torch.einsum("rhd,lhd->hrl", case.query[rows].float(), grouped) * case.scale
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse


contexts_and_rows = st.integers(2, 12).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.lists(st.tuples(st.integers(0, 75), st.integers(1, nodes + 1)), min_size=1, max_size=3),
    )
)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    requests=contexts_and_rows,
    group=st.integers(1, 3),
    block_size=st.sampled_from([16, 32, 64]),
)
def test_reference_equals_brute_force(
    seed: int, requests: tuple[int, list[tuple[int, int]]], group: int, block_size: int
) -> None:
    nodes, sizes = requests
    case = make_case(
        seed,
        [c for c, _ in sizes],
        [r for _, r in sizes],
        nodes=nodes,
        group=group,
        dim=16,
        block_size=block_size,
        causal=frozenset([0] if seed % 3 == 0 else []),
        padding=seed % 2,
    )
    out = case.out()
    tree_attention_reference(
        case.query, case.key_cache, case.value_cache, case.batch, case.scale, out
    )
    assert_close(out, brute_force(case), torch.float32)


kernel_cases = given(
    seed=st.integers(0, 2**31),
    requests=contexts_and_rows,
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([64, 96, 128]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)


def drawn(
    seed: int,
    requests: tuple[int, list[tuple[int, int]]],
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    nodes, sizes = requests
    return make_case(
        seed,
        [c for c, _ in sizes],
        [r for _, r in sizes],
        nodes=nodes,
        kv_heads=1 + seed % 2,
        group=group,
        dim=dim,
        block_size=block_size,
        dtype=dtype,
        causal=frozenset([len(sizes) - 1] if seed % 3 == 0 else []),
        padding=seed // 5 % 3,
    )


@settings(max_examples=15, deadline=None)
@kernel_cases
def test_triton_equals_reference(
    seed: int,
    requests: tuple[int, list[tuple[int, int]]],
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    case = drawn(seed, requests, group, dim, block_size, dtype)
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    expected, out = case.out(), case.out()
    tree_attention_reference(*args, expected)
    tree_attention_triton(*args, out, num_splits=[1, 2, 5][seed % 3])
    assert_close(out, expected, dtype)


@settings(max_examples=15, deadline=None)
@kernel_cases
def test_nodes_added_to_context_equal_reference(
    seed: int,
    requests: tuple[int, list[tuple[int, int]]],
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    case = drawn(seed, requests, group, dim, block_size, dtype)
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    expected = case.out()
    tree_attention_reference(*args, expected)
    out, lse = flash_context(case)
    add_nodes(*args, out, lse)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("nodes", [2, 63, 64, 65, 128])
def test_wide_trees(nodes: int) -> None:
    """Word boundaries of the masks, bit 63 included; D = 256."""
    case = make_case(nodes, [0, 31], [nodes + 1, nodes], nodes=nodes, kv_heads=1, group=1, dim=256)
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    expected = brute_force(case)
    out = case.out()
    tree_attention_reference(*args, out)
    assert_close(out, expected, torch.float32)
    out = case.out()
    tree_attention_triton(*args, out, num_splits=2)
    assert_close(out, expected, torch.float32)
    out, lse = flash_context(case)
    add_nodes(*args, out, lse)
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128])
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_contexts_around_block_boundaries(context: int, num_splits: int) -> None:
    case = make_case(context, [context], [4], nodes=3, kv_heads=1)
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    out = case.out()
    tree_attention_triton(*args, out, num_splits=num_splits)
    assert_close(out, brute_force(case), torch.float32)


@pytest.mark.parametrize("mode", ["triton", "nodes"])
def test_a_batch_of_padding_writes_nothing(mode: str) -> None:
    """A graph replayed for fewer requests, or captured before there are any."""
    case = make_case(0, [5], [4], nodes=3, padding=3)
    batch = case.batch
    empty = replace(
        batch,
        query_start_loc=torch.zeros_like(batch.query_start_loc),
        seq_lens=torch.zeros_like(batch.seq_lens),
        slots=torch.full_like(batch.slots, CAUSAL),
    )
    out = case.out()
    args = (case.query, case.key_cache, case.value_cache, empty, case.scale)
    if mode == "triton":
        tree_attention_triton(*args, out, num_splits=3)
    else:
        add_nodes(*args, out, torch.full((4, case.query.shape[0]), NAN, device=DEVICE))
    assert out.isnan().all()


@pytest.mark.parametrize("mode", ["triton", "nodes"])
def test_rows_without_keys_give_zero(mode: str) -> None:
    """vLLM captures some graphs with seq_len 1 or 0 for requests of many rows."""
    case = make_case(0, [5, 5], [4, 4], nodes=3)
    short = replace(case.batch, seq_lens=torch.zeros_like(case.batch.seq_lens))
    out = case.out()
    args = (case.query, case.key_cache, case.value_cache, short, case.scale)
    if mode == "triton":
        tree_attention_triton(*args, out, num_splits=2)
        assert (out[:8] == 0).all()
    else:
        lse = torch.full((4, case.query.shape[0]), float("inf"), device=DEVICE)
        add_nodes(*args, out, lse)
        assert (out[1:4] == 0).all() and (out[5:8] == 0).all()
    assert out[8:].isnan().all()


def test_context_lens_count_row_0_and_forget_padding() -> None:
    starts = torch.tensor([0, 4, 5, 5, 5], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([10, 1, 7, 0], dtype=torch.int32, device=DEVICE)
    out = torch.full((7,), -77, dtype=torch.int32, device=DEVICE)
    write_context_lens(starts, lengths, out)
    assert out.tolist() == [7, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("nodes", [2, 63, 64, 65, 128])
def test_ancestor_words_keep_every_bit(nodes: int) -> None:
    visible = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(nodes)) < 0.5
    assert torch.equal(unpack_ancestors(pack_ancestors(visible)), visible)
    if nodes >= 64:
        bit_63 = pack_ancestors(torch.eye(nodes, dtype=torch.bool))[63, 0]
        assert int(bit_63) == -(2**63)


def test_a_verify_pass_leaves_no_request_of_the_last_one() -> None:
    state = TreeState.allocate(5, 4, DEVICE)
    with state.verifying(torch.tensor([3, 1, 4], device=DEVICE), 3):
        assert state.active and state.slots.tolist() == [3, 1, 4, CAUSAL, CAUSAL]
    with state.verifying(torch.tensor([2, 0], device=DEVICE), 1):
        assert state.num_drafted == 1
        assert state.slots.tolist() == [2, CAUSAL, CAUSAL, CAUSAL, CAUSAL]
    assert not state.active


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (96, 1), (128, 4), (256, 2)])
def test_compiled_kernels_to_128k(dtype: torch.dtype, dim: int, group: int) -> None:
    case = make_case(
        dim,
        [0, 1, 127, 4600, 131_000],
        [33, 33, 33, 20, 33],
        nodes=32,
        kv_heads=2,
        group=group,
        dim=dim,
        dtype=dtype,
        causal=frozenset([3]),
        padding=3,
    )
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    expected = case.out()
    tree_attention_reference(*args, expected)
    for num_splits in (None, 1, 7, 64):
        out = case.out()
        tree_attention_triton(*args, out, num_splits=num_splits)
        assert_close(out, expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (96, 1), (128, 4), (256, 2)])
@pytest.mark.parametrize("nodes", [32, 128])
def test_flash_to_128k(dtype: torch.dtype, dim: int, group: int, nodes: int) -> None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    case = make_case(
        dim,
        [0, 1, 127, 4600, 131_000],
        [nodes + 1, nodes + 1, nodes + 1, 20, nodes + 1],
        nodes=nodes,
        kv_heads=2,
        group=group,
        dim=dim,
        dtype=dtype,
        causal=frozenset([3]),
        padding=3,
        # FlashAttention may read past the context's end, at weight 0: finite, but it would show.
        poison=1e4,
    )
    args = (case.query, case.key_cache, case.value_cache, case.batch, case.scale)
    expected, out = case.out(), case.out()
    tree_attention_reference(*args, expected)
    lens = torch.empty_like(case.batch.seq_lens)
    write_context_lens(case.batch.query_start_loc, case.batch.seq_lens, lens)
    for num_splits in (0, 1, 8):
        out = case.out()
        tree_attention_flash(
            *args,
            out,
            context_lens=lens,
            max_context=131_072,
            fa_version=get_flash_attn_version(head_size=dim),
            num_splits=num_splits,
        )
        # FlashAttention writes padding tokens as well.
        tokens = int(case.batch.query_start_loc[-1])
        assert_close(out[:tokens], expected[:tokens], dtype)


@pytest.mark.gpu
def test_a_graph_follows_its_buffers() -> None:
    """Captured over padding, replayed over requests, then over fewer."""
    case = make_case(3, [40, 300], [33, 33], nodes=32, group=4, dim=128, dtype=torch.bfloat16)
    live = case.batch
    held = replace(
        live,
        query_start_loc=torch.zeros_like(live.query_start_loc),
        seq_lens=torch.zeros_like(live.seq_lens),
        slots=torch.full_like(live.slots, CAUSAL),
    )
    args = (case.query, case.key_cache, case.value_cache, held, case.scale)
    out = case.out()
    tree_attention_triton(*args, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention_triton(*args, out)
    expected = case.out()
    tree_attention_reference(
        case.query, case.key_cache, case.value_cache, live, case.scale, expected
    )
    held.query_start_loc.copy_(live.query_start_loc)
    held.seq_lens.copy_(live.seq_lens)
    held.slots.copy_(live.slots)
    graph.replay()
    assert_close(out, expected, torch.bfloat16)
    held.query_start_loc[2] = 33
    held.seq_lens[1] = 0
    out.fill_(NAN)
    graph.replay()
    assert_close(out[:33], expected[:33], torch.bfloat16)
    assert out[33:].isnan().all()


# A process of its own: here the kernels are interpreted.
COMPILE = """
from types import SimpleNamespace
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

class Driver:
    is_active = staticmethod(lambda: True)

backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
import vllm.triton_utils
del backends["cpu"]
from vllm_uno.tree import attention

def compile_for_h200(kernel, types, **constants):
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    options = {"num_warps": 4, "num_stages": constants.pop("stages", 1)}
    binary = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    assert binary.metadata.shared <= 100 * 1024, binary.metadata.shared
    print("COMPILED", kernel.fn.__name__)

common = {
    "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32", "block_table_ptr": "*i32",
    "ancestors_ptr": "*i64", "slots_ptr": "*i32", "scale_log2": "fp32", "lse_ptr": "*fp32",
    "partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32",
}
import torch
for name, dtype, dim, m, n, final in (
    ("*bf16", torch.bfloat16, 128, 64, 64, False), ("*fp32", torch.float32, 256, 32, 32, True)
):
    types = {**common, **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), name)}
    shape = dict(GROUP=4, D=dim, D_PAD=dim)
    tree = dict(**shape, V=65, WORDS=2, KV_BLOCK=16, NODE_BLOCK=n)
    compile_for_h200(
        attention._split_kernel, types, **tree, HEADS=32, TILES=3, BLOCK_M=m, BLOCK_N=n,
        FINAL=final, stages=attention._stages(dtype, dim),
    )
types = {**common, **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")}
shape = dict(GROUP=4, D=128, D_PAD=128)
compile_for_h200(
    attention._add_nodes_kernel, types, **shape, V=65, WORDS=2, KV_BLOCK=16, NODE_BLOCK=64,
    LOG2_E=1.4, BLOCK_M=16,
)
compile_for_h200(attention._merge_splits_kernel, types, **shape, HEADS=32, GROUP_PAD=4)
compile_for_h200(attention._context_lens_kernel, {**common, "out_ptr": "*i32"}, BLOCK=128)
"""


def test_kernels_compile_for_sm_90() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env={**env, "UNO_CPU_INTERPRETER": "0"},
        check=False,
    )
    assert done.stdout.count("COMPILED") == 5, done.stdout[-500:] + done.stderr[-3000:]
