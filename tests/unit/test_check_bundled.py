"""tests/gpu/check_bundled.py and bundled.sh: what misses a requirement fails; made-up results."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu import check_bundled


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def row(block: int, temperature: float, tau: float) -> dict[str, Any]:
    """Of an acceptance.json: all positions alike."""
    acceptance = [(tau - 1) / block] * block
    return {"block_size": block, "temperature": temperature, "tau": tau, "acceptance": acceptance}


def engine(block: int, tau: float, p: float) -> dict[str, Any]:
    return {"tau": tau, "acceptance": [(tau - 1) / block] * block, "mcnemar_p": p}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Results that pass."""
    write(tmp_path / "retrained/acceptance.json", [row(8, 1.0, 6.1), row(16, 1.0, 6.7)])
    write(tmp_path / "shipped/acceptance.json", [row(8, 1.0, 6.2), row(16, 1.0, 6.8)])
    log = [{"step": 20, "loss": 0.5, "seconds": 3.0}, {"seconds": 70.0, "tau": 6.7}, {"done": 1}]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    write(tmp_path / "fixed/result.json", {"tau": 8.9, "seconds": 250.0})
    accuracy = {"plain": {"accuracy": 1.0}, "uno": {"accuracy": 0.99}}
    write(tmp_path / "math-0/report.json", accuracy)
    write(tmp_path / "math-1/report.json", {"plain": {}, "uno": {"tau": 6.1}})
    write(tmp_path / "bound.json", {"8": {"tau": 6.0, "low": 5.9, "high": 6.1}})
    report = {
        "plain": {"greedy": {"accuracy": 1.0}, "sampled": {"accuracy": 1.0}},
        "plain again": {"greedy": {"mcnemar_p": 1.0}, "sampled": {"mcnemar_p": 0.5}},
        "UNO B=8": {"greedy": engine(8, 8.0, 1.0), "sampled": engine(8, 6.1, 0.2)},
        "UNO B=16": {"greedy": engine(16, 11.0, 1.0), "sampled": engine(16, 6.9, 0.1)},
    }
    write(tmp_path / "quality/quality.json", report)
    rows = [row(8, 0.0, 8.05), row(8, 1.0, 6.15), row(16, 0.0, 11.1), row(16, 1.0, 6.8)]
    write(tmp_path / "offline/acceptance.json", rows)
    write(tmp_path / "oracle/oracle.json", {"oracle_error": 2e-6, "oracle_row0": 1e-6})
    return tmp_path


def test_good_results_pass(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_bundled.main([str(work), "--all"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == len(check_bundled.CHECKS)
    assert all(line.startswith("ok ") for line in table)


def set_tau(value: Any, block: int = 8, temperature: float = 1.0) -> Callable[[Any], None]:
    """Of one row of an acceptance.json."""

    def change(rows: Any) -> None:
        (at,) = (
            n
            for n, r in enumerate(rows)
            if (r["block_size"], r["temperature"]) == (block, temperature)
        )
        rows[at] = row(block, temperature, value)

    return change


def put(*keys_and_value: Any) -> Callable[[Any], None]:
    *keys, last, value = keys_and_value

    def change(found: Any) -> None:
        for key in keys:
            found = found[key]
        found[last] = value

    return change


@pytest.mark.parametrize(
    ("file", "change", "requirement"),
    [
        ("retrained/acceptance.json", set_tau(5.99), "retrained adapter: tau at B=8"),
        ("retrained/acceptance.json", set_tau(7.01, 16), "retrained adapter: tau at B=16"),
        ("fixed/result.json", put("tau", 8.79), "fixed wording"),
        ("fixed/result.json", put("seconds", 301.0), "fixed wording"),
        ("math-0/report.json", put("uno", "accuracy", 0.949), "accuracy"),
        ("math-0/report.json", put("plain", "accuracy", 0.949), "accuracy"),
        ("math-1/report.json", put("uno", "tau", 6.51), "tau at B=8, T=1: 4"),
        ("math-1/report.json", put("uno", "tau", None), "tau at B=8, T=1: 4"),
        ("bound.json", put("8", "tau", 6.8), "tau at B=8, T=1: at least 90 %"),
        ("quality/quality.json", put("UNO B=16", "sampled", "tau", 6.1), "tau at B=16"),
        ("quality/quality.json", put("UNO B=8", "greedy", "mcnemar_p", 0.002), "UNO's accuracy"),
        ("offline/acceptance.json", set_tau(8.3, 8, 0.0), "offline acceptance .* B=8, greedy"),
        ("offline/acceptance.json", set_tau(5.9, 8, 1.0), "offline acceptance .* B=8, sampled"),
        ("offline/acceptance.json", set_tau(11.4, 16, 0.0), "offline acceptance .* B=16, greedy"),
        ("offline/acceptance.json", set_tau(7.2, 16, 1.0), "offline acceptance .* B=16, sampled"),
        ("oracle/oracle.json", put("oracle_row0", 0.01), "draft logits"),
    ],
)
def test_a_missed_requirement_fails(
    work: Path, file: str, change: Callable[[Any], None], requirement: str
) -> None:
    found = json.loads((work / file).read_text())
    change(found)
    write(work / file, found)
    lines = check_bundled.check(work)
    assert any(line.passed is False and re.match(requirement, line.requirement) for line in lines)
    assert check_bundled.main([str(work)]) == 1


def test_slow_training_fails(work: Path) -> None:
    (work / "adapter/log.jsonl").write_text('{"seconds": 601.0}\n')
    failed = [line.requirement for line in check_bundled.check(work) if line.passed is False]
    assert failed == ["retraining takes at most 10 minutes"]


def test_no_worse_than_the_second_plain_run_is_within_the_floor(work: Path) -> None:
    found = json.loads((work / "quality/quality.json").read_text())
    found["UNO B=8"]["greedy"]["mcnemar_p"] = found["plain again"]["greedy"]["mcnemar_p"] = 0.002
    write(work / "quality/quality.json", found)
    assert check_bundled.main([str(work)]) == 0


def test_what_was_not_run_fails_only_where_all_is_asked_for(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(work / "fixed")
    assert check_bundled.main([str(work)]) == 0
    assert "no fixed/result.json" in capsys.readouterr().out
    assert check_bundled.main([str(work), "--all"]) == 1


@pytest.mark.parametrize(
    ("status", "tau", "expected"),
    [
        (0, 8.9, 0),
        (3, 8.9, 1),  # the command failed, whatever an older one has left
        (0, 8.7, 1),  # only the table has it
    ],
)
def test_bundled_sh_tells_of_failures(
    status: int, tau: float, expected: int, tmp_path: Path
) -> None:
    """With a python3 that runs nothing but the check."""
    work, folder = tmp_path / "work", tmp_path / "bin"
    write(work / "fixed/result.json", {"tau": tau, "seconds": 200.0})
    folder.mkdir()
    stub = folder / "python3"
    check = f'case $1 in *check_bundled.py) exec {sys.executable} "$@";; esac'
    stub.write_text(f"#!/bin/sh\n{check}\nexit {status}\n")
    stub.chmod(0o755)
    script = Path(check_bundled.__file__).with_name("bundled.sh")
    done = subprocess.run(
        ["bash", str(script), "fixed", str(work)],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    assert f"== fixed: exit {status}" in done.stdout
