"""Verification is vLLM's own: the stock rejection sampler on base weights.

All that UNO needs from it is the request's sampling state, so that draft laws
are processed exactly as the target's. `propose` is handed temperature and seeds
only; the model state sees the whole sampler, and which requests have a grammar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_uno.serving_stats import WatchedModelState
from vllm_uno.vllm_hooks.runner_api import ModelState, Sampler, resolve_model_state_cls


def keep_sampler(target: nn.Module, vllm_config: VllmConfig, one_hot: torch.Tensor) -> None:
    """Make the runner's model state remember its sampler as `uno_sampler`, and mark grammars.

    Args:
        one_hot: bool [max_num_reqs], by request-state slot: set for requests with a grammar,
            whose draft laws must be one-hot (draft_law.py says why).

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

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            params = new_req_data.sampling_params
            grammar = params is not None and params.structured_outputs is not None
            one_hot[req_index].fill_(grammar)  # an assignment would wait for the GPU

    UnoModelState.__name__ = f"Uno{base.__name__}"
    target.get_model_state_cls = lambda: UnoModelState  # type: ignore[assignment]
