"""benchmarks/: going on after a break, what is counted, the comparisons; with a made-up engine."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import grading
import math_eval
import quality
import runner
from runner import Job, Outcome, Problem, Sampling, Setup, UsageError, figures, run

from vllm_uno.config import mode_of, sizes_of

PROBLEMS = [Problem(f"bundled/{n}", f"What is {n}?", str(n)) for n in range(20)]
PLAIN = Setup(model="none", concurrency=1)  # 8 requests a batch
UNO = Setup(model="none", concurrency=1, uno={"method": "uno"})
SAMPLING = Sampling(max_tokens=50)


class FakeEngine:
    """Answers even numbers rightly with 11 tokens in a second; drafts 2 cycles a request.

    `breaks_at`: the number at which the user presses Control-C. `wrong`: a further one that it
    answers wrongly. `nodes`: verified a cycle at the second position.
    """

    def __init__(
        self, breaks_at: int | None = None, wrong: int | None = None, nodes: int = 1
    ) -> None:
        self.asked: list[str] = []
        self.breaks_at, self.wrong, self.nodes = breaks_at, wrong, nodes
        self.cycles = 0

    def chat(self, chats: Sequence[Any], params: Sequence[Any], **_: Any) -> list[Any]:
        if params[0].max_tokens < SAMPLING.max_tokens:
            self.cycles += 1000  # the warm-up: counts nowhere
            return []
        outputs = []
        for chat in chats:
            number = int(chat[0]["content"].removeprefix("What is ").removesuffix("?"))
            if number == self.breaks_at:
                raise KeyboardInterrupt
            self.asked.append(f"bundled/{number}")
            right = number % 2 == 0 and number != self.wrong
            answer = SimpleNamespace(
                text=f"The answer is {number if right else -1}.",
                token_ids=[*range(10), number if right else -1],
                finish_reason="stop",
            )
            times = SimpleNamespace(first_token_ts=1.0, last_token_ts=2.0)
            outputs.append(SimpleNamespace(outputs=[answer], metrics=times))
            self.cycles += 2
        return outputs

    def reset_prefix_cache(self) -> None:
        pass

    def collective_rpc(self, _: Any, args: tuple[bool]) -> list[dict[str, Any]]:
        cycles, self.cycles = self.cycles, 0
        assert args == (True,)
        return [
            {
                "cycles": cycles,
                "emitted": 5 * cycles,
                "proposed": [cycles, self.nodes * cycles],
                "accepted": [cycles, cycles // 2],
            }
        ]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """start(engine): the engine that runs when those before it have; more are an error."""
    waiting: list[FakeEngine] = []

    @contextmanager
    def start_engine(setup: Setup, name: str) -> Iterator[FakeEngine]:
        yield waiting.pop(0)

    monkeypatch.setattr(runner, "start_engine", start_engine)

    def start(engine: FakeEngine) -> FakeEngine:
        waiting.append(engine)
        return engine

    return start


def test_goes_on_after_a_break(start: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "uno.jsonl", PROBLEMS, SAMPLING)
    first = start(FakeEngine(breaks_at=12))
    with pytest.raises(KeyboardInterrupt):
        run(UNO, [job], "uno")
    with job.file.open("a") as out:
        out.write('{"results": [{"id": "bundled/8"')  # cut off while writing
    second = start(FakeEngine())
    (outcome,) = run(UNO, [job], "uno")
    # Eight of the first engine's are kept, its counters with them.
    assert first.asked[:8] + second.asked == [p.id for p in PROBLEMS]
    found = figures(outcome)
    assert found["requests"] == 20
    assert found["accuracy"] == 0.5
    assert found["cycles"] == 40
    assert (found["tau"], found["tpf"], found["acceptance"]) == (5.0, 2.5, [1.0, 0.5])
    # Speeds: of the eight and the twelve.
    assert (found["work"]["requests"], found["work"]["tokens"]) == (20, 20 * 11)
    assert found["tokens_per_s_per_request"] == 10
    seconds = [
        json.loads(line)["rates"]["seconds"] for line in job.file.read_text().split("\n")[1:-1]
    ]
    assert len(seconds) == 3 and min(seconds) > 0
    assert found["tokens_per_s"] == pytest.approx(20 * 11 / sum(seconds))

    (again,) = run(UNO, [job], "uno")  # starts no engine
    assert again.results == outcome.results
    assert figures(again) == found


def test_a_start_that_failed_leaves_no_settings(start: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "uno.jsonl", PROBLEMS, SAMPLING)
    mistyped = Setup(model="none", concurrency=1, uno={"method": "uno", "uno_lora_path": "adaptr"})
    with pytest.raises(IndexError):
        run(mistyped, [job], "uno")  # no engine
    start(FakeEngine())
    runner.check(UNO, job)
    run(UNO, [job], "uno")
    with pytest.raises(UsageError, match=r"uno: \{'method': 'uno'\} there"):
        runner.check(mistyped, job)


def test_other_settings_are_refused_by_name(start: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "plain.jsonl", PROBLEMS, SAMPLING)
    start(FakeEngine())
    run(PLAIN, [job], "plain")
    other = Setup(model="none", concurrency=2)
    with pytest.raises(UsageError, match=r"concurrency: 1 there, 2 now\).*another --out"):
        run(other, [job], "plain")
    with pytest.raises(UsageError, match=r"problems: '[0-9a-f]+' there"):
        run(PLAIN, [Job(job.file, PROBLEMS[:5], SAMPLING)], "plain")


def test_retrained_weights_are_other_settings(start: Any, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"a" * 100)
    setup = Setup(model=str(tmp_path / "model"), concurrency=1, uno={"method": "uno"})
    job = Job(tmp_path / "uno.jsonl", PROBLEMS[:1], SAMPLING)
    start(FakeEngine())
    run(setup, [job], "uno")
    weights.write_bytes(b"b" * 100)
    with pytest.raises(UsageError, match="adapter_weights"):
        run(setup, [job], "uno")


def test_samples_have_seeds_of_their_own(start: Any, tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=50, temperature=1.0, samples=3)
    job = Job(tmp_path / "plain.jsonl", PROBLEMS, sampling)
    engine = start(FakeEngine())
    (outcome,) = run(PLAIN, [job], "plain")
    assert engine.asked == 3 * [p.id for p in PROBLEMS]
    assert figures(outcome)["requests"] == 60
    # The samples of a problem agree here: three of one are worth no more than one.
    alone = start(FakeEngine())
    (once,) = run(PLAIN, [Job(tmp_path / "once.jsonl", PROBLEMS, SAMPLING)], "plain")
    assert len(alone.asked) == 20
    error = figures(once)["accuracy_error"]
    assert figures(outcome)["accuracy_error"] == pytest.approx(error)
    assert error == pytest.approx((0.25 / 19) ** 0.5)
    seeds = {runner._request_seed(s, p.id, k) for s in (0, 1) for p in PROBLEMS for k in range(3)}
    assert len(seeds) == 2 * 20 * 3


def test_bundled_problems_are_asked_as_they_are() -> None:
    assert runner.prompt(PROBLEMS[1]) == "What is 1?"
    assert "\\boxed{}" in runner.prompt(Problem("gsm8k/1", "What is 1?", "1"))


def test_math_verify_is_missed_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    grading._symbolic.stop()
    monkeypatch.setattr(grading, "__file__", str(tmp_path / "none.py"))
    job = Job(tmp_path / "plain.jsonl", [Problem("math500/0", "?", "\\frac12")], SAMPLING)
    with pytest.raises(UsageError, match=r"pip install math-verify.*\.\[eval\]"):
        run(PLAIN, [job], "plain")
    # The bundled problems do without it, whatever is answered.
    start(FakeEngine())
    monkeypatch.setattr(runner, "_generate", lambda *_: [said("The answer is a few.")])
    (outcome,) = run(PLAIN, [Job(tmp_path / "bundled.jsonl", PROBLEMS[:1], SAMPLING)], "plain")
    assert figures(outcome)["accuracy"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1, "problem": "?"}\n', "line 1.*'answer'.*prepare"),
        ("\nnothing\n", "line 2"),
        ("[]\n", "line 1"),
        ("", "no problems"),
        (2 * '{"id": 1, "problem": "?", "answer": 2}\n', "same id"),
    ],
)
def test_bad_problem_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        runner.read_problems(file)


def test_prepare_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "problems.jsonl"
    assert math_eval.main(["prepare", "--set", "bundled", "--count", "3", "--out", str(file)]) == 0
    problems = runner.read_problems(file)
    assert [p.id for p in problems] == ["bundled/0", "bundled/1", "bundled/2"]
    assert all(int(p.answer) >= 0 for p in problems)

    common = ["run", "--model", "none", "--out", str(tmp_path), "--problems"]
    assert math_eval.main([*common, str(tmp_path / "none.jsonl")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert math_eval.main([*common, str(file), "--samples-per-problem", "2"]) == 2
    assert "--temperature" in capsys.readouterr().err

    datasets = pytest.importorskip("datasets", reason='needs pip install ".[eval]"')

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert math_eval.main(["prepare", "--set", "gsm8k", "--out", str(file)]) == 2
    error = capsys.readouterr().err
    assert "openai/gsm8k (configuration main, split test" in error and "no hub" in error

    rows = [{"question": "Six times seven?", "answer": "6 * 7 = 42\n#### 42"}] * 2
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert math_eval.prepare("gsm8k", 1) == [Problem("gsm8k/0", "Six times seven?", "42")]


@pytest.mark.parametrize(
    ("options", "config", "sizes"),
    [
        ([], {}, (8, 1, 8)),
        (["--block-size", "4"], {"num_speculative_tokens": 4}, (4, 1, 4)),
        (
            ["--uno", '{"uno_draft_quantization": "fp8"}'],
            {"uno_draft_quantization": "fp8"},
            (8, 1, 8),
        ),
        (["--nodes", "24"], {"uno_mode": "tree", "num_speculative_tokens": 24}, (16, 32, 24)),
        (["--tree-top-k", "1"], {"uno_mode": "tree", "uno_tree_top_k": 1}, (16, 1, 32)),
        (
            ["--tree-top-k", "4", "--nodes", "6", "--block-size", "2"],
            {
                "uno_mode": "tree",
                "uno_block_size": 2,
                "uno_tree_top_k": 4,
                "num_speculative_tokens": 6,
            },
            (2, 4, 6),
        ),
    ],
)
def test_sizes_of_drafts(
    options: list[str],
    config: dict[str, Any],
    sizes: tuple[int, int, int],
    tmp_path: Path,
    start: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is asked for, what UNO makes of it (B, K, V), and what the report says."""
    runner.write_problems(tmp_path / "problems.jsonl", PROBLEMS)
    command = ["run", "--model", "none", "--problems", str(tmp_path / "problems.jsonl")]
    command += ["--out", str(tmp_path / "out"), "--concurrency", "1", "--no-plain", *options]
    tree = config.get("uno_mode") == "tree"
    start(FakeEngine(nodes=3 if tree else 1))
    assert math_eval.main(command) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())["uno"]
    assert report["speculative_config"] == {"method": "uno", **config}
    assert (mode_of(report["speculative_config"]) == "tree") == tree
    assert sizes_of(report["speculative_config"]) == sizes
    # Of the cycles, not of the nodes.
    assert report["acceptance"] == [1.0, 0.5]
    where = "depth of the tree" if tree else "position"
    assert f"accepted a draft, by {where}: 1.000 0.500" in capsys.readouterr().out


