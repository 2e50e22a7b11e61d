"""The draft view's linear operators against their oracles: layouts, tracing, and (GPU) kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from poisoned import check_a_thousand_replays, poison
from torch import nn
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_uno import lora_kernels, lora_linear, ops
from vllm_uno.adapter import LinearLora
from vllm_uno.draft_view import shallow_copy
from vllm_uno.lora_kernels import (
    KernelLora,
    kernel_lora,
    lora_delta_reference,
    uno_linear_reference,
)
from vllm_uno.lora_linear import UnoLinearMethod, add_lora, slow_layers

needs_cuda_kernel = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not ops.extension_available()
    or not torch._C._dispatch_has_kernel_for_dispatch_key("vllm_uno::lora_expand_", "CUDA"),
    reason="needs a CUDA device and an extension built with its CUDA sources",
)


def make_lora(
    widths: list[int], ranks: list[int | None], columns: int, dtype: torch.dtype, seed: int = 0
) -> LinearLora:
    """A packed layer of slices of these widths; rank None: a slice without an adapter."""
    gen = torch.Generator().manual_seed(seed)
    out_slices, rank_slices, b = [], [], []
    at = low = 0
    for width, rank in zip(widths, ranks, strict=True):
        if rank is not None:
            out_slices.append((at, at + width))
            rank_slices.append((low, low + rank))
            b.append((torch.randn(width, rank, generator=gen) / rank**0.5).to(dtype))
            low += rank
        at += width
    a = (torch.randn(low, columns, generator=gen) / columns**0.5).to(dtype)
    return LinearLora(a, tuple(b), tuple(out_slices), tuple(rank_slices), at)


slices = st.lists(
    st.tuples(
        st.sampled_from([32, 64, 96, 160]), st.one_of(st.none(), st.sampled_from([1, 5, 32, 40]))
    ),
    min_size=1,
    max_size=3,
).filter(lambda found: any(rank is not None for _, rank in found))


@settings(max_examples=60, deadline=None)
@given(slices=slices, rows=st.integers(0, 20), block=st.integers(1, 9), seed=st.integers(0, 99))
def test_layout_means_what_the_adapter_does(
    slices: list[tuple[int, int | None]], rows: int, block: int, seed: int
) -> None:
    widths, ranks = [w for w, _ in slices], [r for _, r in slices]
    lora = make_lora(widths, ranks, 64, torch.bfloat16, seed)
    kernel = kernel_lora(lora)
    assert kernel is not None
    assert kernel.b.shape == (sum(widths), 64)
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=gen).bfloat16()
    base = torch.randn(rows, sum(widths), generator=gen).bfloat16()
    delta = lora_delta_reference(x, kernel.a, kernel.b, kernel.end0, kernel.end1, block)
    got = base + delta
    want = add_lora(base, x, lora.a, list(lora.b), lora.out_slices, lora.rank_slices, block)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    assert not delta[::block].any()


@pytest.mark.parametrize(
    ("widths", "ranks", "columns", "dtype"),
    [
        ([48], [8], 64, torch.bfloat16),
        ([64], [257], 64, torch.bfloat16),
        ([64], [8], 64, torch.float32),
        ([32, 32, 32, 32], [8, 8, 8, 8], 64, torch.bfloat16),
    ],
)
def test_other_shapes_take_the_other_path(
    widths: list[int], ranks: list[int | None], columns: int, dtype: torch.dtype
) -> None:
    assert kernel_lora(make_lora(widths, ranks, columns, dtype)) is None


def case(
    rows: int, widths: list[int], ranks: list[int | None], columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, KernelLora]:
    kernel = kernel_lora(make_lora(widths, ranks, columns, dtype))
    assert kernel is not None
    gen = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=gen).to(dtype)
    weight = (torch.randn(sum(widths), columns, generator=gen) / columns**0.5).to(dtype)
    return x, weight, kernel


def test_operators_trace_with_any_number_of_rows() -> None:
    x, weight, kernel = case(20, [64, 32], [8, 8], 64, torch.bfloat16)

    def layer(x: torch.Tensor) -> torch.Tensor:
        ends = (kernel.end0, kernel.end1)
        y, d = torch.ops.vllm_uno.uno_linear(x * 2, weight, None, kernel.a, kernel.b, *ends, 4)
        z = torch.ops.vllm_uno.uno_linear_sum(x, weight, None, kernel.a, kernel.b, *ends, 4)
        return y + d + z + torch.ops.vllm_uno.lora_delta(x, kernel.a, kernel.b, *ends, 4) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 12, 5):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


def test_operators_pass_opcheck() -> None:
    x, weight, kernel = case(9, [64, 32], [8, 8], 64, torch.bfloat16)
    rest = (kernel.a, kernel.b, kernel.end0, kernel.end1, 4)
    for op in (torch.ops.vllm_uno.uno_linear, torch.ops.vllm_uno.uno_linear_sum):
        torch.library.opcheck(op.default, (x, weight, torch.randn(96).bfloat16(), *rest))
    torch.library.opcheck(torch.ops.vllm_uno.lora_delta.default, (x, *rest))


# On a GPU.

gpu_cases = st.fixed_dictionaries(
    {
        "rows": st.one_of(st.integers(1, 40), st.integers(41, 600)),
        "slices": st.lists(
            st.tuples(
                st.sampled_from([32, 64, 96, 1024]),
                st.one_of(st.none(), st.integers(1, 256)),
            ),
            min_size=1,
            max_size=3,
        ).filter(lambda found: any(rank is not None for _, rank in found)),
        "columns": st.sampled_from([64, 128, 192, 512, 576, 4096, 12288]),
        "block": st.integers(1, 17),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "bias": st.booleans(),
        "op": st.sampled_from(["uno_linear", "uno_linear_sum", "lora_delta"]),
    }
)
QKV = {
    "rows": 8,
    "slices": [(4096, 128), (1024, 128), (1024, 128)],
    "columns": 4096,
    "block": 8,
    "dtype": torch.bfloat16,
    "bias": False,
    "op": "uno_linear",
}


def run(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """The layer's output by one of the operators, summed in fp32."""
    if op == "uno_linear_sum":
        return torch.ops.vllm_uno.uno_linear_sum(x, weight, bias, *rest).float()
    if op == "uno_linear":
        y, d = torch.ops.vllm_uno.uno_linear(x, weight, bias, *rest)
    else:
        y = torch.nn.functional.linear(x, weight, bias)
        d = torch.ops.vllm_uno.lora_delta(x, *rest)
    return y.float() + d.float()


