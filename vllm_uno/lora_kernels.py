"""The draft view's linear layers on a GPU: the base product, and the row-gated LoRA beside it.

    y[n] = x[n] W^T + bias,    d[n] = (n % B != 0) (x[n] A^T)[slice] B^T

A layer's output is y + d. The operators return the two and leave the sum to torch.compile, which
adds d where the output is read anyway (in the activation, or the residual and norm, that follow):
so the LoRA costs no pass over the output, and no launch between a base product and what follows
it. All are functional, opaque to torch.compile, and trace with any number of rows:

`torch.ops.vllm_uno.uno_linear`  plain weights: y and d. cuBLAS's base product, and beside it on a
    side stream first A, then B (csrc/cuda/lora_expand.cu).
`torch.ops.vllm_uno.uno_linear_sum`  their sum, for layers whose output is read in parts: no reader
    would add d to v, and torch.compile makes three kernels of what is one without a LoRA.
`torch.ops.vllm_uno.lora_delta`  d alone, for any other base layer (a quantised one).

All have a plain PyTorch version: on the CPU, and as the oracle of their tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_uno.adapter import LinearLora
from vllm_uno.ops import extension_error, lora_shrink_reference

_RANKS = (64, 128, 256)
_SLICES = 3
_HALF = (torch.bfloat16, torch.float16)
SWITCH = "UNO_FUSED_LORA"  # "0" turns the kernels off, to see what they change (operations.md)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelLora:
    """A layer's LoRA as the kernels read it: every slice padded to one rank, with zeros.

    Attributes:
        a: [S * R, in]; slice s has rows s R ... (s + 1) R - 1.
        b: [out, R], the scale folded in; zeros where a slice has no adapter.
        end0, end1: where the first and second slice of the output end (`out`, where there is
            none).
    """

    a: torch.Tensor
    b: torch.Tensor
    end0: int
    end1: int


def kernel_lora(lora: LinearLora) -> KernelLora | None:
    """The kernels' layout of a LoRA, or None where its shapes are not theirs.

    Needs: bf16 or fp16; slices of the output that end at multiples of 32; at most three of them,
    gaps counted; ranks up to 256.
    """
    slices = _all_slices(lora)
    widest = max((high - low for low, high in lora.rank_slices), default=0)
    rank = next((r for r in _RANKS if widest <= r), None)
    if (
        rank is None
        or len(slices) > _SLICES
        or lora.a.dtype not in _HALF
        or any(stop % 32 for _, stop, _ in slices)
    ):
        return None
    a = lora.a.new_zeros(len(slices) * rank, lora.a.shape[1])
    b = lora.a.new_zeros(lora.out_features, rank)
    for number, (start, stop, part) in enumerate(slices):
        if part is None:
            continue
        low, high = lora.rank_slices[part]
        a[number * rank : number * rank + high - low] = lora.a[low:high]
        b[start:stop, : high - low] = lora.b[part]
    ends = [stop for _, stop, _ in slices] + [lora.out_features] * _SLICES
    return KernelLora(a, b, ends[0], ends[1])


def _all_slices(lora: LinearLora) -> list[tuple[int, int, int | None]]:
    """(start, stop, number of its B, or None for a gap), covering the layer's output."""
    slices: list[tuple[int, int, int | None]] = []
    at = 0
    for part, (start, stop) in enumerate(lora.out_slices):
        if start > at:
            slices.append((at, start, None))
        slices.append((start, stop, part))
        at = stop
    if at < lora.out_features:
        slices.append((at, lora.out_features, None))
    return slices


def kernels_available(device: torch.device) -> bool:
    """Whether the extension has CUDA kernels for this device, and they are not turned off."""
    return device.type == "cuda" and slow_path(device) is None


def slow_path(device: torch.device) -> str | None:
    """Why the kernels do not run on this GPU; None where they do, and on CPUs."""
    if device.type != "cuda":
        return None
    error = extension_error()
    if error is not None:
        return f"the compiled extension is not there ({error})"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("vllm_uno::lora_expand_", "CUDA"):
        return "the extension was built without nvcc (reinstall with it: README, Install)"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns the kernels off"
    failed = _launch_error(device)
    return None if failed is None else f"the extension does not run on this GPU ({failed})"


