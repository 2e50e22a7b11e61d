"""`EngineArgs`: build our speculative config, and fit vLLM's default request limit to it."""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook
from vllm_uno.vllm_hooks.stats import ENGINE_HOOKS, install_hooks


def _uno_settings(engine_args: Any) -> dict[str, Any] | None:
    """The speculative config with Python names, if it asks for UNO."""
    settings = engine_args.speculative_config
    if not (isinstance(settings, dict) and settings.get("method") == "uno"):
        return None
    return {key.replace("-", "_"): value for key, value in settings.items()}


def _create_speculative_config(original: Any) -> Any:
    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        settings = _uno_settings(self)
        if settings is None:
            return original(self, target_model_config, target_parallel_config)
        from vllm_uno.config import UnoSpeculativeConfig

        install_hooks(ENGINE_HOOKS)
        for flag, key, value in (
            ("--spec-model", "model", self.spec_model),
            ("--spec-tokens", "num_speculative_tokens", self.spec_tokens),
        ):
            if value is None:
                continue
            if key in settings:
                raise ValueError(f"{flag} and --speculative-config['{key}'] exclude each other")
            settings[key] = value
        settings["target_model_config"] = target_model_config
        settings["target_parallel_config"] = target_parallel_config
        return UnoSpeculativeConfig(**settings)

    return create_speculative_config


def _set_default_limits(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_limits(
        self: Any, usage_context: Any, model_config: Any, parallel_config: Any
    ) -> None:
        user_seqs, user_tokens = self.max_num_seqs, self.max_num_batched_tokens
        original(self, usage_context, model_config, parallel_config)
        settings = _uno_settings(self)
        if settings is None:
            return
        from vllm.logger import init_logger

        from vllm_uno.config import mode_of, sizes_of
        from vllm_uno.validation import fit_limits

        if self.spec_tokens is not None:
            settings.setdefault("num_speculative_tokens", self.spec_tokens)
        block_size, _, verified = sizes_of(settings)
        rows = int(block_size)
        # vLLM itself asks for K+1 rows a request where LoRA is on. Trees are that much wider than
        # their block that without them a step could not verify all requests.
        if self.enable_lora or mode_of(settings) == "tree":
            rows = max(rows, int(verified) + 1)
        limits = (self.max_num_seqs, self.max_num_batched_tokens)
        fitted = fit_limits(user_seqs, user_tokens, *limits, rows)
        if fitted != limits:
            init_logger("vllm.uno").info(
                "UNO: %d rows a request: (max_num_seqs, max_num_batched_tokens) %s -> %s; "
                "set both to choose yourself",
                rows,
                limits,
                fitted,
            )
            self.max_num_seqs, self.max_num_batched_tokens = fitted

    return set_default_limits


HOOKS = (
    Hook(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        parameters=("self", "target_model_config", "target_parallel_config"),
        reason="`method` is a closed Literal and every method needs a draft model config",
        removable="vLLM lets a plugin register a speculative method with its own config class",
        make=_create_speculative_config,
    ),
    Hook(
        target="vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        parameters=("self", "usage_context", "model_config", "parallel_config"),
        reason="the draft pass runs B rows a request, which vLLM's default limits need not fit",
        removable="vLLM asks the speculative config for the rows of a draft pass",
        make=_set_default_limits,
    ),
)


def refuse_uno(reason: Exception) -> None:
    """Leave plain vLLM alone; make `method: uno`, and only it, raise `reason`."""
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_speculative_config", None)
    if original is None or hasattr(original, "__uno_refusal__"):
        return

    @functools.wraps(original)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _uno_settings(self) is not None:
            raise RuntimeError(str(reason)) from reason
        return original(self, *args, **kwargs)

    create_speculative_config.__uno_refusal__ = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config
