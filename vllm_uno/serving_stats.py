"""What a worker tells about its own steps: acceptance, graphs, time, without waiting for anything.

    counters (device)  --async copy-->  host  --taken with a step's output-->  scheduler
                                                 --its statistics-->  stat_logger (API server)

The device is never waited for: one copy of the counters and one timed step are under way at a
time, and each is looked at when a later step ends. So on a GPU the numbers are a step or two
late, and what the last steps before a pause counted comes with the first step after it. (On a CPU
nothing is late.)
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_uno.metrics import DraftCounters

PASSES = ("draft", "verify")
GRAPHS = ("full", "piecewise", "none")


@dataclass
class StepStats:
    """What was counted since the last report.

    Attributes:
        cycles, emitted, proposed, accepted: see `metrics.DraftStats`.
        steps: by pass and CUDA graph mode ("draft full", "verify none", ...), passes that ran.
        seconds: by pass, device time of the steps that were timed (some of all).
        timed_steps: their number.
        draft_width: drafts a request that the last step asked for; None: no step.
    """

    cycles: int = 0
    emitted: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    timed_steps: int = 0
    draft_width: int | None = None

    def message(self) -> dict[str, Any]:
        """Plain types, for vLLM's messages between processes."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> StepStats:
        return cls(**message)

    def add(self, other: StepStats) -> None:
        """Count `other`, a later report, in."""
        self.cycles += other.cycles
        self.emitted += other.emitted
        for mine, theirs in ((self.proposed, other.proposed), (self.accepted, other.accepted)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count
        for key, count in other.steps.items():
            self.steps[key] = self.steps.get(key, 0) + count
        for key, seconds in other.seconds.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.timed_steps += other.timed_steps
        if other.draft_width is not None:
            self.draft_width = other.draft_width

    @property
    def tokens_per_cycle(self) -> float:
        """tau."""
        return self.emitted / self.cycles if self.cycles else float("nan")

    def share_of_time(self, one_pass: str) -> float:
        total = sum(self.seconds.values())
        return self.seconds.get(one_pass, 0.0) / total if total else float("nan")

    def share_outside_graphs(self, one_pass: str) -> float:
        """Of the pass's steps, those that replayed no whole graph."""
        counts = {graph: self.steps.get(f"{one_pass} {graph}", 0) for graph in GRAPHS}
        total = sum(counts.values())
        return (total - counts["full"]) / total if total else float("nan")


class StepRecorder:
    """Counts one worker's steps.

    The model state calls `verify_begins`, the proposer `draft_begins` and `draft_ends`; a step
    that is not followed through (a dummy, a prefill that nobody samples from) is forgotten.
    """

    def __init__(self, counters: DraftCounters, device: torch.device) -> None:
        self._stats = StepStats()
        self._copy = _CounterCopy(counters, device)
        self._timer = _StepTimer(device)
        self._verify_graph: str | None = None

    def verify_begins(self, graph: str) -> None:
        """The verify pass is about to run, in the CUDA graph mode named `graph`."""
        self._verify_graph = graph.lower()
        self._timer.begin()

    def draft_begins(self) -> None:
        self._timer.middle()

    def draft_ends(self, graph: str, width: int) -> None:
        """The draft pass is launched.

        Args:
            graph: name of its CUDA graph mode.
            width: drafts a request that the next step verifies.
        """
        self._count("draft", graph.lower())
        self._timer.end()
        self._step_ends(width)

    def draft_left_out(self) -> None:
        """The next step verifies nothing: a schedule has turned drafts off."""
        self._timer.drop()
        self._step_ends(0)

    def _step_ends(self, width: int) -> None:
        if self._verify_graph is not None:
            self._count("verify", self._verify_graph)
        self._verify_graph = None
        self._stats.draft_width = width
        self._copy.start()

    def drop(self) -> None:
        """Forget the step that began."""
        self._verify_graph = None
        self._timer.drop()

    def _count(self, one_pass: str, graph: str) -> None:
        key = f"{one_pass} {graph}"
        self._stats.steps[key] = self._stats.steps.get(key, 0) + 1

    def take(self) -> dict[str, Any] | None:
        """What was counted since the last call (`StepStats.message`); None if nothing was."""
        counted = self._copy.take()
        if counted is not None:
            self._stats.add(counted)
        timed = self._timer.take()
        if timed is not None:
            verify, draft = timed
            self._stats.add(StepStats(seconds={"verify": verify, "draft": draft}, timed_steps=1))
        taken, self._stats = self._stats, StepStats()
        return taken.message() if taken.steps or taken.cycles or taken.timed_steps else None


class _CounterCopy:
    """Brings the counters to the host, and says what they counted since the last time."""

    def __init__(self, counters: DraftCounters, device: torch.device) -> None:
        self._counters = counters
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(counters.all.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._landed = torch.cuda.Event() if on_gpu else None
        self._under_way = False
        self._resets = 0
        self._copied_resets = 0
        self._before = [0] * len(self._host)

    def start(self) -> None:
        if self._under_way:
            return
        self._under_way = True
        self._copied_resets = self._counters.resets
        self._host.copy_(self._counters.all, non_blocking=True)
        if self._landed is not None:
            self._landed.record()

    def take(self) -> StepStats | None:
        if not self._under_way or not (self._landed is None or self._landed.query()):
            return None
        self._under_way = False
        now = self._host.tolist()
        if self._copied_resets != self._resets:
            self._resets = self._copied_resets
            self._before = [0] * len(now)
        counted = [new - old for new, old in zip(now, self._before, strict=True)]
        self._before = now
        block = self._counters.block_size
        return StepStats(
            cycles=counted[0],
            emitted=counted[1],
            proposed=counted[2 : 2 + block],
            accepted=counted[2 + block :],
        )


class _StepTimer:
    """Times the two passes of one step at a time; GPU time by events, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(3)] if self._on_gpu else []
        )
        self._clock = [0.0] * 3
        self._marks = 0  # of begin, middle, end: how many this step has had; 3: under way

    def _mark(self, number: int) -> None:
        if self._marks != number:
            return
        self._marks += 1
        if self._on_gpu:
            self._events[number].record()
        else:
            self._clock[number] = time.perf_counter()

    def begin(self) -> None:
        if self._marks < 3:
            self._marks = 0
            self._mark(0)

    def middle(self) -> None:
        self._mark(1)

    def end(self) -> None:
        self._mark(2)

    def drop(self) -> None:
        if self._marks < 3:
            self._marks = 0

    def take(self) -> tuple[float, float] | None:
        """(verify, draft) seconds of a step that has ended on the device, too."""
        if self._marks < 3:
            return None
        if not self._on_gpu:
            first, second, third = self._clock
        elif self._events[2].query():
            first, second = 0.0, self._events[0].elapsed_time(self._events[1]) / 1e3
            third = second + self._events[1].elapsed_time(self._events[2]) / 1e3
        else:
            return None
        self._marks = 0
        return second - first, third - second


class WatchedModelState:
    """Mixin of the model states: tells `uno_recorder` of verify passes, once there is one."""

    uno_recorder: StepRecorder | None = None

    def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, *args, **kwargs
        )
        if self.uno_recorder is not None:
            self.uno_recorder.verify_begins(cudagraph_mode.name)
        return prepared
