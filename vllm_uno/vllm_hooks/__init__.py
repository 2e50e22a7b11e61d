"""Every contact with vLLM's private parts.

Each module here names one target, why it must change, when the change can go,
and checks the target's shape before it touches it. `install()` checks all of
them first and changes nothing when one does not fit: plain vLLM keeps working
and only an engine that asks for `method: uno` is refused.
"""

from __future__ import annotations

import sys

from vllm_uno.vllm_hooks import (
    cpu_interpreter,
    engine_args,
    sampling_params,
    spec_decode,
    stats,
)
from vllm_uno.vllm_hooks import vllm_config as vllm_config_hooks
from vllm_uno.vllm_hooks.hook import Hook, UnsupportedVllm, check_version

__all__ = ["HOOKS", "UnsupportedVllm", "install"]

HOOKS: tuple[Hook, ...] = (
    *engine_args.HOOKS,
    *vllm_config_hooks.HOOKS,
    *sampling_params.HOOKS,
    *spec_decode.HOOKS,
)


def install() -> None:
    """Check every target, then install every hook; idempotent."""
    try:
        cpu_interpreter.mend_interpreter()
        check_version()
        hooks = HOOKS
        if "vllm.v1.engine.core" in sys.modules:  # an engine's process, which reads no arguments
            hooks += stats.ENGINE_HOOKS
        for hook in hooks:
            hook.check()
    except Exception as reason:  # whatever it is, it must not be lost in a log
        engine_args.refuse_uno(reason)
        return
    for hook in hooks:
        hook.install()