@functools.cache
def _launch_error(device: torch.device) -> str | None:
    """What a tiny launch raises: the library may hold no code for this GPU."""
    h, b = (torch.zeros(n, _RANKS[0], dtype=torch.bfloat16, device=device) for n in (1, 32))
    try:
        torch.ops.vllm_uno.lora_expand_(h.new_empty(1, 32), h, b, 32, 32, 2)
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def lora_delta_reference(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, end0: int, end1: int, block_size: int
) -> torch.Tensor:
    """What the gated LoRA adds, in plain PyTorch.

    Args:
        x: [M, in], rows in draft layout (n % block_size == 0: seed).
        a, b, end0, end1: see `KernelLora`.
        block_size: B.

    Returns:
        [M, out], zero in seed rows.
    """
    rank, columns = b.shape[1], b.shape[0]
    h = lora_shrink_reference(x, a, block_size)
    pieces = []
    start = 0
    for number in range(a.shape[0] // rank):
        stop = (end0, end1, columns)[number]
        part = h[:, number * rank : (number + 1) * rank]
        wide = torch.promote_types(x.dtype, torch.float32)
        pieces.append((part.to(wide) @ b[start:stop].to(wide).t()).to(x.dtype))
        start = stop
    return torch.cat(pieces, dim=1)


def uno_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    end0: int,
    end1: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole layer in plain PyTorch: [M, in] -> two [M, out]."""
    return F.linear(x, weight, bias), lora_delta_reference(x, a, b, end0, end1, block_size)


# One side stream for each stream that work is captured on, made before any capture.
_SIDE_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}


def _side_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    key = (main.device_index, main.cuda_stream)
    if key not in _SIDE_STREAMS:
        _SIDE_STREAMS[key] = torch.cuda.Stream(main.device_index)
    return _SIDE_STREAMS[key]


def beside(
    x: torch.Tensor,
    product: Callable[[], torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    end0: int,
    end1: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = product(), and on the side stream meanwhile d: both [M, out]."""
    main = torch.cuda.current_stream(x.device)
    side = _side_stream(main)
    # Allocated here, and the fork waits for `main`, which waits at the join: no block of memory
    # changes hands before both streams are past it.
    h = x.new_empty(x.shape[0], a.shape[0])
    d = x.new_empty(x.shape[0], b.shape[0])
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.mm(x, a.t(), out=h)
        torch.ops.vllm_uno.lora_expand_(d, h, b, end0, end1, block_size)
    y = product()
    main.wait_stream(side)
    return y, d


def _uno_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *lora: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return beside(x, lambda: F.linear(x, weight, bias), *lora)


def _uno_linear_sum_cuda(*layer: Any) -> torch.Tensor:
    y, d = _uno_linear_cuda(*layer)
    return y.add_(d)


def _uno_linear_sum_reference(*layer: Any) -> torch.Tensor:
    y, d = uno_linear_reference(*layer)
    return y + d


def _uno_linear_sum_fake(*layer: Any) -> torch.Tensor:
    return _uno_linear_fake(*layer)[0]


def _lora_delta_cuda(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, end0: int, end1: int, block_size: int
) -> torch.Tensor:
    d = x.new_empty(x.shape[0], b.shape[0])
    # Which writes zeros to seed rows, whatever h holds there.
    return torch.ops.vllm_uno.lora_expand_(d, x @ a.t(), b, end0, end1, block_size)


def _uno_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


def _lora_delta_fake(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], b.shape[0])


_LIBRARY = torch.library.Library("vllm_uno", "FRAGMENT")
_LIBRARY.define(
    "uno_linear(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, int end0, int end1, "
    "int block_size) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "uno_linear_sum(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, int end0, int end1, "
    "int block_size) -> Tensor"
)
_LIBRARY.define(
    "lora_delta(Tensor x, Tensor a, Tensor b, int end0, int end1, int block_size) -> Tensor"
)
_LIBRARY.impl("uno_linear", uno_linear_reference, "CPU")
_LIBRARY.impl("uno_linear", _uno_linear_cuda, "CUDA")
_LIBRARY.impl("uno_linear_sum", _uno_linear_sum_reference, "CPU")
_LIBRARY.impl("uno_linear_sum", _uno_linear_sum_cuda, "CUDA")
_LIBRARY.impl("lora_delta", lora_delta_reference, "CPU")
_LIBRARY.impl("lora_delta", _lora_delta_cuda, "CUDA")
torch.library.register_fake("vllm_uno::uno_linear", _uno_linear_fake, lib=_LIBRARY)
torch.library.register_fake("vllm_uno::uno_linear_sum", _uno_linear_sum_fake, lib=_LIBRARY)
torch.library.register_fake("vllm_uno::lora_delta", _lora_delta_fake, lib=_LIBRARY)
