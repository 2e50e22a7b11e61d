"""What the draft view must know of vLLM's linear layers beyond their public interface."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops, envs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_fp8_supported
from vllm.model_executor.layers.utils import default_unquantized_gemm
from vllm.platforms import current_platform


def is_plain_linear(method: object) -> bool:
    """Whether a layer's method is `torch.nn.functional.linear` on its `weight`, and no more."""
    return (
        isinstance(method, UnquantizedLinearMethod)
        and type(method) is UnquantizedLinearMethod  # a subclass may do more
        and method._gemm_impl is default_unquantized_gemm
        and not envs.VLLM_BATCH_INVARIANT
    )


def plain_weight(layer: Any) -> torch.Tensor | None:
    """The weight [out, in] of a layer that computes x W^T + bias and no more, else None.

    On a CPU vLLM packs weights and may drop what they were made from: the layer's own product
    with the unit matrix gives them back (each sum has one term). A copy for the tests' sake.
    """
    method = layer.quant_method
    if is_plain_linear(method):
        weight: torch.Tensor = layer.weight
        return weight
    if not current_platform.is_cpu() or type(method) is not UnquantizedLinearMethod:
        return None
    unit = torch.eye(layer.input_size_per_partition, dtype=layer.params_dtype)
    return method.apply(layer, unit).t().contiguous()


def fp8_matmul_available() -> bool:
    """Whether this GPU, and this build of vLLM, have `fp8_matmul`."""
    return bool(cutlass_fp8_supported())


def fp8_matmul(
    x: torch.Tensor,
    xq: torch.Tensor,
    sx: torch.Tensor,
    wq: torch.Tensor,
    sw: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """vLLM's own FP8 product (CUTLASS).

    Args:
        x: bfloat16 or float16, whose type the result has; not read.
        xq, sx: FP8 E4M3 [N, K], fp32 [N, 1]: rows, each with its scale.
        wq, sw: FP8 E4M3 [M, K], fp32 [M, 1]; M and K are multiples of 16.
        bias: [M] of x's type, or None.

    Returns:
        [N, M].
    """
    return _custom_ops.cutlass_scaled_mm(xq, wq.t(), sx, sw, x.dtype, bias)
