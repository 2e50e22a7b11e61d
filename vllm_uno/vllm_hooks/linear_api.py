"""What the draft view must know of vLLM's linear layers beyond their public interface."""

from __future__ import annotations

from vllm import envs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm


def is_plain_linear(method: object) -> bool:
    """Whether a layer's method is `torch.nn.functional.linear` on its `weight`, and no more."""
    return (
        isinstance(method, UnquantizedLinearMethod)
        and type(method) is UnquantizedLinearMethod  # a subclass may do more
        and method._gemm_impl is default_unquantized_gemm
        and not envs.VLLM_BATCH_INVARIANT
    )
