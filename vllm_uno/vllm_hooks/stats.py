"""UNO's numbers on vLLM's own way of statistics: worker, scheduler, API server.

vLLM has an entry point for stat loggers, `vllm.stat_logger_plugins`. It is not used: a logger
found there turns statistics on in every engine of the process, plain ones with
`--disable-log-stats` included, and offline engines (`LLM`) never ask for it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook


def _stat_logger_manager(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: Any,
        vllm_config: Any,
        engine_idxs: Any = None,
        custom_stat_loggers: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        spec = vllm_config.speculative_config
        if spec is not None and spec.method == "uno":
            from vllm_uno.stat_logger import UnoStatLogger

            # First: it takes the report out before the others look.
            custom_stat_loggers = [UnoStatLogger, *(custom_stat_loggers or [])]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    return __init__


def _update_from_output(original: Any) -> Any:
    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        report = getattr(model_runner_output, "uno_report", None)
        if report is not None:
            for output in outputs.values():
                if output.scheduler_stats is not None:
                    from vllm_uno.stat_logger import put_report

                    put_report(output.scheduler_stats, report)
                    break
        return outputs

    return update_from_output


def _sample_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        recorder = getattr(self.speculator, "recorder", None)
        target = getattr(output, "model_runner_output", None)
        if recorder is not None and target is not None:
            report = recorder.take()
            if report is not None:
                target.uno_report = report  # travels by pickle, as the whole output does
        return output

    return sample_tokens


ENGINE_HOOKS = (
    Hook(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        parameters=(
            "self",
            "vllm_config",
            "engine_idxs",
            "custom_stat_loggers",
            "enable_default_loggers",
            "aggregate_engine_logging",
            "client_count",
        ),
        reason="UNO's numbers on the /metrics page and in the log",
        removable="vLLM asks the speculative method for its stat logger",
        make=_stat_logger_manager,
    ),
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        parameters=("self", "scheduler_output", "model_runner_output"),
        reason="a worker's report goes on to the API server",
        removable="vLLM's SchedulerStats carry what a speculator reports",
        make=_update_from_output,
    ),
)
"""For the processes of API server and engine. Their modules take 1.5 s to import, so these are
installed where those are loaded anyway: with the engine's, or when a speculative config asks."""

WORKER_HOOKS = (
    Hook(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        parameters=("self", "grammar_output"),
        reason="what the proposer counted leaves the worker with the step's output",
        removable="vLLM's runner asks its speculator for statistics",
        make=_sample_tokens,
    ),
)
"""For workers that run UNO."""


def install_hooks(hooks: tuple[Hook, ...]) -> None:
    """Check all, then install all.

    Raises:
        UnsupportedVllm: one does not fit; nothing was changed.
    """
    for hook in hooks:
        hook.check()
    for hook in hooks:
        hook.install()
