"""Operators of the compiled extension, each with a plain PyTorch stand-in.

The extension (`_C.abi3.so`, built by setup.py) is optional. Importing this module never fails
for want of it: `extension_available()` tells whether it is loaded, `extension_error()` why not.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

__all__ = ["extension_available", "extension_error", "lora_shrink", "lora_shrink_reference"]

logger = logging.getLogger(__name__)

_LIBRARY = Path(__file__).with_name("_C.abi3.so")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _load() -> str | None:
    """Loads the library; the reason why it could not, or None."""
    if not _LIBRARY.exists():
        return (
            "the extension is not built (install with --no-build-isolation, with torch, CMake "
            "and a C++ compiler there)"
        )
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:  # built against another torch: a CUDA build on a CPU torch, say
        reason = f"{_LIBRARY} does not load: {error.__cause__ or error}"
        logger.warning("vllm-uno: using plain PyTorch: %s", reason)
        return reason
    return None


_ERROR = _load()


def extension_available() -> bool:
    """Whether the compiled extension is loaded."""
    return _ERROR is None


def extension_error() -> str | None:
    """Why the compiled extension is not loaded, None where it is."""
    return _ERROR


def _check(x: torch.Tensor, a: torch.Tensor, block_size: int) -> None:
    """The extension's checks (csrc/lora_shrink.h), for the stand-in and the fake kernel."""
    if x.dim() != 2:
        raise RuntimeError(f"lora_shrink: x must be [rows, in], got {x.dim()} dimensions")
    if a.dim() != 2:
        raise RuntimeError(f"lora_shrink: a must be [rank, in], got {a.dim()} dimensions")
    if x.shape[1] != a.shape[1]:
        raise RuntimeError(f"lora_shrink: x has {x.shape[1]} columns, but a has {a.shape[1]}")
    if x.dtype not in _DTYPES:
        raise RuntimeError("lora_shrink: x must be float32, bfloat16 or float16")
    if a.dtype != x.dtype:
        raise RuntimeError("lora_shrink: x and a must have the same dtype")
    if a.device != x.device:
        raise RuntimeError("lora_shrink: x and a must be on the same device")
    if any(t.shape[1] > 1 and t.stride(1) != 1 for t in (x, a)):
        raise RuntimeError("lora_shrink: x and a must be contiguous in their last dimension")
    if block_size < 1:
        raise RuntimeError(f"lora_shrink: block_size must be at least 1, got {block_size}")


if _ERROR is None:

    @torch.library.register_fake("vllm_uno::lora_shrink")
    def _lora_shrink_fake(x: torch.Tensor, a: torch.Tensor, block_size: int) -> torch.Tensor:
        _check(x, a, block_size)
        return x.new_empty((x.shape[0], a.shape[0]))


def lora_shrink_reference(x: torch.Tensor, a: torch.Tensor, block_size: int) -> torch.Tensor:
    """`lora_shrink` in plain PyTorch, on any device: the oracle of the tests.

    Sums are in float32, or in float64 where the inputs are float64. Inputs are not checked.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) @ a.to(wide).t()
    noise = torch.arange(x.shape[0], device=x.device) % block_size != 0
    # where, not a product: NaN times zero is NaN.
    return torch.where(noise[:, None], h, torch.zeros_like(h)).to(x.dtype)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, block_size: int) -> torch.Tensor:
    """LoRA-A of the draft pass: the adapter's inner activations, zero at the seed rows.

    Rows come in blocks of `block_size`, each with its seed row first. The result is
    `x[n] @ a.T`, summed in float32, where `n % block_size != 0`, and exactly zero where
    `n % block_size == 0`, even if `x[n]` holds NaN or infinity. There is no gradient.

    Args:
        x: `[rows, in]`, float32, bfloat16 or float16, contiguous in its last dimension.
        a: `[rank, in]`, of x's dtype and on x's device, contiguous in its last dimension.
        block_size: rows per block, at least 1 (1: every row is a seed row).

    Returns:
        A new contiguous tensor `[rows, rank]` of x's dtype.

    Raises:
        RuntimeError: shapes, dtypes, devices, strides or `block_size` are not as above.
    """
    _check(x, a, block_size)
    if extension_available() and x.device.type == "cpu":
        return torch.ops.vllm_uno.lora_shrink(x, a, block_size)
    return lora_shrink_reference(x, a, block_size)
