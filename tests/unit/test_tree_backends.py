"""vLLM's attention backends with trees: whole batches through builder, KV write and forward."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree import backends, state  # noqa: E402
from vllm_uno.tree.cpu_layout import slot_elements  # noqa: E402
from vllm_uno.vllm_hooks.attention_api import (  # noqa: E402
    AttentionBackendEnum,
    AttentionCGSupport,
    CommonAttentionMetadata,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BLOCK = 32
NODES = 5
TREES = {1: [-1, 0, 0, 1, 2], 3: [-1, 0, 1, 2, 0]}
"""Parents by request-state slot."""

BACKENDS = {
    "triton": backends.TreeTritonAttentionBackend,
    **({"flash": backends.TreeFlashAttentionBackend} if GPU else {}),
    **({} if GPU else {"cpu": backends.TreeCPUAttentionBackend}),
}


@pytest.fixture(autouse=True)
def stock_triton_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.fixture(scope="module")
def config(model: Path) -> VllmConfig:
    dtype = "bfloat16" if GPU else "float32"
    return EngineArgs(model=str(model), dtype=dtype, max_model_len=256).create_engine_config()


@pytest.fixture
def tree(config: VllmConfig) -> Iterator[state.TreeState]:
    made = state.TreeState.allocate(6, NODES, DEVICE)
    for slot, parents in TREES.items():
        visible = torch.eye(NODES, dtype=torch.bool)
        for j, parent in enumerate(parents):
            if parent >= 0:
                visible[j] |= visible[parent]
        made.ancestors[slot] = state.pack_ancestors(visible)
    state.install(made)
    yield made
    state.install(None)


class Layer:
    """One attention layer and its cache, with random keys, values and queries."""

    def __init__(self, backend: Any, config: VllmConfig) -> None:
        self.dtype = config.model_config.dtype
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
        dim = config.model_config.get_head_size()
        self.shape = heads, kv_heads, dim
        self.scale = dim**-0.5
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=self.dtype
        )
        with set_current_vllm_config(config):
            self.impl = backend.get_impl_cls()(heads, dim, self.scale, kv_heads, None, None, "auto")
            self.builder = backend.get_builder_cls()(spec, [], config, DEVICE)
        one = torch.ones((), device=DEVICE)
        self.layer = types.SimpleNamespace(
            isa=getattr(self.builder, "isa", None),
            _q_scale=one, _k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0,
        )  # fmt: skip
        self.cache = torch.zeros(64, kv_heads, BLOCK, 2 * dim, dtype=self.dtype, device=DEVICE)

    def prepare(
        self, requests: list[tuple[int, int, int | None]], padding: int = 0
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Batch, query, new keys, new values, expected output; writes the contexts' KV.

        `requests`: (context, rows, slot of its tree or None); `padding`: requests without rows.
        """
        g = torch.Generator().manual_seed(7)
        heads, kv_heads, dim = self.shape
        n = len(requests) + padding
        lengths = [c + r for c, r, _ in requests] + [0] * padding
        rows = [r for _, r, _ in requests] + [0] * padding
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        table = (torch.randperm(63, generator=g)[: n * 6] + 1).view(n, 6).int()
        tokens = sum(rows)
        query = torch.randn(tokens, heads, dim, generator=g).to(DEVICE, self.dtype)
        all_keys, all_values, new_slots = [], [], []
        for r, length in enumerate(lengths):
            keys = torch.randn(2, length, kv_heads, dim, generator=g).to(DEVICE, self.dtype)
            p = torch.arange(length)
            slots = table[r, p // BLOCK].long() * BLOCK + p % BLOCK
            old = length - rows[r]
            if old:
                self.impl.do_kv_cache_update(
                    self.layer, keys[0, :old], keys[1, :old], self.cache, slots[:old].to(DEVICE)
                )
            all_keys.append(keys[0])
            all_values.append(keys[1])
            new_slots.append(slots[old:])
        new_keys, new_values = (
            torch.cat([t[len(t) - rows[r] :] for r, t in enumerate(ts)])
            for ts in (all_keys, all_values)
        )
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            num_reqs=n,
            num_actual_tokens=tokens,
            max_query_len=max(rows),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(DEVICE),
            slot_mapping=torch.cat(new_slots).to(DEVICE),
        )
        expected = [
            self.expected(query[starts[r] : starts[r + 1]], all_keys[r], all_values[r], *request)
            for r, request in enumerate(requests)
        ]
        return common, query, new_keys, new_values, torch.cat(expected)

    def run(
        self,
        tree: state.TreeState | None,
        requests: list[tuple[int, int, int | None]],
        padding: int = 0,
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Metadata, output and expected output; `tree` None: outside a verify pass."""
        common, query, keys, values, expected = self.prepare(requests, padding)
        if tree is None:
            metadata = self.builder.build(0, common)
        else:
            drafted = [s for _, _, s in requests if s is not None]
            with tree.verifying(torch.tensor(drafted, device=DEVICE), len(drafted)):
                metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, keys, values, self.cache, common.slot_mapping)
        out = torch.full_like(query, float("nan"))
        self.impl.forward(self.layer, query, keys, values, self.cache, metadata, out)
        return metadata, out, expected

    def expected(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: int,
        rows: int,
        slot: int | None,
    ) -> torch.Tensor:
        group = self.shape[0] // self.shape[1]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
        out = []
        for row in range(rows):
            positions = list(range(context + 1))
            node = row - 1
            while node >= 0:
                positions.append(context + 1 + node)
                node = node - 1 if slot is None else TREES[slot][node]
            weights = (keys[positions] * query[row].float()).sum(-1) * self.scale
            out.append((weights.softmax(0)[..., None] * values[positions]).sum(0))
        return torch.stack(out)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-2 if GPU else 2e-5
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_batch(backend: str, config: VllmConfig, tree: state.TreeState) -> None:
    """Trees, one of them cut short, before a decode of one row and prefills."""
    layer = Layer(BACKENDS[backend], config)
    requests = [(40, 6, 3), (0, 6, 1), (31, 4, 1), (50, 1, None), (0, 9, None), (33, 20, None)]
    metadata, out, expected = layer.run(tree, requests)
    assert metadata.num_tree_tokens == 16 and metadata.rest is not None
    assert_close(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_batch_with_padding(backend: str, config: VllmConfig, tree: state.TreeState) -> None:
    """As FULL graphs have it; the last request is a prefill of V + 1 tokens."""
    layer = Layer(BACKENDS[backend], config)
    metadata, out, expected = layer.run(tree, [(40, 6, 1), (95, 6, 3), (0, 6, None)], padding=2)
    assert metadata.rest is None
    assert_close(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stock_path_outside_verify_passes(
    backend: str, config: VllmConfig, tree: state.TreeState
) -> None:
    """The draft pass: same layers, causal rows, whatever trees there are."""
    layer = Layer(BACKENDS[backend], config)
    metadata, out, expected = layer.run(None, [(40, 6, None), (3, 6, None)])
    assert not isinstance(metadata, backends.TreeMetadata)
    assert_close(out, expected)


def test_another_engines_trees_do_not_matter(config: VllmConfig, tree: state.TreeState) -> None:
    """A second engine of the process installs its own state after this one was built."""
    layer = Layer(next(iter(BACKENDS.values())), config)
    state.install(state.TreeState.allocate(6, NODES, DEVICE))
    _, out, expected = layer.run(tree, [(40, 6, 1), (7, 6, 3)])
    assert_close(out, expected)


def test_a_wrong_tree_shows(config: VllmConfig, tree: state.TreeState) -> None:
    """The comparison above can fail: one bit of one node."""
    layer = Layer(BACKENDS["triton"], config)
    tree.ancestors[3, 4, 0] ^= 2
    _, out, expected = layer.run(tree, [(40, 6, 3)])
    different = (out.float() - expected).abs().amax((1, 2)) > 0.05
    assert different.tolist() == [False] * 5 + [True]


def test_longer_requests_are_no_trees(config: VllmConfig, tree: state.TreeState) -> None:
    layer = Layer(BACKENDS["triton"], config)
    common, *_ = layer.prepare([(40, 9, None), (0, 12, None)])
    with tree.verifying(torch.tensor([1], device=DEVICE), 1):
        with pytest.raises(RuntimeError, match="9 rows"):
            layer.builder.build(0, common)


@pytest.mark.parametrize(
    ("argument", "value", "name"),
    [
        ("alibi_slopes", [0.5] * 4, "ALiBi"),
        ("sliding_window", 16, "sliding windows"),
        ("logits_soft_cap", 30.0, "soft cap"),
        ("kv_cache_dtype", "fp8", "KV cache"),
        ("attn_type", "encoder_decoder", "cross attention"),
        ("sinks", torch.zeros(4), "sinks"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_by_name(
    backend: str, argument: str, value: Any, name: str, config: VllmConfig
) -> None:
    arguments: dict[str, Any] = dict(
        num_heads=4, head_size=64, scale=0.125, num_kv_heads=2, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto",
    )  # fmt: skip
    arguments[argument] = value
    with_trees = copy.copy(config)
    with_trees.speculative_config = SimpleNamespace(uno_mode="tree")  # type: ignore[assignment]
    with set_current_vllm_config(with_trees), pytest.raises(ValueError, match=name):
        BACKENDS[backend].get_impl_cls()(**arguments)
    # To any other engine they are the stock ones.
    refused = None
    with set_current_vllm_config(config):
        try:
            BACKENDS[backend].get_impl_cls()(**arguments)
        except Exception as error:  # what stock refuses of its own
            refused = error
    assert "tree mode" not in str(refused)


def test_graphs_of_uniform_batches_only(config: VllmConfig) -> None:
    for backend in BACKENDS.values():
        stock = backend.get_builder_cls().__mro__[2]
        support = backend.get_builder_cls().get_cudagraph_support(config, None)
        assert support.value <= AttentionCGSupport.UNIFORM_BATCH.value
        assert support.value <= stock.get_cudagraph_support(config, None).value


def test_registered_under_vllms_names() -> None:
    flash = AttentionBackendEnum.FLASH_ATTN
    backends.register_tree_backends()
    try:
        for member, path in backends._BACKENDS.items():
            assert member.get_path() == path and member.get_class().get_name() == member.name
        backends.register_tree_backends()  # twice is once
    finally:
        backends.unregister_tree_backends()
    assert not flash.is_overridden()
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(flash, "somebody.Else")
    try:
        with pytest.raises(ValueError, match=r"somebody\.Else"):
            backends.register_tree_backends()
    finally:
        flash.clear_override()


def test_other_backends_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flashinfer:
        @staticmethod
        def get_name() -> str:
            return "FLASHINFER"

    layers = {
        "model.layers.0": types.SimpleNamespace(
            get_attn_backend=lambda: backends.TreeFlashAttentionBackend
        )
    }
    monkeypatch.setattr(backends, "get_layers_from_vllm_config", lambda *_: layers)
    backends.check_tree_backends(None)
    layers["model.layers.1"] = types.SimpleNamespace(get_attn_backend=lambda: Flashinfer)
    with pytest.raises(ValueError, match=r"FLASHINFER.*layers\.1.*FLASH_ATTN, TRITON_ATTN"):
        backends.check_tree_backends(None)


@pytest.mark.skipif(GPU, reason="the CPU build's operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block_size", "dim"), [(32, 32), (64, 128)])
def test_cpu_layout_finds_what_was_written(dtype: torch.dtype, block_size: int, dim: int) -> None:
    from vllm import _custom_ops as ops

    keys, values = torch.randn(2, 40, 2, dim).to(dtype)
    cache = torch.zeros(3, 2, 2 * block_size, dim, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.randperm(3 * block_size)[:40]
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, "vec")
    where_keys, where_values = slot_elements("vec", dtype, block_size, dim)
    flat = cache.view(3, 2, -1)
    for t, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(flat[block][:, where_keys[offset]], keys[t])
        assert torch.equal(flat[block][:, where_values[offset]], values[t])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_full_graph(backend: str, config: VllmConfig, tree: state.TreeState) -> None:
    """Captured over a dummy batch; then metadata is built anew for each replay, as vLLM does."""
    layer = Layer(BACKENDS[backend], config)
    rows = NODES + 1
    held, query, *_ = layer.prepare([(0, rows, None)] * 4, 0)
    held.max_seq_len = config.model_config.max_model_len
    out = torch.zeros_like(query)
    with tree.verifying(torch.empty(0, dtype=torch.int32, device=DEVICE), 0):
        metadata = layer.builder.build_for_cudagraph_capture(held)
    args = (layer.layer, query, None, None, layer.cache)
    layer.impl.forward(*args, metadata, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.impl.forward(*args, metadata, out)
    for requests, padding in (
        ([(40, rows, 1), (150, rows, 3), (0, rows, None)], 1),
        ([(0, rows, 3), (33, rows, 1), (7, rows, 1), (120, rows, 3)], 0),
        ([(180, rows, 3)], 3),
    ):
        live, live_query, keys, values, expected = layer.prepare(requests, padding)
        held.query_start_loc.copy_(live.query_start_loc)
        held.seq_lens.copy_(live.seq_lens)
        held.block_table_tensor.copy_(live.block_table_tensor)
        step = replace(
            live,
            query_start_loc=held.query_start_loc,
            seq_lens=held.seq_lens,
            block_table_tensor=held.block_table_tensor,
            num_actual_tokens=4 * rows,
        )
        drafted = [s for _, _, s in requests if s is not None]
        with tree.verifying(torch.tensor(drafted, device=DEVICE), len(drafted)):
            layer.builder.build(0, step)
        layer.impl.do_kv_cache_update(layer.layer, keys, values, layer.cache, live.slot_mapping)
        n = live_query.shape[0]
        query[:n].copy_(live_query)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out[:n], expected)
