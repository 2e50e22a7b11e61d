"""Finds places where the host would wait for the GPU, on a machine without one.

`device_reads_fail()` raises at any operation that must bring a value of a tensor to the host:
`item`, `bool`, `int`, `tolist`, `cpu`, `numpy`, `nonzero`, a mask as index, and the like. On a CPU
all tensors look alike, so those that are the host's on a GPU too are named by their storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceRead(AssertionError):
    """The host read a tensor of the device's."""


# Operations whose result's shape, or value, the host must know. The first three are item(), bool(),
# int(), float() and a tensor as Python index, with and without inference mode.
_READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}

# What is no read of the device's on a GPU: kernels are interpreted on host memory here, attention,
# its cache and the filter are the CPU's own; the last one takes the maximum of a host tensor.
_EXEMPT = (
    "triton/runtime/interpreter.py",
    "vllm/v1/attention/backends/cpu_attn.py",
    "vllm_uno/tree/cpu_layout.py",
    "vllm/v1/sample/ops/topk_topp_sampler.py",
    "vllm/v1/worker/gpu/spec_decode/speculator.py",
)


def called_from(files: tuple[str, ...]) -> bool:
    """Whether a function of one of these files is under way; of each, the end of its path."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(files):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Reads(TorchDispatchMode):
    def __init__(self, check: Callable[[str, torch.Tensor | None], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        masks = name in ("aten::index", "aten::index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        unsized = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in _READS or masks or unsized:
            self._check(name, next((a for a in args if isinstance(a, torch.Tensor)), None))
        return func(*args, **kwargs)


@contextmanager
def device_reads_fail(host: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raises `DeviceRead` where a tensor other than `host` (and their views) is read."""
    storages = {t.untyped_storage().data_ptr() for t in host}

    def check(name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.untyped_storage().data_ptr() in storages:
            return
        if not called_from(_EXEMPT):
            raise DeviceRead(f"{name} of a device tensor")

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            check(name, self)
            return original(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        # These need no operation on a CPU tensor.
        for name in ("tolist", "cpu", "numpy", "__array__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, checked(name)))
        stack.enter_context(_Reads(check))
        yield