def said(text: str) -> Any:
    answer = SimpleNamespace(text=text, token_ids=[1, 2], finish_reason="stop")
    times = SimpleNamespace(first_token_ts=1.0, last_token_ts=2.0)
    return SimpleNamespace(outputs=[answer], metrics=times)


def outcome(correct: Sequence[bool], digests: Sequence[str]) -> Outcome:
    pairs = enumerate(zip(correct, digests, strict=True))
    return Outcome({(str(n), 0): {"correct": c, "digest": d} for n, (c, d) in pairs})


def test_comparisons() -> None:
    one = outcome([True, True, False, False], ["a", "b", "c", "d"])
    two = outcome([True, False, True, True], ["a", "b", "c", "e"])
    assert quality.identical(one, two) == 0.75
    found = quality.paired(one, two)
    assert (found["difference"], found["lost"], found["won"]) == (0.25, 1, 2)
    low, high = found["difference_95"]
    assert low < 0 < 0.25 < high


def test_mcnemar_and_interval() -> None:
    assert quality.mcnemar(0, 0) == 1.0
    assert quality.mcnemar(0, 6) == pytest.approx(2 / 64)
    assert quality.mcnemar(6, 0) == quality.mcnemar(0, 6)
    assert quality.mcnemar(3, 3) == 1.0
    low, high = quality.difference_interval(0, 0, 100)
    assert low == -high and 0 < high < 0.03  # it has a width where nothing changed
    low, high = quality.difference_interval(10, 30, 1000)
    assert 0 < low < 0.02 < high


