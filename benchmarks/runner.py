"""Problems through vLLM, plain or with UNO: shared by math_eval.py and quality.py.

`run` asks one engine all that a list of jobs asks and appends the results to the jobs' files, a
batch at a time; what stands in a file already is not asked again. An engine that has nothing to do
is not started. On a CPU the engine lives in this process, on GPUs in one of its own, whose memory
is free for the next engine once it is shut down.

A job's file has one JSON object a line: first the settings, then one for every batch:

    {"results": [{"id", "sample", "correct", "finish", "tokens", "digest", "text"}, ...],
     "drafts": {"cycles", "emitted", "proposed": [B], "accepted": [B]} or null,
     "rates": {"requests", "tokens", "seconds", "request_tokens", "request_seconds"}}

`digest` is a hash of the token ids. What a batch has to say is in one line, so that a break cannot
part it: tau and speeds of a resumed run are those of all its requests.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grading
from tqdm import tqdm

from vllm_uno.demo import prepare_environment
from vllm_uno.metrics import DraftStats
from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

if TYPE_CHECKING:
    from vllm import LLM

SUFFIX = "\n\nReason step by step, and put your final answer within \\boxed{}."
BUNDLED = "bundled/"  # ids of problems whose model was not taught to obey SUFFIX
# Requests per batch, in multiples of the concurrency: while the last ones of a batch end, fewer
# run at a time than asked for; a break loses at most one batch.
_BATCH_ROUNDS = 8
_SMALL_BYTES = 200_000_000
_WARM_UP_TOKENS = 8


class UsageError(ValueError):
    """A setting or file that the user can mend; the message says how."""


@dataclass(frozen=True)
class Problem:
    id: str
    problem: str
    answer: str  # an integer or LaTeX


@dataclass(frozen=True)
class Sampling:
    """What is asked of every problem."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1  # answers per problem

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.samples < 1:
            raise UsageError("--max-tokens and --samples-per-problem must be at least 1")
        if self.temperature < 0:
            raise UsageError("--temperature must be at least 0")
        if self.temperature == 0 and self.samples > 1:
            raise UsageError(
                "several samples per problem are all the same at temperature 0: set --temperature "
                "above 0 or --samples-per-problem 1"
            )


@dataclass(frozen=True)
class Setup:
    """What an engine is started with.

    Attributes:
        model: folder or hub id.
        concurrency: requests at a time (vLLM's max_num_seqs).
        uno: vLLM's speculative_config, or None for plain vLLM.
        thinking: enable_thinking of the chat template; None leaves it to the template.
        engine: more settings of vLLM's `LLM`.

    """

    model: str
    concurrency: int
    uno: dict[str, Any] | None = None
    thinking: bool | None = None
    engine: dict[str, Any] = field(default_factory=dict)


