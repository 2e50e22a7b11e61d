"""The row-gated LoRA of one linear layer, behind vLLM's `quant_method` interface.

    out[n] = base(x[n]) + (n % B != 0) * (x[n] @ A^T) @ B^T        (scale folded into B)

Row n of the draft pass is a seed row where n % B == 0: it sees base weights only.
The base method is called as it is, so quantised layers stay what they are (but for
one that is cuBLAS's product and no more, which the kernels call themselves, or which
has FP8 weights of the view's own, draft_fp8.py); the LoRA is added before a
row-parallel layer's all-reduce.

The A's of a packed layer (q, k and v; gate and up) are one matrix; each slice of
the output has its own B. On a GPU the kernels of `lora_kernels` do the same, where
the shapes are theirs, but for the sum, which they leave to what follows where they can.

Either way the LoRA of a layer is one operator that torch.compile does not look into:
what is left of the view's graph is what the target's is, kernel for kernel, and costs
little to compile (4 layers on a CPU: 12 s instead of 79 s).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear

from vllm_uno.adapter import LinearLora
from vllm_uno.draft_fp8 import quantise_rows
from vllm_uno.lora_kernels import kernel_lora, kernels_available
from vllm_uno.ops import lora_shrink
from vllm_uno.vllm_hooks.linear_api import is_plain_linear


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    out_slices: tuple[tuple[int, int], ...],
    rank_slices: tuple[tuple[int, int], ...],
    block_size: int,
) -> torch.Tensor:
    """Add the gated LoRA to a linear layer's output.

    Args:
        out: [N, out], the base layer's output; not changed.
        x: [N, in], the layer's input, rows in draft layout (n % block_size == 0: seed).
        a: [R, in].
        b: one [out_i, r_i] per targeted slice.
        out_slices, rank_slices: (start, stop) of each slice in `out` and in R; the
            out slices are ascending and do not overlap.
        block_size: B.

    Returns:
        [N, out], the dtype of `out`.
    """
    if x.device.type != "cpu":
        # As few launches as plain PyTorch allows.
        h = x @ a.t()
        h[::block_size] = 0  # seed rows
        added = out.clone(memory_format=torch.contiguous_format)
        for weight, (start, stop), (low, high) in zip(b, out_slices, rank_slices, strict=True):
            added[:, start:stop].addmm_(h[:, low:high], weight.t())
        return added
    h = lora_shrink(x, a, block_size)
    pieces = []
    at = 0
    for weight, (start, stop), (low, high) in zip(b, out_slices, rank_slices, strict=True):
        if start > at:
            pieces.append(out[:, at:start])
        pieces.append(out[:, start:stop] + F.linear(h[:, low:high], weight))
        at = stop
    if at < out.shape[1]:
        pieces.append(out[:, at:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _add_lora_op(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    out_slices: list[int],
    rank_slices: list[int],
    block_size: int,
) -> torch.Tensor:
    pairs = [tuple(zip(flat[::2], flat[1::2], strict=True)) for flat in (out_slices, rank_slices)]
    return add_lora(out, x, a, b, pairs[0], pairs[1], block_size)


def _add_lora_fake(out: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


_LIBRARY = torch.library.Library("vllm_uno", "FRAGMENT")
_LIBRARY.define(
    "add_lora(Tensor out, Tensor x, Tensor a, Tensor[] b, int[] out_slices, int[] rank_slices, "
    "int block_size) -> Tensor"
)
_LIBRARY.impl("add_lora", _add_lora_op, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_uno::add_lora", _add_lora_fake, lib=_LIBRARY)


class UnoLinearMethod(LinearMethodBase):
    """`quant_method` of a linear layer of the draft view.

    The weights are *buffers* of the layer (`uno_a`, `uno_b0`, ...), so that sleep
    level 2 saves and restores them with the draft model's other buffers.
    """

    def __init__(self, target: Any, lora: LinearLora, block_size: int) -> None:
        self.base = target.quant_method
        # The base method is handed the target's own layer: a weight reload may give that
        # attributes anew (packed weights, a closure over them) which a copy would not see.
        self.target = target
        self.out_slices = lora.out_slices
        self.rank_slices = lora.rank_slices
        self.block_size = block_size
        # Elsewhere the base method makes the product: row 0 must come out as in verification.
        self.plain = is_plain_linear(self.base)
        # None: do not count (a compiled forward never does).
        self.calls: int | None = None
        # Ends of the kernels' slices, where these kernels run.
        self.ends: tuple[int, int] | None = None
        self.fp8 = False

    @classmethod
    def attach(
        cls,
        layer: nn.Module,
        target: nn.Module,
        lora: LinearLora,
        block_size: int,
        fp8: bool = False,
    ) -> None:
        """Give `layer`, a shallow copy of `target`, the gated LoRA.

        Args:
            fp8: the layer has quantised weights (draft_fp8.py) that make the base product.
        """
        method = cls(target, lora, block_size)
        kernel = kernel_lora(lora) if kernels_available(lora.a.device) else None
        if kernel is not None:
            layer.register_buffer("uno_a", kernel.a, persistent=False)
            layer.register_buffer("uno_b", kernel.b, persistent=False)
            method.ends = (kernel.end0, kernel.end1)
        else:
            layer.register_buffer("uno_a", lora.a, persistent=False)
            for i, weight in enumerate(lora.b):
                layer.register_buffer(f"uno_b{i}", weight, persistent=False)
        method.fp8 = fp8
        # Not by setattr: the copy's `__dict__` already has one, and it is no module.
        layer.__dict__["quant_method"] = method
        # Or a fused activation may hand over x quantised (FP8, NVFP4); A needs it as it is.
        layer.__dict__["requires_unquantized_input"] = True

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the draft view shares the target's weights")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.calls is not None:
            self.calls += 1
        if x.dim() > 2:  # the Transformers backend: [1, N, in]
            return self._apply(layer, x.flatten(0, -2), bias).view(*x.shape[:-1], -1)
        return self._apply(layer, x, bias)

    def _apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.ends is not None:
            return self._apply_kernels(layer, x.contiguous(), bias)
        if self.fp8:
            out = torch.ops.vllm_uno.fp8_product(x, *self._quantised(layer, x), bias)
        else:
            out = self.base.apply(self.target, x, bias)
        b = [getattr(layer, f"uno_b{i}") for i in range(len(self.out_slices))]
        return self._add(layer, out, x, b)

    @staticmethod
    def _quantised(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *quantise_rows(x), layer.uno_wq, layer.uno_sw

    def _apply_kernels(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.ends is not None
        ops = torch.ops.vllm_uno
        lora = (layer.uno_a, layer.uno_b, *self.ends, self.block_size)
        weight = self.target.weight if self.plain else None
        if self.fp8:
            product = (x, *self._quantised(layer, x), bias)
            linear, linear_sum = ops.uno_linear_fp8, ops.uno_linear_sum_fp8
        elif weight is not None and weight.dtype == x.dtype and weight.is_contiguous():
            product = (x, weight, bias)
            linear, linear_sum = ops.uno_linear, ops.uno_linear_sum
        else:
            return self.base.apply(self.target, x, bias) + ops.lora_delta(x, *lora)
        if isinstance(self.target, QKVParallelLinear):
            return linear_sum(*product, *lora)
        out, delta = linear(*product, *lora)
        return out + delta

    def _add(
        self, layer: Any, out: torch.Tensor, x: torch.Tensor, b: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.ops.vllm_uno.add_lora(
            out,
            x,
            layer.uno_a,
            b,
            [end for pair in self.out_slices for end in pair],
            [end for pair in self.rank_slices for end in pair],
            self.block_size,
        )


def slow_layers(view: nn.Module) -> list[str]:
    """Names of a view's layers whose LoRA runs without the kernels of `lora_kernels`."""
    return [
        name
        for name, module in view.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), UnoLinearMethod)
        and method.ends is None
    ]
