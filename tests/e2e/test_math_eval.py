"""benchmarks/math_eval.py end to end on the bundled model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import math_eval
import runner

from vllm_uno.bundled import bundled_model

COUNT, TOKENS, BLOCK = 20, 256, 8


def test_math_eval(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = tmp_path / "problems.jsonl"
    command = ["prepare", "--set", "bundled", "--count", str(COUNT), "--out", str(problems)]
    assert math_eval.main(command) == 0
    command = [
        "run",
        "--model",
        str(bundled_model()),
        "--problems",
        str(problems),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--max-tokens", str(TOKENS), "--block-size", str(BLOCK), "--concurrency", "8"]
    # In 16 bit greedy outputs may part.
    command += ["--engine", '{"dtype": "float32", "max_model_len": 512}']
    capsys.readouterr()
    assert math_eval.main(command) == 0
    table = capsys.readouterr().out
    assert "tau, tokens per cycle" in table and "UNO / plain, tok/s: " in table

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plain, uno = report["plain"], report["uno"]
    for found in (plain, uno):
        assert found["requests"] == found["this_call"]["requests"] == COUNT
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
