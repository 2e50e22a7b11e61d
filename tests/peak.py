"""How much memory PyTorch's operations hold, counted without a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from no_sync import called_from
from torch.utils._python_dispatch import TorchDispatchMode

_STAND_INS = ("triton/runtime/interpreter.py", "vllm_uno/vllm_hooks/cpu_interpreter.py")


class Peak(TorchDispatchMode):
    """Bytes of the living results of operations, each storage once, and their maximum, `peak`.

    Tensors made before it was entered do not count; those of device "meta" do, by their size. What
    no GPU would make does not: the interpreter's copies of kernels' arguments, and the sorting
    filter that stands in for a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._living: dict[int, int] = {}  # storage -> bytes
        self._tensors: dict[int, int] = {}  # storage -> tensors seen of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {
            given.untyped_storage()._cdata
            for given in (*args, *kwargs.values())
            if isinstance(given, torch.Tensor)
        }
        out = func(*args, **kwargs)
        if called_from(_STAND_INS):
            return out
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(made, torch.Tensor):
                continue
            storage = made.untyped_storage()
            key = storage._cdata
            if key in known and key not in self._living:
                continue  # a view of what was there before
            self._living[key] = storage.nbytes()
            self._tensors[key] = self._tensors.get(key, 0) + 1
            weakref.finalize(made, self._forget, key)
        self.peak = max(self.peak, sum(self._living.values()))
        return out

    def _forget(self, key: int) -> None:
        self._tensors[key] -= 1
        if self._tensors[key] == 0:
            del self._tensors[key], self._living[key]
