"""FP8 weights in the draft view (`uno_draft_quantization="fp8"`).

What a draft pass computes is scratch, so its base products may be approximate: the output stays
lossless, and what is lost is acceptance, row 0's included, which is no longer the target's own
row. What is gained is half of the bytes that the adapter's target layers read (44 % of what an 8B
model's draft pass reads), and close to half of the time of their products of many rows.

    y[n, j] = sx[n] * sw[j] * sum_k xq[n, k] * wq[j, k] + bias[j]

Weights are quantised once, symmetrically, a scale an output column; activations as they come, a
scale a row. That step stays visible to torch.compile, which makes it in the kernel that wrote the
activations (the norm, or SiLU and product); product and LoRA are one operator, as in
`lora_kernels`. Formats: FP8 E4M3 (arXiv 2209.05433), scales fp32.

Operators, functional and opaque to torch.compile, each with a plain PyTorch version:

`torch.ops.vllm_uno.fp8_product`  y alone, beside a LoRA that runs without the kernels.
`torch.ops.vllm_uno.uno_linear_fp8`, `uno_linear_sum_fp8`  as `uno_linear` and `uno_linear_sum`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_uno.lora_kernels import beside, lora_delta_reference
from vllm_uno.reloads import ReloadWatch
from vllm_uno.vllm_hooks.linear_api import fp8_matmul, plain_weight

logger = init_logger("vllm.uno")

FP8 = torch.float8_e4m3fn
FP8_BUFFERS = ("uno_wq", "uno_sw")
_PART = 1 << 24  # elements that are quantised at a time, of 12 bytes each meanwhile
_LARGEST = torch.finfo(FP8).max
_MULTIPLE = 16  # of a product's dimensions: one 16-byte load
# Of a row of zeros: 0 / 0 would be NaN.
_SMALLEST_SCALE = 1e-12


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric FP8 with a scale a row.

    Args:
        x: [N, K] of any floating-point type.

    Returns:
        [N, K] FP8 E4M3 and [N, 1] fp32, their product x to within 1/16 of each number, or of the
        row's largest / 2^15 where that is more. A row with NaN or infinity has NaN in it.
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    # The cast does not saturate, and rounding may step over the largest number.
    return (wide / scale).clamp(-_LARGEST, _LARGEST).to(FP8), scale


def fp8_product_reference(
    x: torch.Tensor,
    xq: torch.Tensor,
    sx: torch.Tensor,
    wq: torch.Tensor,
    sw: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`fp8_matmul` in plain PyTorch, of any type; sums are in fp32."""
    y = (xq.float() @ wq.float().t()) * sx * sw.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


class Fp8Weights:
    """The quantised weights of a view's layers, kept in step with the target's.

    They are buffers of the view's layers, named `FP8_BUFFERS` (FP8 [out, in], fp32 [out, 1]): sleep
    level 2 saves a draft model's buffers.

    Args:
        target: the model, whose weight reloads make them stale.

    Attributes:
        names: of the layers that have them.
        watch: there once `check` was called.
    """

    watch: ReloadWatch

    def __init__(self, target: nn.Module) -> None:
        self.names: list[str] = []
        self._target = target
        self._layers: list[tuple[Any, Any]] = []  # (of the view, of the target)
        self._skipped: list[str] = []

    def quantise(self, name: str, layer: nn.Module, target: Any) -> bool:
        """Give a view's layer quantised weights, if it is one whose product is plain.

        Not plain are layers that vLLM quantised itself, and all layers under
        VLLM_BATCH_INVARIANT; products need dimensions that are multiples of 16.
        """
        weight = plain_weight(target)
        if weight is None or any(n % _MULTIPLE for n in weight.shape):
            self._skipped.append(name)
            return False
        buffers = (
            torch.empty(weight.shape, dtype=FP8, device=weight.device),
            torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device),
        )
        for buffer_name, buffer in zip(FP8_BUFFERS, buffers, strict=True):
            layer.register_buffer(buffer_name, buffer, persistent=False)
        _quantise_into(weight, *buffers)
        self.names.append(name)
        self._layers.append((layer, target))
        return True

    def check(self) -> None:
        """To be called once every layer was shown to `quantise`: says what came of it.

        Raises:
            ValueError: no layer has quantised weights.
        """
        skipped = ", ".join(self._skipped[:3])
        if not self._layers:
            raise ValueError(
                "uno_draft_quantization='fp8': of the layers that the adapter targets none has "
                f"weights that can be quantised ({skipped}, ...): vLLM has quantised them already, "
                "or makes their products in another way (VLLM_BATCH_INVARIANT, --linear-backend), "
                f"or their dimensions on a rank are no multiples of {_MULTIPLE}. Leave it out."
            )
        layer = self._layers[0][1]
        self.watch = ReloadWatch(self._target, lambda: layer.weight)
        logger.info(
            "UNO: FP8 draft weights on %d of %d layers%s",
            len(self._layers),
            len(self._layers) + len(self._skipped),
            f", not on {skipped}, ..." if skipped else "",
        )

    def refresh(self) -> None:
        """Quantise the target's weights again, in place, if they were reloaded; the host knows."""
        if not self.watch.reloaded():
            return
        for layer, target in self._layers:
            weight = plain_weight(target)
            assert weight is not None
            _quantise_into(weight, *(getattr(layer, name) for name in FP8_BUFFERS))


@torch.no_grad()
def _quantise_into(weight: torch.Tensor, wq: torch.Tensor, sw: torch.Tensor) -> None:
    """A part at a time: a reload finds little memory free beside the KV cache."""
    rows = max(1, _PART // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        for kept, made in zip((wq[part], sw[part]), quantise_rows(weight[part]), strict=True):
            kept.copy_(made)


def _product_fake(
    x: torch.Tensor, xq: torch.Tensor, sx: torch.Tensor, wq: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return x.new_empty(x.shape[0], wq.shape[0])


def _linear_cuda(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return beside(x, lambda: fp8_matmul(x, *args[:5]), *args[5:])


def _linear_reference(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8_product_reference(x, *args[:5]), lora_delta_reference(x, *args[5:])


def _linear_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _product_fake(*args), _product_fake(*args)


def _linear_sum_cuda(*args: Any) -> torch.Tensor:
    y, d = _linear_cuda(*args)
    return y.add_(d)


def _linear_sum_reference(*args: Any) -> torch.Tensor:
    y, d = _linear_reference(*args)
    return y + d


_QUANTISED = "Tensor x, Tensor xq, Tensor sx, Tensor wq, Tensor sw, Tensor? bias"
_LORA = "Tensor a, Tensor b, int end0, int end1, int block_size"
_LIBRARY = torch.library.Library("vllm_uno", "FRAGMENT")
_LIBRARY.define(f"fp8_product({_QUANTISED}) -> Tensor")
_LIBRARY.define(f"uno_linear_fp8({_QUANTISED}, {_LORA}) -> (Tensor, Tensor)")
_LIBRARY.define(f"uno_linear_sum_fp8({_QUANTISED}, {_LORA}) -> Tensor")
for _name, _cpu, _cuda, _fake in (
    ("fp8_product", fp8_product_reference, fp8_matmul, _product_fake),
    ("uno_linear_fp8", _linear_reference, _linear_cuda, _linear_fake),
    ("uno_linear_sum_fp8", _linear_sum_reference, _linear_sum_cuda, _product_fake),
):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"vllm_uno::{_name}", _fake, lib=_LIBRARY)