def uno_config(
    adapter: str | None,
    block_size: int | None,
    tree_top_k: int | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """`speculative_config`, of tree mode where K or V is given; None leaves a setting to UNO."""
    sizes: dict[str, Any] = {"num_speculative_tokens": block_size}
    if tree_top_k is not None or nodes is not None:
        sizes = {
            "uno_mode": "tree",
            "uno_block_size": block_size,
            "uno_tree_top_k": tree_top_k,
            "num_speculative_tokens": nodes,
        }
    config = {"method": "uno", **sizes, "uno_lora_path": adapter}
    return {name: value for name, value in config.items() if value is not None}


@dataclass(frozen=True)
class Job:
    """Problems to ask, and the file of the results."""

    file: Path
    problems: Sequence[Problem]
    sampling: Sampling


@dataclass
class Rates:
    """Work done; the seconds count neither engines' starts nor a call's first, short requests.

    Attributes:
        requests: answered.
        tokens: generated.
        seconds: from the first to the last step of a batch, added up.
        request_tokens: tokens after each request's first one.
        request_seconds: from each request's first token to its last, added up.

    """

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    request_tokens: int = 0
    request_seconds: float = 0.0

    def add(self, other: Rates) -> None:
        for part in dataclasses.fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


@dataclass
class Outcome:
    """All results of a job, by (id, sample), those of earlier calls included.

    `drafts` is None for plain vLLM.
    """

    results: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    drafts: DraftStats | None = None
    rates: Rates = field(default_factory=Rates)

    def add(self, batch: dict[str, Any]) -> None:
        """Count one line of a job's file."""
        for result in batch["results"]:
            self.results[result["id"], result["sample"]] = result
        if batch["drafts"] is not None:
            new = DraftStats(
                cycles=batch["drafts"]["cycles"],
                emitted=batch["drafts"]["emitted"],
                proposed=tuple(batch["drafts"]["proposed"]),
                accepted=tuple(batch["drafts"]["accepted"]),
            )
            self.drafts = new if self.drafts is None else _sum(self.drafts, new)
        self.rates.add(Rates(**batch["rates"]))


def _sum(a: DraftStats, b: DraftStats) -> DraftStats:
    return DraftStats(
        cycles=a.cycles + b.cycles,
        emitted=a.emitted + b.emitted,
        proposed=tuple(x + y for x, y in zip(a.proposed, b.proposed, strict=True)),
        accepted=tuple(x + y for x, y in zip(a.accepted, b.accepted, strict=True)),
    )


def read_problems(path: Path) -> list[Problem]:
    """Problems of a JSONL file: {"id", "problem", "answer"} a line, ids all different."""
    if not path.is_file():
        raise UsageError(
            f"there is no file {path}; make one with: python benchmarks/math_eval.py prepare"
        )
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problems.append(Problem(str(row["id"]), row["problem"], str(row["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}, line {number}: not an object with id, problem and answer ({error!r}); "
                "make such files with: python benchmarks/math_eval.py prepare"
            ) from error
    if not problems:
        raise UsageError(f"{path} holds no problems")
    if len({p.id for p in problems}) < len(problems):
        raise UsageError(f"{path}: two problems have the same id")
    return problems


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """The file that `read_problems` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(p)) + "\n" for p in problems))


def default_model() -> str:
    """The bundled model's folder."""
    from vllm_uno.bundled import bundled_model

    try:
        return str(bundled_model())
    except FileNotFoundError as error:
        raise UsageError(f"{error} Or set --model.") from error


def bundled_problems(count: int) -> list[Problem]:
    """The first `count` held-out problems of the bundled model."""
    from vllm_uno.bundled.problems import generate

    return [
        Problem(f"{BUNDLED}{number}", problem.question, str(problem.final))
        for number, problem in enumerate(generate("test", count))
    ]


def check(setup: Setup, job: Job) -> None:
    """Raises UsageError where the job's file holds results of other settings."""
    _read(job.file, _settings(setup, job))


def run(setup: Setup, jobs: Sequence[Job], name: str) -> list[Outcome]:
    """What the jobs' files hold once everything that they lack has been asked.

    Args:
        setup: the engine of all jobs.
        jobs: asked one after the other.
        name: of the engine, for the progress bar.

    Raises:
        UsageError: a file holds results of other settings (the message names the differences), or
            math-verify is needed and does not run.

    """
    outcomes, waiting = [], []
    for job in jobs:
        outcome = _read(job.file, _settings(setup, job))
        outcomes.append(outcome)
        # Sample by sample: a run that was broken off has seen as many problems as can be.
        keys = [(p, sample) for sample in range(job.sampling.samples) for p in job.problems]
        waiting.append([key for key in keys if (key[0].id, key[1]) not in outcome.results])
    if not any(waiting):
        return outcomes
    if not all(_is_bundled(problem) for job in jobs for problem in job.problems):
        try:  # before there are answers to lose
            grading.start()
        except RuntimeError as error:
            raise UsageError(str(error)) from error
    with start_engine(setup, name) as llm:
        for job, outcome, keys in zip(jobs, outcomes, waiting, strict=True):
            if keys:
                _ask(llm, setup, job, outcome, keys, name)
    return outcomes


def _ask(
    llm: LLM,
    setup: Setup,
    job: Job,
    outcome: Outcome,
    keys: Sequence[tuple[Problem, int]],
    name: str,
) -> None:
    from vllm_uno.inspect_engine import draft_stats

    # What a first request compiles or loads is no work on the problems.
    short = dataclasses.replace(
        job.sampling, max_tokens=min(_WARM_UP_TOKENS, job.sampling.max_tokens)
    )
    _generate(llm, setup, short, keys[: setup.concurrency])
    llm.reset_prefix_cache()
    if setup.uno is not None:
        draft_stats(llm, reset=True)

    total = len(job.problems) * job.sampling.samples
    batch_size = _BATCH_ROUNDS * setup.concurrency
    label = f"{name}, temperature {job.sampling.temperature:g}"
    with tqdm(total=total, initial=total - len(keys), desc=label, unit="request") as bar:
        for first in range(0, len(keys), batch_size):
            batch = keys[first : first + batch_size]
            started = time.perf_counter()
            outputs = _generate(llm, setup, job.sampling, batch)
            seconds = time.perf_counter() - started
            drafts = draft_stats(llm, reset=True) if setup.uno is not None else None
            line = {
                "results": [
                    _result(*key, output) for key, output in zip(batch, outputs, strict=True)
                ],
                "drafts": None if drafts is None else dataclasses.asdict(drafts),
                "rates": dataclasses.asdict(_rates(outputs, seconds)),
            }
            _append(job.file, line)
            outcome.add(line)
            bar.update(len(batch))


def _generate(
    llm: LLM, setup: Setup, sampling: Sampling, keys: Sequence[tuple[Problem, int]]
) -> list[Any]:
    """vLLM's RequestOutputs, one for each (problem, sample)."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=_request_seed(sampling.seed, problem.id, sample),
        )
        for problem, sample in keys
    ]
    return llm.chat(
        [[{"role": "user", "content": prompt(problem)}] for problem, _ in keys],
        params,
        chat_template_kwargs=(
            None if setup.thinking is None else {"enable_thinking": setup.thinking}
        ),
        use_tqdm=functools.partial(tqdm, leave=False, position=1) if sys.stderr.isatty() else False,
    )


def prompt(problem: Problem) -> str:
    return problem.problem if _is_bundled(problem) else problem.problem + SUFFIX


def _is_bundled(problem: Problem) -> bool:
    """Asked as it is, and answered by an integer: no math-verify."""
    return problem.id.startswith(BUNDLED)


def _request_seed(seed: int, identity: str, sample: int) -> int:
    """One of its own for each request: equal seeds would draw equal numbers in all of them."""
    digest = hashlib.sha256(f"{seed} {identity} {sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _result(problem: Problem, sample: int, output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    return {
        "id": problem.id,
        "sample": sample,
        "correct": grading.is_correct(answer.text, problem.answer, integers=_is_bundled(problem)),
        "finish": answer.finish_reason,
        "tokens": len(tokens),
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "text": answer.text,
    }


def _rates(outputs: Sequence[Any], seconds: float) -> Rates:
    """Of one batch."""
    rates = Rates(seconds=seconds)
    for output in outputs:
        tokens = len(output.outputs[0].token_ids)
        rates.requests += 1
        rates.tokens += tokens
        rates.request_tokens += max(0, tokens - 1)
        rates.request_seconds += output.metrics.last_token_ts - output.metrics.first_token_ts
    return rates


@contextmanager
def start_engine(setup: Setup, name: str) -> Iterator[LLM]:
    """An engine, which is shut down at the end."""
    on_cpu = is_cpu_build()
    prepare_environment(on_cpu, small=on_cpu and _is_small(setup.model))
    from vllm import LLM

    print(f"starting {name} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    settings = {
        "enforce_eager": on_cpu,  # compiling takes a CPU longer than it saves
        "use_tqdm_on_load": False,
        "disable_log_stats": False,  # or outputs come without their times
        **setup.engine,
    }
    if setup.uno is not None:
        settings["speculative_config"] = setup.uno
    llm = LLM(setup.model, max_num_seqs=setup.concurrency, **settings)
    print(f"{name} is ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def _is_small(model: str) -> bool:
    return 0 < sum(f.stat().st_size for f in Path(model).glob("*.safetensors")) < _SMALL_BYTES


def _settings(setup: Setup, job: Job) -> dict[str, Any]:
    """All that a result depends on, flat, as JSON gives it back."""
    problems = json.dumps([dataclasses.astuple(p) for p in job.problems])
    settings = {
        "layout": 2,  # of the file
        **dataclasses.asdict(setup),
        **dataclasses.asdict(job.sampling),
        "problems": hashlib.sha256(problems.encode()).hexdigest()[:16],
        "model_weights": _fingerprint(setup.model, "*.safetensors"),
    }
    if setup.uno is not None:
        adapter = setup.uno.get("uno_lora_path")
        folder, _, sub = (adapter or f"{setup.model}:adapter").partition(":")
        settings["adapter_weights"] = _fingerprint(str(Path(folder, sub)), "**/*.safetensors")
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _fingerprint(folder: str, pattern: str) -> str | None:
    """Hash of both ends of a folder's weight files (retraining moves all of them), or None."""
    digest = hashlib.sha256()
    files = sorted(Path(folder).glob(pattern)) if Path(folder).is_dir() else []
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as data:
            digest.update(f"{file.name} {size}".encode() + data.read(1 << 20))
            data.seek(max(0, size - (1 << 20)))
            digest.update(data.read())
    return digest.hexdigest()[:16] if files else None


def _read(file: Path, settings: dict[str, Any]) -> Outcome:
    """Results of earlier calls; begins the file where there are none."""
    outcome = Outcome()
    data = file.read_bytes() if file.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # a line that a break cut off
        os.truncate(file, len(whole))
    lines = whole.decode().splitlines()
    if len(lines) < 2:  # at most the settings of a call that failed before its first results
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        _append(file, {"settings": settings})
        return outcome
    before = json.loads(lines[0])["settings"]
    different = [
        f"{key}: {before.get(key)!r} there, {settings.get(key)!r} now"
        for key in sorted(before.keys() | settings.keys())
        if before.get(key) != settings.get(key)
    ]
    if different:
        raise UsageError(
            f"{file} holds results of other settings ({'; '.join(different)}). Take another --out, "
            "or remove that file to start over"
        )
    for line in lines[1:]:
        outcome.add(json.loads(line))
    return outcome


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def figures(outcome: Outcome) -> dict[str, Any]:
    """The figures of a job as JSON takes them; None where there is nothing to count.

    accuracy: share of right answers, over all samples (avg@k); accuracy_error: its standard error,
    over problems. tau: tokens per cycle; tpf: tokens per forward pass, of which a cycle has two;
    acceptance: [B], share of the cycles that accepted a draft at each position (tree mode: depth).
    tokens_per_s: of all requests at once; tokens_per_s_per_request: of one, after its first token.

    cycles, tau, tpf and acceptance leave out the last two cycles of each request (metrics.py): of
    two or fewer a request does not count at all. As the cycle in which an answer ends is a long one
    by chance, tau is too low by some 5 % where answers take 5 cycles and 1 % where they take 20
    (simulated with the bundled model's acceptance at B = 8); beyond that it is negligible.
    """
    results = list(outcome.results.values())
    by_problem: dict[str, list[bool]] = {}
    for result in results:
        by_problem.setdefault(result["id"], []).append(result["correct"])
    accuracy = sum(r["correct"] for r in results) / len(results)
    drafts, rates = outcome.drafts, outcome.rates
    tau = _number(drafts.tokens_per_cycle) if drafts is not None else None
    return {
        "requests": len(results),
        "accuracy": accuracy,
        "accuracy_error": _clustered_error(list(by_problem.values()), accuracy),
        "stopped": sum(r["finish"] == "stop" for r in results) / len(results),
        "mean_tokens": sum(r["tokens"] for r in results) / len(results),
        "tau": tau,
        "tpf": 1.0 if drafts is None else None if tau is None else tau / 2,
        "acceptance": None if drafts is None else [_number(a) for a in drafts.accepted_per_cycle],
        "cycles": None if drafts is None else drafts.cycles,
        "tokens_per_s": rates.tokens / rates.seconds if rates.seconds else None,
        "tokens_per_s_per_request": (
            rates.request_tokens / rates.request_seconds if rates.request_seconds else None
        ),
        "work": dataclasses.asdict(rates),
    }


def _clustered_error(groups: Sequence[Sequence[bool]], mean: float) -> float | None:
    """Standard error of a mean over groups that are independent of each other."""
    n = len(groups)
    if n < 2:
        return None
    # Groups differ in size only where a run was broken off.
    total = sum(len(g) for g in groups)
    deviations = sum((sum(g) - mean * len(g)) ** 2 for g in groups)
    return math.sqrt(deviations * n / (n - 1)) / total


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def show(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))
