"""Verification is vLLM's own: the stock rejection sampler on base weights.

All that UNO needs from it is the request's sampling state, so that draft laws
are processed exactly as the target's. `propose` is handed temperature and seeds
only; the model state sees the whole sampler.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig

from vllm_uno.serving_stats import WatchedModelState
from vllm_uno.vllm_hooks.runner_api import ModelState, Sampler, resolve_model_state_cls


def keep_sampler(target: nn.Module, vllm_config: VllmConfig) -> None:
    """Make the runner's model state remember its sampler as `uno_sampler`.

    vLLM resolves `get_model_state_cls` on the model after the speculator is
    loaded; an attribute of the instance suffices.
    """
    base: type[ModelState] = resolve_model_state_cls(vllm_config, target)

    class UnoModelState(WatchedModelState, base):
        uno_sampler: Sampler

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
            custom = super().custom_sampler(sampler)
            self.uno_sampler = sampler if custom is None else custom[0]
            return custom

    UnoModelState.__name__ = f"Uno{base.__name__}"
    target.get_model_state_cls = lambda: UnoModelState  # type: ignore[assignment]
