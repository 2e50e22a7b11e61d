"""The gated LoRA over base methods that it knows nothing of: packed weights, no `weight` at all.

The CPU has no kernels for FP8, AWQ or GPTQ here; what they have in common is this: `quant_method`
makes the output from attributes of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vllm_uno.adapter import LinearLora
from vllm_uno.draft_view import shallow_copy
from vllm_uno.lora_linear import UnoLinearMethod

IN, OUT, RANK = 8, 12, 3


class PackedMethod:
    """As AWQ and GPTQ: codes and scales, and what loading makes of them kept as an attribute."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.qweight.float() * layer.scales
        layer.kernel = lambda x: x @ weight.t()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert x.dtype == torch.bfloat16, "x must come as it is, not quantised"
        out = layer.kernel(x.float())
        return (out if bias is None else out + bias.float()).to(x.dtype)


class PackedLinear(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.quant_method = PackedMethod()
        self.load(seed)

    def load(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(-8, 8, (OUT, IN), generator=g, dtype=torch.int8)
        self.qweight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(OUT, 1, generator=g), requires_grad=False)
        self.quant_method.process_weights_after_loading(self)


def lora(seed: int) -> LinearLora:
    g = torch.Generator().manual_seed(seed)
    return LinearLora(
        a=torch.randn(RANK, IN, generator=g).bfloat16(),
        b=(torch.randn(OUT - 4, RANK, generator=g).bfloat16(),),
        out_slices=((4, OUT),),
        rank_slices=((0, RANK),),
        out_features=OUT,
    )


def expected(layer: PackedLinear, one: LinearLora, x: torch.Tensor, bias: Any, block: int) -> Any:
    weight = layer.qweight.float() * layer.scales
    out = x.float() @ weight.t() + (0 if bias is None else bias.float())
    gate = (torch.arange(len(x)) % block != 0).float()[:, None]
    out[:, 4:] += gate * (x.float() @ one.a.float().t()) @ one.b[0].float().t()
    return out


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(1, 4),
    block=st.integers(1, 5),
    biased=st.booleans(),
)
def test_lora_over_packed_weights(seed: int, requests: int, block: int, biased: bool) -> None:
    target, one = PackedLinear(seed), lora(seed + 1)
    layer = shallow_copy(target)
    UnoLinearMethod.attach(layer, target, one, block)
    g = torch.Generator().manual_seed(seed + 2)
    x = torch.randn(requests * block, IN, generator=g).bfloat16()
    bias = torch.randn(OUT, generator=g).bfloat16() if biased else None
    got = layer.quant_method.apply(layer, x, bias)
    assert got.dtype == torch.bfloat16
    want = expected(target, one, x, bias, block)
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.3)
    # Seed rows are the base's own, bit for bit.
    assert torch.equal(got[::block], target.quant_method.apply(target, x, bias)[::block])


def test_what_a_reload_makes_anew_is_the_views_too() -> None:
    target, one = PackedLinear(1), lora(2)
    layer = shallow_copy(target)
    UnoLinearMethod.attach(layer, target, one, 4)
    x = torch.randn(8, IN).bfloat16()
    before = layer.quant_method.apply(layer, x)
    target.load(seed=3)
    after = layer.quant_method.apply(layer, x)
    assert not torch.equal(before, after)
    assert torch.equal(after[::4], target.quant_method.apply(target, x, None)[::4])


def test_the_adapter_is_saved_and_restored_by_sleep() -> None:
    """Level 2 drops weights, and keeps the buffers of the draft model."""
    target = PackedLinear(1)
    layer = shallow_copy(target)
    UnoLinearMethod.attach(layer, target, lora(2), 4)
    assert {name for name, _ in layer.named_buffers()} == {"uno_a", "uno_b0"}
    assert not list(target.named_buffers())
    assert dict(layer.named_parameters()).keys() == dict(target.named_parameters()).keys()


def test_the_view_makes_no_weights_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="shares the target's weights"):
        UnoLinearMethod(PackedLinear(1), lora(2), 4).create_weights()
