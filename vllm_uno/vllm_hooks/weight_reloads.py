"""`reset_lora_state`: what vLLM calls after every change of the base weights."""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook


def _reset_lora_state(original: Any) -> Any:
    @functools.wraps(original)
    def reset_lora_state(self: Any) -> None:
        original(self)
        told = getattr(getattr(self, "speculator", None), "weights_reloaded", None)
        if told is not None:
            told()

    return reset_lora_state


HOOKS = (
    Hook(
        target="vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state",
        parameters=("self",),
        reason="a weight transfer may write weights without the model's load_weights",
        removable="vLLM tells speculators of weight updates",
        make=_reset_lora_state,
    ),
)
