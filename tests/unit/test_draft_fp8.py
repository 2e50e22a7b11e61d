"""FP8 draft weights: the format, the operators against their oracle, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from poisoned import check_a_thousand_replays, poison
from torch import nn

from vllm_uno import draft_fp8
from vllm_uno.draft_fp8 import FP8, Fp8Weights, fp8_product_reference, quantise_rows
from vllm_uno.lora_kernels import lora_delta_reference

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with FP8 products",
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 80),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_quantised_rows_are_near(
    rows: int, columns: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=gen) * 2.0**exponent).to(dtype)
    xq, scale = quantise_rows(x)
    assert xq.dtype == FP8 and xq.shape == x.shape and scale.shape == (rows, 1)
    back = xq.float() * scale
    allowed = x.float().abs() / 16 + x.float().abs().amax(1, keepdim=True) / 2**15 + 1e-12
    assert bool(((back - x.float()).abs() <= allowed).all())


def test_quantised_rows_do_not_overflow() -> None:
    x = torch.tensor([[0.0, 0.0], [3e38, -3e38], [1e-38, 0.0], [1.0, float("nan")]])
    xq, scale = quantise_rows(x)
    assert bool(scale[:3].isfinite().all()) and bool(xq[:3].float().isfinite().all())
    assert xq[0].float().tolist() == [0.0, 0.0]
    assert xq[1].float().tolist() == [448.0, -448.0]
    assert bool(xq[3].float().isnan().any())  # and no number of another row's


def test_the_product_is_that_of_the_quantised_numbers() -> None:
    x, w = torch.randn(5, 32), torch.randn(48, 32)
    (xq, sx), (wq, sw) = quantise_rows(x), quantise_rows(w)
    bias = torch.randn(48)
    got = fp8_product_reference(x, xq, sx, wq, sw, bias)
    want = (xq.float() * sx) @ (wq.float() * sw).t() + bias
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    error = (got - (x @ w.t() + bias)).norm() / (x @ w.t()).norm()
    assert 1e-3 < float(error) < 0.06  # quantised, and no more


def operands(
    rows: int, widths: list[int], columns: int, dtype: torch.dtype, bias: bool, block: int
) -> tuple[torch.Tensor, tuple[Any, ...], tuple[Any, ...]]:
    """x, the product's and the LoRA's further arguments."""
    gen = torch.Generator().manual_seed(rows)
    out = sum(widths)
    x = torch.randn(rows, columns, generator=gen).to(dtype)
    x[::block] *= 1e3  # a seed row that leaks through the gate, or into another's scale, shows
    wq, sw = quantise_rows(torch.randn(out, columns, generator=gen) / columns**0.5)
    b = torch.randn(out, 64, generator=gen).to(dtype) / 8
    a = (torch.randn(64 * len(widths), columns, generator=gen) / columns**0.5).to(dtype)
    ends = [sum(widths[: n + 1]) for n in range(len(widths))] + [out] * 3
    rest = (*quantise_rows(x), wq, sw, torch.randn(out, generator=gen).to(dtype) if bias else None)
    return x, rest, (a, b, ends[0], ends[1], block)


def test_operators_trace_with_any_number_of_rows() -> None:
    x, product, lora = operands(20, [64, 32], 64, torch.bfloat16, True, 4)
    wq, sw, bias = product[2:]

    def layer(x: torch.Tensor) -> torch.Tensor:
        quantised = (x, *quantise_rows(x), wq, sw, bias)
        y, d = torch.ops.vllm_uno.uno_linear_fp8(*quantised, *lora)
        z = torch.ops.vllm_uno.uno_linear_sum_fp8(*quantised, *lora)
        return y + d + z + torch.ops.vllm_uno.fp8_product(*quantised)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (20, 12, 5):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


def test_operators_pass_opcheck() -> None:
    x, product, lora = operands(9, [64, 32], 64, torch.bfloat16, True, 4)
    ops = torch.ops.vllm_uno
    # Not test_schema: it compares FP8 inputs before and after with operations that they lack.
    utils = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    torch.library.opcheck(ops.fp8_product.default, (x, *product), test_utils=utils)
    for op in (ops.uno_linear_fp8, ops.uno_linear_sum_fp8):
        torch.library.opcheck(op.default, (x, *product, *lora), test_utils=utils)


def test_layers_without_plain_weights_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"plain": torch.randn(32, 16), "odd": torch.randn(24, 16), "quantised": None}
    monkeypatch.setattr(draft_fp8, "plain_weight", lambda layer: weights[layer.kind])
    fp8 = Fp8Weights(nn.Module())
    layers = {kind: nn.Module() for kind in weights}
    taken = {k: fp8.quantise(k, layers[k], SimpleNamespace(kind=k)) for k in weights}
    assert taken == {"plain": True, "odd": False, "quantised": False}
    assert fp8.names == ["plain"]
    assert [b.shape for b in layers["plain"].buffers()] == [(32, 16), (32, 1)]
    assert not list(layers["odd"].buffers())
    none = Fp8Weights(nn.Module())
    none.quantise("quantised", nn.Module(), SimpleNamespace(kind="quantised"))
    with pytest.raises(
        ValueError, match=r"uno_draft_quantization='fp8': .* none .*\(quantised, \."
    ):
        none.check()


def test_weights_are_quantised_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their strides."""
    weight = torch.randn(48, 33).t()[:32]
    monkeypatch.setattr(draft_fp8, "_PART", 5 * 48)
    monkeypatch.setattr(draft_fp8, "plain_weight", lambda layer: weight)
    layer = nn.Module()
    assert Fp8Weights(nn.Module()).quantise("x", layer, None)
    wq, sw = quantise_rows(weight)
    kept_wq, kept_sw = layer.buffers()
    assert torch.equal(kept_wq.float(), wq.float()) and torch.equal(kept_sw, sw)
    assert kept_wq.is_contiguous() and not kept_wq.is_inference()


