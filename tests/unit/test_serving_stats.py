"""Reports of a worker, and what Prometheus and the log make of them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest

from vllm_uno.metrics import DraftCounters
from vllm_uno.serving_stats import StepRecorder, StepStats, _StepTimer
from vllm_uno.stat_logger import (
    METRIC_NAMES,
    UnoStatLogger,
    log_line,
    put_report,
    take_report,
)

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs"


def one_step(recorder: StepRecorder, verify: str = "FULL", draft: str = "FULL") -> None:
    recorder.verify_begins(verify)
    recorder.draft_begins()
    recorder.draft_ends(draft, width=3)


def test_reports_are_what_was_counted_since_the_last() -> None:
    counters = DraftCounters(3, CPU)
    recorder = StepRecorder(counters, CPU)
    counters.cycles += 5
    counters.emitted += 12
    counters.proposed += torch.tensor([5, 5, 4])
    counters.accepted += torch.tensor([4, 2, 1])
    one_step(recorder)
    first = StepStats.from_message(recorder.take() or {})
    assert (first.cycles, first.emitted) == (5, 12)
    assert (first.proposed, first.accepted) == ([5, 5, 4], [4, 2, 1])
    assert first.tokens_per_cycle == 12 / 5 and first.draft_width == 3

    assert recorder.take() is None  # nothing new
    counters.cycles += 1
    counters.accepted[2] += 1
    one_step(recorder)
    second = StepStats.from_message(recorder.take() or {})
    assert (second.cycles, second.emitted, second.accepted) == (1, 0, [0, 0, 1])


def test_a_reset_of_the_counters_is_no_negative_count() -> None:
    counters = DraftCounters(2, CPU)
    recorder = StepRecorder(counters, CPU)
    counters.cycles += 5
    one_step(recorder)
    recorder.take()
    counters.reset()
    counters.cycles += 7  # more than before: nothing but the count of resets tells
    one_step(recorder)
    assert StepStats.from_message(recorder.take() or {}).cycles == 7


def test_steps_by_graph_and_forgotten_steps() -> None:
    recorder = StepRecorder(DraftCounters(2, CPU), CPU)
    one_step(recorder)
    one_step(recorder, verify="PIECEWISE")
    one_step(recorder, verify="NONE", draft="NONE")
    recorder.verify_begins("NONE")  # a chunk of a prompt: nobody drafts
    recorder.drop()
    stats = StepStats.from_message(recorder.take() or {})
    assert stats.steps == {
        "verify full": 1,
        "verify piecewise": 1,
        "verify none": 1,
        "draft full": 2,
        "draft none": 1,
    }
    assert stats.share_outside_graphs("verify") == pytest.approx(2 / 3)
    assert stats.share_outside_graphs("draft") == pytest.approx(1 / 3)


def test_only_whole_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 100.0, 104.0, 105.0, 200.0])
    monkeypatch.setattr("vllm_uno.serving_stats.time.perf_counter", lambda: next(now))
    timer = _StepTimer(CPU)
    timer.begin()  # at 10: forgotten
    timer.drop()
    timer.end()  # of a step that never began: no mark
    assert timer.take() is None
    timer.begin()
    timer.middle()
    timer.end()
    timer.begin()  # the step before has not been read: no mark, or it would be overwritten
    assert timer.take() == (4.0, 1.0)
    assert timer.take() is None


class FakeGpuEvent:
    """A device that runs behind: `query` is true once `finished`."""

    finished = False

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self) -> None:
        self.at = 0.0

    def query(self) -> bool:
        return FakeGpuEvent.finished

    def synchronize(self) -> None:
        raise AssertionError("waited for the device")

    def elapsed_time(self, later: FakeGpuEvent) -> float:
        assert FakeGpuEvent.finished, "read before the device was there"
        return 2.0


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeGpuEvent)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    counters = DraftCounters(1, CPU)
    recorder = StepRecorder(counters, torch.device("cuda"))
    monkeypatch.setattr(FakeGpuEvent, "finished", False)
    counters.cycles += 1
    one_step(recorder)
    early = StepStats.from_message(recorder.take() or {})
    assert early.cycles == 0 and early.timed_steps == 0  # under way
    counters.cycles += 1
    one_step(recorder)  # nothing new is started
    monkeypatch.setattr(FakeGpuEvent, "finished", True)
    late = StepStats.from_message(recorder.take() or {})
    assert late.cycles == 1 and late.seconds == {"verify": 2e-3, "draft": 2e-3}
    one_step(recorder)
    assert StepStats.from_message(recorder.take() or {}).cycles == 1  # none is lost


# --- the API server's side -------------------------------------------------


def config(block_size: int = 3, name: str = "m") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=name),
        speculative_config=SimpleNamespace(
            block_size=block_size, num_speculative_tokens=block_size, method="uno"
        ),
    )


def value(name: str, **labels: str) -> float | None:
    found: float | None = REGISTRY.get_sample_value(
        name, {"model_name": "m", "engine": "0", **labels}
    )
    return found


@pytest.fixture
def logger() -> Iterator[UnoStatLogger]:
    from vllm_uno import stat_logger

    yield UnoStatLogger(config(), [0, 1])
    while stat_logger._registered:
        REGISTRY.unregister(stat_logger._registered.pop())


def report(cycles: int = 4) -> dict[str, Any]:
    return StepStats(
        cycles=cycles,
        emitted=3 * cycles,
        proposed=[cycles] * 3,
        accepted=[cycles, cycles, 0],
        steps={"draft full": 2, "draft none": 2, "verify full": 4},
        seconds={"draft": 0.25, "verify": 0.75},
        timed_steps=1,
        draft_width=2,
    ).message()


def scheduler_stats(message: dict[str, Any] | None) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats

    stats = SchedulerStats()
    if message is not None:
        put_report(stats, message)
    return stats


def test_prometheus_sums_reports_by_engine(logger: UnoStatLogger) -> None:
    assert value("vllm_uno:cycles_total") == 0
    for engine, cycles in ((0, 4), (0, 6), (1, 100)):
        logger.record(scheduler_stats(report(cycles)), None, engine_idx=engine)
    logger.record(scheduler_stats(None), None)
    logger.record(None, None)
    assert value("vllm_uno:cycles_total") == 10
    assert value("vllm_uno:emitted_tokens_total") == 30
    assert value("vllm_uno:accepted_tokens_total", position="1") == 10
    assert value("vllm_uno:accepted_tokens_total", position="2") == 0
    assert value("vllm_uno:proposed_tokens_total", position="2") == 10
    assert value("vllm_uno:steps_total", **{"pass": "draft", "graph": "none"}) == 4
    assert value("vllm_uno:steps_total", **{"pass": "verify", "graph": "piecewise"}) == 0
    assert value("vllm_uno:timed_seconds_total", **{"pass": "verify"}) == 1.5
    assert value("vllm_uno:draft_width") == 2
    assert REGISTRY.get_sample_value(
        "vllm_uno:cycles_total", {"model_name": "m", "engine": "1"}
    ) == (100)


def test_the_page_has_exactly_the_named_metrics(logger: UnoStatLogger) -> None:
    logger.record(scheduler_stats(report()), None)
    page = generate_latest(REGISTRY).decode()
    found = set(re.findall(r"^(vllm_uno:\w+)", page, re.MULTILINE))
    assert {name for name in found if not name.endswith("_created")} == set(METRIC_NAMES)


def test_vllm_does_not_unregister_them_and_a_second_engine_may_start(
    logger: UnoStatLogger,
) -> None:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    logger.record(scheduler_stats(report()), None)
    unregister_vllm_metrics()
    assert value("vllm_uno:cycles_total") == 4
    UnoStatLogger(config(), [0])
    assert value("vllm_uno:cycles_total") == 0


def test_vllms_own_loggers_do_not_see_the_report() -> None:
    stats = scheduler_stats(report())
    assert take_report(stats) == report()
    assert stats.kv_connector_stats is None and take_report(stats) is None
    stats.kv_connector_stats = {"of": "a connector"}
    assert take_report(stats) is None and stats.kv_connector_stats == {"of": "a connector"}


def test_report_survives_vllms_messages() -> None:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sent = EngineCoreOutputs(scheduler_stats=scheduler_stats(report()))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert take_report(received.scheduler_stats) == report()


def test_one_line_an_interval(logger: UnoStatLogger, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "vllm_uno.stat_logger.logger",
        SimpleNamespace(info=lambda text, *args: lines.append(text % args)),
    )
    logger.record(scheduler_stats(report(1)), None)
    logger.record(scheduler_stats(report(3)), None)
    logger.log()
    assert lines == [
        "Engine 000: UNO: tau 3.00 (4 cycles); width 2; accepted by position 1.00 1.00 0.00; "
        "time in draft 25%, verify 75%; outside full CUDA graphs draft 50%, verify 0%"
    ]
    logger.log()
    assert len(lines) == 1  # nothing happened


def test_log_line_without_times_or_steps() -> None:
    stats = StepStats(cycles=2, emitted=2, accepted=[0], draft_width=1)
    assert log_line(stats) == "UNO: tau 1.00 (2 cycles); width 1; accepted by position 0.00"


# --- what the documentation says -------------------------------------------


def test_grafana_panels_ask_for_metrics_that_exist() -> None:
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = {name for expr in expressions for name in re.findall(r"vllm_uno:\w+", expr)}
    assert asked == set(METRIC_NAMES), "every metric has a panel, and no panel another"
    known = {"model_name", "engine", "position", "pass", "graph", "le"}
    for expr in expressions:
        for labels in re.findall(r"\bby \(([^)]*)\)", expr):
            assert {name.strip() for name in labels.split(",")} <= known, expr


def test_operations_name_metrics_that_exist() -> None:
    text = (DOCS / "operations.md").read_text()
    named = set(re.findall(r"vllm_uno:\w+", text))
    assert named == set(METRIC_NAMES)


def test_hooks_reach_engines_that_run_uno_only() -> None:
    from vllm_uno.vllm_hooks.stats import _stat_logger_manager

    seen: list[Any] = []

    def original(self: Any, vllm_config: Any, engines: Any, custom: Any) -> None:
        seen.append(custom)

    hooked = _stat_logger_manager(original)
    plain = SimpleNamespace(speculative_config=None)
    ngram = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    for which in (plain, ngram, config()):
        hooked(None, which, [0], [logging])
    assert seen == [[logging], [logging], [UnoStatLogger, logging]]