def check(found: dict[str, Any]) -> None:
    widths, ranks = [w for w, _ in found["slices"]], [r for _, r in found["slices"]]
    x, weight, kernel = case(found["rows"], widths, ranks, found["columns"], found["dtype"])
    x[:: found["block"]] *= 1e3  # a seed row that leaks through the gate shows
    x, weight, a, b = (t.cuda() for t in (x, weight, kernel.a, kernel.b))
    bias = torch.randn(sum(widths)).to(x) if found["bias"] else None
    ends, block = (kernel.end0, kernel.end1), found["block"]
    base, delta = uno_linear_reference(
        *(t.double() for t in (x, weight)),
        None if bias is None else bias.double(),
        *(t.double() for t in (a, b)),
        *ends,
        block,
    )
    exact = (base + delta).float()
    for _ in range(2):
        poison()
        got = run(found["op"], x, weight, bias, a, b, *ends, block)
        scale = exact.abs().amax(1, keepdim=True).clamp(min=1)
        assert float(((got.float() - exact) / scale).abs().max()) < 2e-2


@pytest.mark.gpu
@needs_cuda_kernel
@settings(max_examples=150, deadline=None)
@example(found=QKV)
@example(found=QKV | {"rows": 64, "slices": [(12288, 128), (12288, 128)]})
@example(found=QKV | {"rows": 24, "slices": [(96, 200), (1024, None), (32, 7)]})
@example(found=QKV | {"rows": 512, "slices": [(12288, 128), (12288, 128)]})
@example(found=QKV | {"rows": 16, "slices": [(4096, 128)], "columns": 12288})
@example(found=QKV | {"slices": [(32, 1)], "columns": 64, "rows": 1})
@given(found=gpu_cases)
def test_kernels_match_the_oracle(found: dict[str, Any]) -> None:
    check(found)


@pytest.mark.gpu
@needs_cuda_kernel
@pytest.mark.parametrize("rows", [8, 64, 72])
@pytest.mark.parametrize("summed", [False, True])
def test_a_thousand_replays_under_a_poisoned_allocator(rows: int, summed: bool) -> None:
    def layer(widths: list[int]) -> tuple[torch.Tensor, tuple[Any, ...]]:
        x, weight, k = case(rows, widths, [128] * len(widths), 4096, torch.bfloat16)
        return x.cuda(), (weight.cuda(), None, k.a.cuda(), k.b.cuda(), k.end0, k.end1, 8)

    # The same layer twice in a row: what the first made may still be in use.
    (x, qkv), (_, o) = layer([4096, 1024, 1024]), layer([4096])

    def op(*args: Any) -> torch.Tensor:
        if summed:
            return torch.ops.vllm_uno.uno_linear_sum(*args)
        y, d = torch.ops.vllm_uno.uno_linear(*args)
        return y + d

    def layers() -> torch.Tensor:
        first, again = (op(x, *qkv) for _ in range(2))
        return op((first + again)[:, :4096].contiguous(), *o)

    check_a_thousand_replays(layers)