cases = st.fixed_dictionaries(
    {
        "rows": st.one_of(st.integers(1, 40), st.integers(41, 600)),
        "widths": st.lists(st.sampled_from([32, 64, 96, 1024]), min_size=1, max_size=3),
        "columns": st.sampled_from([64, 128, 192, 512, 4096]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "bias": st.booleans(),
        "block": st.integers(1, 17),
    }
)
QKV = {
    "rows": 8,
    "widths": [4096, 1024, 1024],
    "columns": 4096,
    "dtype": torch.bfloat16,
    "bias": False,
    "block": 8,
}


def moved(device: str, *values: Any) -> list[Any]:
    return [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]


def check(found: dict[str, Any], device: str) -> None:
    x, product, lora = operands(**found)
    base = fp8_product_reference(x.double(), *product)
    want = base + lora_delta_reference(x.double(), *(t.double() for t in lora[:2]), *lora[2:])
    there, lora_there = moved(device, x, *product), moved(device, *lora)
    ops = torch.ops.vllm_uno
    for _ in range(2):
        if device == "cuda":
            poison()
        y, d = ops.uno_linear_fp8(*there, *lora_there)
        added = ops.uno_linear_sum_fp8(*there, *lora_there)
        alone = ops.fp8_product(*there)
        scale = want.abs().amax(1, keepdim=True).clamp(min=1)
        for got, exact in ((y.float() + d.float(), want), (added, want), (alone, base)):
            assert float(((got.cpu().double() - exact) / scale).abs().max()) < 2e-2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [[64], [32, 64, 96]])
def test_operators_of_the_cpu_match_the_oracle(widths: list[int], bias: bool) -> None:
    shape = {"rows": 11, "columns": 64, "dtype": torch.bfloat16, "block": 4}
    check({**shape, "widths": widths, "bias": bias}, "cpu")


@pytest.mark.gpu
@needs_gpu
@settings(max_examples=100, deadline=None)
@example(found=QKV)
@example(found=QKV | {"rows": 512, "widths": [12288, 12288]})
@example(found=QKV | {"rows": 256, "widths": [4096], "columns": 12288, "bias": True})
@given(found=cases)
def test_kernels_match_the_oracle(found: dict[str, Any]) -> None:
    check(found, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [8, 64, 512])
def test_replays_under_a_poisoned_allocator(rows: int) -> None:
    host = operands(rows, [4096, 1024, 1024], 4096, torch.bfloat16, False, 8)
    x, _, _, wq, sw, bias = moved("cuda", host[0], *host[1])
    lora = moved("cuda", *host[2])

    def layers() -> torch.Tensor:
        first = torch.ops.vllm_uno.uno_linear_sum_fp8(x, *quantise_rows(x), wq, sw, bias, *lora)
        again = first[:, :4096].contiguous()
        y, d = torch.ops.vllm_uno.uno_linear_fp8(again, *quantise_rows(again), wq, sw, bias, *lora)
        return y + d

    check_a_thousand_replays(layers)
