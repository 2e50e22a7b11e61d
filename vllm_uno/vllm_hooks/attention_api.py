"""What tree mode's attention backends import from vLLM, in one place."""

from __future__ import annotations

from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.selector import _cached_get_attn_backend

__all__ = [
    "AttentionBackendEnum",
    "AttentionCGSupport",
    "AttentionLayerBase",
    "AttentionType",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadataBuilder",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadataBuilder",
    "canonicalize_singleton_dim_strides",
    "forget_chosen_backends",
    "get_current_vllm_config_or_none",
    "get_layers_from_vllm_config",
    "is_quantized_kv_cache",
    "register_backend",
]


def forget_chosen_backends() -> None:
    """vLLM remembers the class it chose for a configuration, overrides or not."""
    _cached_get_attn_backend.cache_clear()
