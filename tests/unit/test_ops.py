"""The compiled operators against their plain PyTorch oracles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_uno import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums are in float32, so what is left is the rounding of the result to its dtype (half an ulp
# is eps / 2) and, in float32, that of the summation itself.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

needs_extension = pytest.mark.skipif(
    not ops.extension_available(), reason=f"no compiled extension: {ops.extension_error()}"
)

# Widths around the vector sizes of the kernels; offsets that break 16-byte alignment.
cases = st.fixed_dictionaries(
    {
        "rows": st.integers(0, 40),
        "width": st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 256, 1000, 2048])),
        "rank": st.one_of(st.integers(0, 20), st.just(128)),
        "block_size": st.integers(1, 17),
        "dtype": st.sampled_from(DTYPES),
        "x_offset": st.integers(0, 9),
        "a_offset": st.integers(0, 9),
        "poison": st.sampled_from([0.0, float("nan"), float("inf"), float("-inf")]),
        "seed": st.integers(0, 2**32 - 1),
    }
)
EXAMPLE = {
    "rows": 16,
    "width": 256,
    "rank": 16,
    "block_size": 8,
    "dtype": torch.bfloat16,
    "x_offset": 0,
    "a_offset": 0,
    "poison": float("nan"),
    "seed": 0,
}
# Products so small that float16 has only steps of 6e-8 for them.
SUBNORMAL = {"rows": 15, "width": 1, "rank": 128, "block_size": 2, "dtype": torch.float16}
SUBNORMAL |= {"poison": 0.0, "seed": 147}


def make_rows(
    rows: int, width: int, offset: int, dtype: torch.dtype, gen: torch.Generator
) -> torch.Tensor:
    """Random rows inside a wider matrix of NaN, so that a read past a row's end shows."""
    matrix = torch.full((rows, width + offset + 3 * (offset > 0)), float("nan"), dtype=dtype)
    view = matrix[:, offset : offset + width]
    view.copy_(torch.randn(rows, width, generator=gen))
    return view


def relative_error(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest error, each over the norm product |x[n]| |a[r]|: the size a sum may have had.

    Less the half step between subnormal numbers, which no rounding of a smaller value avoids.
    """
    if got.numel() == 0:
        return 0.0
    info = torch.finfo(got.dtype)
    error = (got.double() - want).abs() - info.smallest_normal * info.eps / 2
    return (error.clamp_min(0) / scale.clamp_min(1e-30)).max().item()


def check_case(case: dict) -> None:
    gen = torch.Generator().manual_seed(case["seed"])
    dtype, block = case["dtype"], case["block_size"]
    x = make_rows(case["rows"], case["width"], case["x_offset"], dtype, gen)
    a = make_rows(case["rank"], case["width"], case["a_offset"], dtype, gen)
    x[::block] += case["poison"]

    h = ops.lora_shrink(x, a, block)

    assert h.shape == (case["rows"], case["rank"])
    assert h.dtype == dtype
    assert h.is_contiguous()
    # Exactly zero, and no negative zero.
    seeds = h[::block]
    assert torch.equal(seeds, torch.zeros_like(seeds))
    assert not seeds.signbit().any()
    want = ops.lora_shrink_reference(x.double(), a.double(), block)
    scale = x.double().nan_to_num(0, 0, 0).norm(dim=1)[:, None] * a.double().norm(dim=1)[None]
    assert relative_error(h, want, scale) <= TOLERANCE[dtype]
    # The float32 oracle is what runs where there is no kernel: it must meet the same bound.
    assert relative_error(ops.lora_shrink_reference(x, a, block), want, scale) <= TOLERANCE[dtype]


@needs_extension
@settings(max_examples=200, deadline=None)
@example(case=EXAMPLE)
@example(case=EXAMPLE | {"block_size": 1})
@example(case=EXAMPLE | {"rows": 0})
@example(case=EXAMPLE | SUBNORMAL)
@given(case=cases)
def test_lora_shrink_matches_oracle(case: dict) -> None:
    check_case(case)


def test_reference_keeps_noise_rows_and_zeroes_seed_rows() -> None:
    """By hand, without the extension: the oracle itself."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [float("nan"), 1.0], [7.0, 8.0]])
    a = torch.tensor([[1.0, 0.0], [1.0, -1.0]])
    want = torch.tensor([[0.0, 0.0], [3.0, -1.0], [5.0, -1.0], [0.0, 0.0], [7.0, -1.0]])
    assert torch.equal(ops.lora_shrink_reference(x, a, 3), want)


def _with_dtype(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, generator=gen).to(dtype)
    return x, torch.randn(8, 64, generator=gen).to(dtype)


def check_compiled(dtype: torch.dtype) -> None:
    """The fake kernel: shapes, dtype and strides under tracing, with a dynamic number of rows."""
    x, a = _with_dtype(dtype)

    def layer(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return (ops.lora_shrink(x * 2, a, 4) + 1).transpose(0, 1)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (16, 12, 5):
        want = layer(x[:rows], a)
        got = compiled(x[:rows], a)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_shrink_compiles(dtype: torch.dtype) -> None:
    check_compiled(dtype)


@needs_extension
def test_lora_shrink_passes_opcheck() -> None:
    x, a = _with_dtype(torch.float32)
    torch.library.opcheck(torch.ops.vllm_uno.lora_shrink.default, (x, a, 4))


def test_stand_in_compiles_and_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of an installation without the extension."""
    monkeypatch.setattr(ops, "_ERROR", "hidden")
    check_compiled(torch.float32)
    check_case(EXAMPLE)


WRONG = {
    "x must be \\[rows, in\\], got 1": lambda x, a: (x[0], a, 4),
    "a must be \\[rank, in\\], got 3": lambda x, a: (x, a[None], 4),
    "x has 64 columns, but a has 63": lambda x, a: (x, a[:, 1:], 4),
    "x must be float32, bfloat16 or float16": lambda x, a: (x.double(), a.double(), 4),
    "must have the same dtype": lambda x, a: (x, a.bfloat16(), 4),
    "contiguous in their last dimension": lambda x, a: (x, a.t().contiguous().t(), 4),
    "block_size must be at least 1, got 0": lambda x, a: (x, a, 0),
}


@pytest.mark.parametrize("stand_in", [False, True], ids=["extension", "stand-in"])
@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs(message: str, stand_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if stand_in:
        monkeypatch.setattr(ops, "_ERROR", "hidden")
    elif not ops.extension_available():
        pytest.skip(f"no compiled extension: {ops.extension_error()}")
    x, a = _with_dtype(torch.float32)
    with pytest.raises(RuntimeError, match=f"lora_shrink: .*{message}"):
        ops.lora_shrink(*WRONG[message](x, a))
