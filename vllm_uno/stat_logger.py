"""UNO's numbers in Prometheus and in the log, on the API server's side.

Beside vLLM's own metrics, in the same registry and so on the same /metrics page. Names begin with
`vllm_uno:`, not `vllm:`: vLLM unregisters everything of its own prefix when it makes its loggers.
Counters only, but for the width: rates and ratios are the reader's (docs/operations.md has them).

vLLM's own `vllm:spec_decode_*` counters go on beside them. They count placeholder drafts as
rejected (see metrics.py) and so understate acceptance a little.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_uno.serving_stats import GRAPHS, PASSES, StepStats

logger = init_logger("vllm.uno")

PREFIX = "vllm_uno:"
MESSAGE_KEY = "uno"
"""Of the dict in which a worker's report travels."""

_LABELS = ("model_name", "engine")

# name, documentation, labels beside the two above
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cycles", "Verified drafts (a draft pass and a verify pass of one request).", ()),
    ("emitted_tokens", "Tokens that cycles emitted; over cycles: tau.", ()),
    (
        "proposed_tokens",
        "Drafts verified, by position in the block from 0 (tree mode: nodes, by depth).",
        ("position",),
    ),
    ("accepted_tokens", "Drafts accepted, by position in the block from 0.", ("position",)),
    ("steps", "Passes over the model, by the CUDA graph they replayed.", ("pass", "graph")),
    ("timed_seconds", "Device time of the steps that were timed, by pass.", ("pass",)),
)
GAUGES: tuple[tuple[str, str], ...] = (
    ("draft_width", "Drafts verified a request and cycle, as last asked for."),
)
METRIC_NAMES: tuple[str, ...] = (
    *(f"{PREFIX}{name}_total" for name, _, _ in COUNTERS),
    *(f"{PREFIX}{name}" for name, _ in GAUGES),
)
"""As they stand on the /metrics page."""

_registered: list[Any] = []


class UnoStatLogger(AggregateStatLoggerBase):
    """Records the reports of all engines of one API server."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.engine_indexes = list(engine_indexes)
        self.interval = {index: StepStats() for index in self.engine_indexes}
        self._model_name = vllm_config.model_config.served_model_name
        while _registered:  # of an engine that this process had before
            REGISTRY.unregister(_registered.pop())
        self.counters = {
            name: Counter(PREFIX + name, text, (*_LABELS, *labels))
            for name, text, labels in COUNTERS
        }
        self.gauges = {
            name: Gauge(PREFIX + name, text, _LABELS, multiprocess_mode="mostrecent")
            for name, text in GAUGES
        }
        _registered.extend([*self.counters.values(), *self.gauges.values()])
        spec = vllm_config.speculative_config
        for engine in self.engine_indexes:  # shown from the start, at 0
            for position in range(spec.block_size):
                self._counter("proposed_tokens", engine, str(position))
                self._counter("accepted_tokens", engine, str(position))
            for one_pass in PASSES:
                self._counter("timed_seconds", engine, one_pass)
                for graph in GRAPHS:
                    self._counter("steps", engine, one_pass, graph)
            self._counter("cycles", engine)
            self._counter("emitted_tokens", engine)
            self._gauge("draft_width", engine).set(spec.num_speculative_tokens)

    def _counter(self, name: str, engine: int, *labels: str) -> Any:
        return self.counters[name].labels(self._model_name, str(engine), *labels)

    def _gauge(self, name: str, engine: int) -> Any:
        return self.gauges[name].labels(self._model_name, str(engine))

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = take_report(scheduler_stats)
        if report is None:
            return
        stats = StepStats.from_message(report)
        self.interval.setdefault(engine_idx, StepStats()).add(stats)
        self._counter("cycles", engine_idx).inc(stats.cycles)
        self._counter("emitted_tokens", engine_idx).inc(stats.emitted)
        for name, counts in (
            ("proposed_tokens", stats.proposed),
            ("accepted_tokens", stats.accepted),
        ):
            for position, count in enumerate(counts):
                self._counter(name, engine_idx, str(position)).inc(count)
        for key, count in stats.steps.items():
            self._counter("steps", engine_idx, *key.split()).inc(count)
        for one_pass, seconds in stats.seconds.items():
            self._counter("timed_seconds", engine_idx, one_pass).inc(seconds)
        if stats.draft_width is not None:
            self._gauge("draft_width", engine_idx).set(stats.draft_width)

    def log(self) -> None:
        """One line an engine about the interval just past; none if it had no cycle."""
        for engine, stats in self.interval.items():
            if stats.cycles:
                logger.info("Engine %03d: %s", engine, log_line(stats))
            self.interval[engine] = StepStats()

    def log_engine_initialized(self) -> None:
        pass


def log_line(stats: StepStats) -> str:
    """UNO: tau 5.12 (980 cycles), width 8, accepted by position 1.00 0.92 ..., ..."""
    rates = " ".join(f"{accepted / stats.cycles:.2f}" for accepted in stats.accepted)
    parts = [
        f"UNO: tau {stats.tokens_per_cycle:.2f} ({stats.cycles} cycles)",
        f"width {stats.draft_width}",
        f"accepted by position {rates}",
    ]
    if stats.timed_steps:
        parts.append(
            f"time in draft {stats.share_of_time('draft'):.0%}, "
            f"verify {stats.share_of_time('verify'):.0%}"
        )
    if stats.steps:
        parts.append(
            "outside full CUDA graphs "
            + ", ".join(f"{one} {stats.share_outside_graphs(one):.0%}" for one in PASSES)
        )
    return "; ".join(parts)


def put_report(scheduler_stats: Any, report: dict[str, Any]) -> None:
    """Hand a worker's report to the API server with vLLM's own statistics.

    In the field of KV connectors, which UNO refuses: it is the one of free form.
    """
    scheduler_stats.kv_connector_stats = {MESSAGE_KEY: report}


def take_report(scheduler_stats: Any) -> dict[str, Any] | None:
    """The report, taken out: vLLM's loggers come next and know nothing of it."""
    carrier = getattr(scheduler_stats, "kv_connector_stats", None)
    if not carrier or MESSAGE_KEY not in carrier:
        return None
    scheduler_stats.kv_connector_stats = None
    report: dict[str, Any] = carrier[MESSAGE_KEY]
    return report
