"""`init_speculator`: hand out our proposer."""

from __future__ import annotations

import functools
import sys
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook, UnsupportedVllm, installed_vllm
from vllm_uno.vllm_hooks.stats import WORKER_HOOKS, install_hooks


def _init_speculator(original: Any) -> Any:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if vllm_config.speculative_config.method != "uno":
            return original(vllm_config, device, req_states)
        try:
            if vllm_config.speculative_config.uno_mode == "tree":
                from vllm_uno.tree.proposer import TreeProposer as Proposer
            else:
                from vllm_uno.proposer import UnoProposer as Proposer
            from vllm_uno.vllm_hooks import cuda_graphs, weight_reloads
        except ImportError as error:
            raise UnsupportedVllm(
                f"vllm-uno does not fit the model runner of vLLM {installed_vllm()}: {error}"
            ) from error
        install_hooks((*WORKER_HOOKS, *cuda_graphs.HOOKS, *weight_reloads.HOOKS))
        return Proposer(vllm_config, device, req_states)

    # `model_runner` imports the function by name. It is loaded after the
    # plugins in a worker, but may be there already in one process.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]
    return init_speculator


HOOKS = (
    Hook(
        target="vllm.v1.worker.gpu.spec_decode:init_speculator",
        parameters=("vllm_config", "device", "req_states"),
        reason="a closed chain of methods",
        removable="vLLM admits custom speculators in the V2 runner",
        make=_init_speculator,
    ),
)
