"""The bundled model in the engine: math_eval.py end to end, tau against offline, lm-eval."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import math_eval
import runner
from runner import Job, Outcome, Sampling, Setup, figures

from vllm_uno.bundled import bundled_model, problems

COUNT, TOKENS, BLOCK = 20, 256, 8
ASKED = 32  # by the slow tests
BY_LM_EVAL = 10  # of these
ROOT = Path(__file__).parents[2]
# In 16 bit greedy outputs may part.
ENGINE = {"dtype": "float32", "max_model_len": 512}


def test_math_eval(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "problems.jsonl"
    command = ["prepare", "--set", "bundled", "--count", str(COUNT), "--out", str(file)]
    assert math_eval.main(command) == 0
    command = [
        "run",
        "--model",
        str(bundled_model()),
        "--problems",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--max-tokens", str(TOKENS), "--block-size", str(BLOCK), "--concurrency", "8"]
    command += ["--engine", json.dumps(ENGINE)]
    capsys.readouterr()
    assert math_eval.main(command) == 0
    table = capsys.readouterr().out
    assert "tau, tokens per cycle" in table and "UNO / plain, tok/s: " in table

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plain, uno = report["plain"], report["uno"]
    for found in (plain, uno):
        assert found["requests"] == found["work"]["requests"] == COUNT
        assert found["mean_tokens"] <= TOKENS
        assert found["tokens_per_s"] > 0 and found["tokens_per_s_per_request"] > 0
    assert results(tmp_path / "out" / "plain.jsonl") == results(tmp_path / "out" / "uno.jsonl")
    assert plain["accuracy"] == uno["accuracy"] >= 0.95
    assert plain["tau"] is None and plain["tpf"] == 1
    # The first drafted token is the model's own.
    assert uno["acceptance"][0] == 1.0 and len(uno["acceptance"]) == BLOCK
    assert 6.5 < uno["tau"] < 9
    assert uno["tpf"] == uno["tau"] / 2

    def no_engine(*_: Any) -> None:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(runner, "start_engine", no_engine)
    assert math_eval.main(command) == 0
    again = capsys.readouterr().out
    assert again.count("\n") > 10 and table.endswith(again)  # vLLM may have printed before it
    assert math_eval.main([*command, "--block-size", "2"]) == 2
    error = capsys.readouterr().err
    assert f"'num_speculative_tokens': {BLOCK}" in error and "another --out" in error


def results(file: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {result["id"]: result for line in lines[1:] for result in line["results"]}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """The bundled problems, greedily and at temperature 1, in one engine with UNO."""
    folder = tmp_path_factory.mktemp("asked")
    setup = Setup(str(bundled_model()), 8, runner.uno_config(None, BLOCK), engine=ENGINE)
    questions = runner.bundled_problems(ASKED)
    jobs = [
        Job(folder / f"{temperature}.jsonl", questions, Sampling(TOKENS, temperature))
        for temperature in (0.0, 1.0)
    ]
    greedy, sampled = runner.run(setup, jobs, "uno")
    return greedy, sampled


@pytest.mark.slow
def test_tau_is_that_of_real_adapters_and_the_offline_one(
    asked: tuple[Outcome, Outcome], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason='needs pip install ".[train]"')
    from vllm_uno.train.evaluate import EvalSettings, evaluate

    greedy, sampled = (figures(outcome) for outcome in asked)
    assert greedy["accuracy"] >= 0.95
    assert 4 <= sampled["tau"] <= 6.5

    problems.write_records(tmp_path / "test.jsonl", "test", ASKED)
    settings = EvalSettings(
        model=str(bundled_model()),
        data=str(tmp_path / "test.jsonl"),
        block_sizes=[BLOCK],
        temperatures=[0.0, 1.0],
        samples=ASKED,
        max_new_tokens=TOKENS,
        batch_size=8,
        dtype="float32",
    )
    offline = {row["temperature"]: row["tau"] for row in evaluate(settings)}
    # Along the same answers, with other noise.
    assert offline[0.0] == pytest.approx(greedy["tau"], rel=0.03)
    # Along other answers: some 480 cycles each, whose tokens scatter by 2.8, so that the difference
    # of two taus has a standard error of 3 to 4 %.
    assert offline[1.0] == pytest.approx(sampled["tau"], rel=0.12)


@pytest.mark.slow
def test_lm_eval_finds_the_accuracy_that_we_find(
    asked: tuple[Outcome, Outcome], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason='needs pip install ".[eval]"')
    # The engine of a server lives in a process of its own.
    left_out = ("VLLM_ENABLE_V1_MULTIPROCESSING",)
    command = [str(ROOT / "benchmarks" / "lm_eval_run.py"), "--out", str(tmp_path)]
    command += ["--count", str(BY_LM_EVAL), "--max-tokens", str(TOKENS)]
    done = subprocess.run(
        [sys.executable, *command, "--block-size", str(BLOCK)],
        env={k: v for k, v in os.environ.items() if k not in left_out},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads((tmp_path / "lm_eval.json").read_text())
    greedy = asked[0].results
    ours = sum(greedy[f"{runner.BUNDLED}{n}", 0]["correct"] for n in range(BY_LM_EVAL)) / BY_LM_EVAL
    for name in ("plain", "uno"):
        assert found[name]["sample_len"] == BY_LM_EVAL
        assert found[name]["exact_match,stated"] == ours
    drafts, accepted = re.findall(r"UNO drafted (\d+) times, (\d+) of", done.stdout)[0]
    assert int(accepted) > 4 * int(drafts) > 0
