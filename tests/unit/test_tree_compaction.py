"""KV compaction against a copy by hand, over every layout, in poisoned storage.

On the CPU the kernel runs in Triton's interpreter, with a GPU it is compiled.
"""

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.compaction import KVCaches, compact_kv, compact_reference  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = [*KVCacheLayout.__members__, "apart", "blocks_apart", "key_columns"]


def storage(
    g: torch.Generator, layout: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Random bytes, and the cache views [B, H, N, C] of every layer that lie in them.

    `shape` is [L, B, H, N, C]. Besides vLLM's layouts: K and V apart ([2, ...] and
    [blocks, 2, ...]), and keys with their elements a block apart.
    """
    layers, blocks, heads, tokens, content = shape
    size = torch.empty((), dtype=dtype).element_size()
    numel = layers * blocks * heads * tokens * content
    margin = 16  # elements before and after
    raw = torch.randint(-128, 128, ((numel + 2 * margin) * size,), generator=g).to(torch.int8)
    raw = raw.to(DEVICE)
    whole = raw.view(dtype)[margin : margin + numel]
    half = content // 2
    if layout in KVCacheLayout.__members__:
        order = KVCacheLayout[layout].stride_order
        physical = whole.view([shape[i] for i in order])
        logical = physical.permute([order.index(i) for i in range(5)])
        assert logical.shape == shape
        return raw, list(logical.unbind(0))
    if layout == "apart":  # [layer, 2, blocks, tokens, heads, dim]
        x = whole.view(layers, 2, blocks, tokens, heads, half)
        return raw, [x[i, j].transpose(1, 2) for i in range(layers) for j in (0, 1)]
    x = whole.view(layers, blocks, 2, tokens, heads, half)
    if layout == "blocks_apart":
        return raw, [x[i, :, j].transpose(1, 2) for i in range(layers) for j in (0, 1)]
    # [layer, blocks, 2, heads, dim, tokens] for keys
    keys = whole.view(layers, blocks, 2, heads, half, tokens)[:, :, 0].transpose(3, 4)
    values = whole.view(layers, blocks, 2, heads, tokens, half)[:, :, 1]
    return raw, [*keys.unbind(0), *values.unbind(0)]


def check(
    seed: int,
    layout: str,
    dtype: torch.dtype,
    num_reqs: int,
    heads: int,
    content: int,
    split: int = 1,
    num_nodes: int = 12,
    tokens: int = 4,
) -> None:
    """`split`: cache blocks in one of vLLM's blocks."""
    g = torch.Generator().manual_seed(seed)
    per_req = (num_nodes + 16) // (tokens * split) + 2
    blocks = (num_reqs * per_req + 2) * split
    groups = 2
    shape = (2, blocks, heads, tokens, content)
    made = [storage(g, layout, shape, dtype) for _ in range(groups)]
    views = [v for _, caches in made for v in caches]
    of_group = [group for group, (_, caches) in enumerate(made) for _ in caches]

    block_size = tokens * split
    tables = [
        (torch.randperm(num_reqs * per_req, generator=g) + 1).view(num_reqs, per_req).int()
        for _ in range(groups)
    ]
    on_device = [t.to(DEVICE) for t in tables]
    block_tables: Any = types.SimpleNamespace(
        input_block_table_ptrs=torch.tensor(
            [t.data_ptr() for t in on_device], dtype=torch.uint64, device=DEVICE
        ),
        block_table_strides=torch.tensor([per_req] * groups, dtype=torch.int64, device=DEVICE),
        block_sizes_tensor=torch.tensor([block_size] * groups, dtype=torch.int32, device=DEVICE),
    )
    idx = torch.randperm(num_reqs + 1, generator=g)[:num_reqs]
    idx[torch.rand(num_reqs, generator=g) < 0.1] = -1
    path = torch.full((num_reqs + 1, num_nodes + 1), -(2**20), dtype=torch.int32)
    num_sampled, rows, positions = [], [0], []
    for request, slot in enumerate(idx.tolist()):
        accepted = int(torch.randint(0, num_nodes + 1, (), generator=g))
        taken = (torch.randperm(num_nodes, generator=g)[:accepted] + 1).sort().values
        num_sampled.append(0 if request % 5 == 4 else accepted + 1)
        positions += [int(torch.randint(0, 16, (), generator=g)), *[-(2**40)] * num_nodes]
        rows.append(len(positions))
        if slot >= 0:
            path[slot, : accepted + 1] = torch.tensor([0, *taken.tolist()])

    before = [raw.clone() for raw, _ in made]
    # The last cache twice, as layers that share one.
    compact_kv(
        KVCaches.of([*views, views[-1]], [*of_group, of_group[-1]]),
        path=path.to(DEVICE),
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32, device=DEVICE),
        idx_mapping=idx.to(DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        cu_num_logits=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        block_tables=block_tables,
    )
    got = [raw.clone() for raw, _ in made]
    for (raw, _), old in zip(made, before, strict=True):
        raw.copy_(old)
    for cache, group in zip(views, of_group, strict=True):
        for request, slot in enumerate(idx.tolist()):
            if slot >= 0 and num_sampled[request] > 0:
                compact_reference(
                    cache,
                    tables[group][request],
                    block_size,
                    positions[rows[request]],
                    path[slot, : num_sampled[request]].tolist(),
                )
    for (raw, _), moved in zip(made, got, strict=True):
        assert torch.equal(raw, moved)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    num_reqs=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 3, 9]),
    content=st.sampled_from([2, 6, 16, 40, 64]),
    split=st.sampled_from([1, 2]),
)
def test_compaction_equals_a_copy_by_hand(
    seed: int,
    layout: str,
    dtype: torch.dtype,
    num_reqs: int,
    heads: int,
    content: int,
    split: int,
) -> None:
    check(seed, layout, dtype, num_reqs, heads, content, split)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_every_layout(layout: str, dtype: torch.dtype) -> None:
    check(1, layout, dtype, 3, 4, 32)


def test_long_paths_overlap_themselves() -> None:
    for seed in range(3):
        check(seed, "LBNHC", torch.bfloat16, 2, 8, 256, num_nodes=40, tokens=16)


def test_units_and_what_is_no_cache() -> None:
    bf16 = torch.zeros(3, 2, 4, 12, dtype=torch.bfloat16)
    assert KVCaches.of([bf16], [0]).unit == 8
    assert KVCaches.of([torch.zeros(3, 2, 4, 6, dtype=torch.bfloat16)], [0]).unit == 4
    assert KVCaches.of([bf16.transpose(2, 3)], [0]).unit == 2
    assert KVCaches.of([bf16, bf16], [0, 0]).table.shape[0] == 1
    with pytest.raises(ValueError, match="KV cache of shape"):
        KVCaches.of([torch.zeros(2, 3, 4)], [0])
    with pytest.raises(ValueError, match="no KV cache"):
        KVCaches.of([], [])
    with pytest.raises(ValueError, match="several dtypes"):
        KVCaches.of([bf16.transpose(2, 3), torch.zeros(3, 2, 4, 8).transpose(2, 3)], [0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
def test_serving_shapes(layout: str, dtype: torch.dtype) -> None:
    for seed, heads in ((0, 8), (1, 1), (2, 32)):
        check(seed, layout, dtype, 32, heads, 256, num_nodes=32, tokens=16)