def test_the_seeds_of_quality_differ(tmp_path: Path) -> None:
    args = quality.parse_args(["--out", str(tmp_path), "--model", "m", "--block-sizes", "2,4"])
    setups = quality.engines(args)
    assert list(setups) == ["plain", "plain again", "UNO B=2", "UNO B=4"]
    seeds = [quality.jobs(args, name, PROBLEMS)[1].sampling.seed for name in setups]
    assert seeds == [0, 1, 2, 2]
    files = {job.file for name in setups for job in quality.jobs(args, name, PROBLEMS)}
    assert len(files) == 8


def test_quality_of_three_engines(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain, plain again and one that answers one problem of twenty wrongly."""
    runner.write_problems(tmp_path / "problems.jsonl", PROBLEMS)
    command = ["--out", str(tmp_path / "q"), "--model", "none", "--concurrency", "1"]
    args = quality.parse_args([*command, "--problems", str(tmp_path / "problems.jsonl")])
    engines = [start(FakeEngine()), start(FakeEngine()), start(FakeEngine(wrong=4))]
    report = quality.measure(args)
    # Greedily and at temperature 1.
    assert all(engine.asked == 2 * [p.id for p in PROBLEMS] for engine in engines)
    assert list(report) == ["plain", "plain again", "UNO B=8"]
    json.dumps(report, allow_nan=False)
    for mode in quality.MODES:
        again, uno = report["plain again"][mode], report["UNO B=8"][mode]
        assert report["plain"][mode]["accuracy"] == again["accuracy"] == 0.5
        assert (again["lost"], again["won"], again["mcnemar_p"]) == (0, 0, 1.0)
        assert (uno["accuracy"], uno["lost"], uno["won"]) == (0.45, 1, 0)
        assert uno["difference"] == pytest.approx(-0.05)
        assert (report["plain"][mode]["tau"], uno["tau"], uno["acceptance"]) == (None, 5, [1, 0.5])
    assert report["plain again"]["greedy"]["identical"] == 1.0
    assert report["UNO B=8"]["greedy"]["identical"] == 0.95

    capsys.readouterr()
    quality.print_report(report)
    printed = capsys.readouterr().out
    greedy, sampled = printed.split("sampled (temperature 1)")
    for part, identical in ((greedy, "0.9500"), (sampled, "-")):
        (row,) = (line.split() for line in part.splitlines() if line.startswith("UNO B=8"))
        assert row[2:4] == ["0.4500", "-0.0500"]
        assert row[-4:] == ["1.000", identical, "5.000", "2.500"]
        assert "acceptance by position, UNO B=8: 1.000 0.500" in part


def test_matplotlib_is_missed_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(quality, "measure", lambda _: pytest.fail("an engine starts"))
    assert quality.main(["--out", str(tmp_path)]) == 2
    assert 'pip install ".[eval]"' in capsys.readouterr().err


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install ".[eval]"')
    plain = {"accuracy": 0.5, "accuracy_error": 0.1, "acceptance": None, "tau": None}
    uno = {"accuracy": 0.5, "accuracy_error": None, "acceptance": [1.0, None], "tau": 2.0}
    report = {
        "plain": dict.fromkeys(quality.MODES, plain),
        "UNO": dict.fromkeys(quality.MODES, uno),
    }
    json.dumps(report, allow_nan=False)
    quality.plot(report, tmp_path / "q.png")
    assert (tmp_path / "q.png").stat().st_size > 1000


def test_lm_eval_problems(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason='needs pip install ".[eval]"')
    import importlib.util

    file = Path(runner.__file__).parent / "lm_eval_tasks" / "uno_bundled" / "utils.py"
    spec = importlib.util.spec_from_file_location("uno_bundled_utils", file)
    assert spec is not None and spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    line = {"messages": [{"role": "user", "content": "Q?"}], "answer": "42"}
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    loaded = utils.load_problems(problems=str(tmp_path / "p.jsonl"), pretrained="m", version=1.0)
    assert loaded["test"].to_list() == [{"question": "Q?", "answer": "42"}]
    with pytest.raises(ValueError, match="--metadata"):
        utils.load_problems(version=1.0)


def test_start_up_parts_are_read_from_vllms_log() -> None:
    import startup

    log = """
INFO [model_runner.py:424] Model loading took 15.2 GiB memory and 7.50 seconds
INFO [backends.py:1166] [backbone] Dynamo bytecode transform time: 8.25 s
INFO [backends.py:398] [backbone] Compiling a graph for compile range (1, 8192) takes 20.00 s
INFO [monitor.py:62] [backbone] torch.compile took 31.00 s in total
INFO [backends.py:1166] [uno_draft_13d02ce0] Dynamo bytecode transform time: 9.00 s
INFO [monitor.py:62] [uno_draft_13d02ce0] torch.compile took 25.50 s in total
INFO [gpu_worker.py:480] Available KV cache memory: 104.26 GiB
INFO [model_runner.py:1126] Graph capturing finished in 12 secs, took 1.00 GiB
INFO [gpu_worker.py:660] CUDA graph pool memory: 4.34 GiB (actual), 6.36 GiB (estimated), \
difference: 2.02 GiB (46.5%).
INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 80.10 s (compilation)
"""
    assert startup.read_log(log) == {
        "load": 7.5,
        "dynamo": 8.25,
        "dynamo of uno_draft": 9.0,
        "inductor": 20.0,
        "compile": 31.0,
        "compile of uno_draft": 25.5,
        "capture": 12.0,
        "engine": 80.1,
        "graphs GiB": 4.34,
        "foreseen GiB": 6.36,
        "KV cache GiB": 104.26,
    }


@pytest.mark.parametrize(
    ("setting", "config"),
    [
        ("8", {"num_speculative_tokens": 8}),
        (
            "4+fp8+512",
            {
                "num_speculative_tokens": 4,
                "uno_draft_quantization": "fp8",
                "uno_draft_context": 512,
            },
        ),
        ("16/4/32+fp8", runner.uno_config(None, 16, 4, 32) | {"uno_draft_quantization": "fp8"}),
    ],
)
def test_settings_of_the_cycle_benchmark(setting: str, config: dict[str, Any]) -> None:
    from cycle_cost import uno_settings

    assert uno_settings(setting) == {"method": "uno", **config}


def kernel(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_steps_before_the_host_is_ahead_do_not_count() -> None:
    from cycle_cost import STEP_MARK, last_steps

    kernels = []
    for step in range(5):
        kernels += [kernel(f"forward {step}", 100.0 * step, 100.0 * step + 60)]
        kernels += [kernel(f"void {STEP_MARK}<int>", 100.0 * step + 70, 100.0 * step + 80)]
    found = [k.name for k in last_steps(kernels[::-1], 2)][::-1]
    assert [name for name in found if "forward" in name] == ["forward 3", "forward 4"]
    assert len(found) == 4
    with pytest.raises(ValueError, match="has 5 of"):
        last_steps(kernels, 5)


def test_where_no_kernel_runs() -> None:
    """Gaps are between what has ended by then and what begins next, on whichever stream."""
    from cycle_cost import gaps_by_place, idle_share

    kernels = [
        kernel("c", 300.0, 400.0),
        kernel("a", 0.0, 200.0),
        kernel("beside", 50.0, 100.0),  # ends within a: no gap behind it
        kernel("a", 420.0, 500.0),
        kernel("c", 700.0, 800.0),
    ]
    found = gaps_by_place(kernels, steps=2)
    assert list(found) == ["a > c", "c > a"]
    assert found["a > c"] == pytest.approx([0.15, 1.0])
    assert found["c > a"] == pytest.approx([0.01, 0.5])
    assert idle_share([(k.time_range.start, k.time_range.end) for k in kernels]) == 0.4