@pytest.mark.gpu
@needs_cuda_kernel
@pytest.mark.parametrize("op", ["uno_linear", "uno_linear_sum", "lora_delta"])
@pytest.mark.parametrize("rows", [8, 16, 30])
def test_numbers_of_a_seed_row_stay_in_it(op: str, rows: int) -> None:
    x, weight, k = case(rows, [4096, 1024, 1024], [128] * 3, 4096, torch.bfloat16)
    x, weight, a, b = (t.cuda() for t in (x, weight, k.a, k.b))
    rest = (None, a, b, k.end0, k.end1, 8)
    want = run(op, x, weight, *rest)
    x[::8] = float("nan")
    got = run(op, x, weight, *rest)
    noise = torch.arange(rows) % 8 != 0
    assert torch.equal(got[noise], want[noise]) and bool(got[~noise].isnan().all())


def test_the_switch_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_kernels, "extension_error", lambda: None)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *names: True)
    monkeypatch.setattr(lora_kernels, "_launch_error", lambda device: None)
    gpu = torch.device("cuda")
    monkeypatch.delenv(lora_kernels.SWITCH, raising=False)
    assert lora_kernels.kernels_available(gpu)
    assert not lora_kernels.kernels_available(torch.device("cpu"))
    monkeypatch.setenv(lora_kernels.SWITCH, "0")
    assert not lora_kernels.kernels_available(gpu)
    assert lora_kernels.SWITCH in str(lora_kernels.slow_path(gpu))
    monkeypatch.delenv(lora_kernels.SWITCH)
    monkeypatch.setattr(lora_kernels, "_launch_error", lambda device: "no kernel image")
    assert "no kernel image" in str(lora_kernels.slow_path(gpu))


class FakeQkv(QKVParallelLinear):
    """Weight and base method of a packed layer, without vLLM's parallel state."""

    def __init__(self, weight: torch.Tensor, method: object) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = method


class FakeLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, method: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = method


class OtherMethod(UnquantizedLinearMethod):
    """More than a product."""

    def __init__(self) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias) * 2


@pytest.mark.parametrize("base", ["plain", "other"])
@pytest.mark.parametrize("kind", [FakeQkv, FakeLinear])
def test_layers_add_the_lora_by_the_kernels(
    kind: type[FakeLinear], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operators' CPU versions, over base methods that are a product and more than one."""
    monkeypatch.setattr(lora_linear, "kernels_available", lambda device: True)
    method = OtherMethod() if base == "other" else object.__new__(UnquantizedLinearMethod)
    if base == "plain":
        method._gemm_impl = default_unquantized_gemm
    lora = make_lora([64, 32, 32], [8, 3, None], 48, torch.bfloat16)
    weight = (torch.randn(128, 48) / 7).bfloat16()
    target = kind(weight, method)
    layer = shallow_copy(target)
    UnoLinearMethod.attach(layer, target, lora, 4)
    assert layer.quant_method.ends is not None and layer.quant_method.plain == (base == "plain")
    assert slow_layers(layer) == []
    x, bias = torch.randn(12, 48).bfloat16(), torch.randn(128).bfloat16()
    out = method.apply(target, x, bias)
    rest = (lora.a, list(lora.b), lora.out_slices, lora.rank_slices, 4)
    got, want = layer.quant_method.apply(layer, x, bias), add_lora(out, x, *rest)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=4e-2)
    assert torch.equal(got[::4], out[::4])
    assert bool((got[:, :96] != out[:, :96]).any()) and torch.equal(got[:, 96:], out[:, 96:])


def test_layers_without_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_linear, "kernels_available", lambda device: True)
    target = FakeLinear(torch.zeros(48, 64).bfloat16(), OtherMethod())
    layer = shallow_copy(target)
    UnoLinearMethod.attach(layer, target, make_lora([48], [8], 64, torch.bfloat16), 4)
    assert slow_layers(nn.ModuleDict({"proj": layer})) == ["proj"]
