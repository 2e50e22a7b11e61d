"""The verdicts of the GPU session, on results made up here: each must be able to turn bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.serving_report import CHECKS, KINDS, verdict

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
GAPS = [[1.0, 0.01, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
SLEEP = {"tokens": TOKENS, "tau": 5.0, "adapter": {"layer.uno_a": 2.0}}


def write(work: Path, name: str, **more: Any) -> None:
    stats = {"accepted": [100, 3], "proposed": [100, 100]}
    result = {"tokens": TOKENS, "gaps": GAPS, "stats": stats, **more}
    (work / f"{name}.json").write_text(json.dumps(result))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A session in which all is well."""
    for method in ("plain", "ngram", "uno"):
        for kind in (*KINDS, "users"):
            write(tmp_path, f"{kind}-{method}")
    wrappers = {"target": ["A", "B", "LogitsProcessorWithLoRA"], "view": []}
    write(tmp_path, "users-uno", wrappers=wrappers, users_agree=[128, 0, 1])
    write(tmp_path, "users-plain2")
    for name in ("plain", "plain2", "uno"):
        write(tmp_path, f"users-invariant-{name}")
    phases = {"before": SLEEP, "level 1": SLEEP, "level 2": SLEEP}
    for name in ("sleep", "sleep-vocab", "sleep-fp8"):
        write(tmp_path, name, sleep=phases)
    (tmp_path / "kv8-tree.log").write_text("kv_cache_dtype=fp8 with uno_mode 'tree': ...")
    for mode in ("linear", "tree"):
        (tmp_path / f"soak-{mode}.out").write_text("soak: 30000 of 30000 requests ...: good")
    return tmp_path


@pytest.mark.parametrize("check", CHECKS)
def test_good(work: Path, check: str) -> None:
    assert verdict(work, check)[0] is True


def test_near_ties_and_the_floor(work: Path) -> None:
    near, far = [[1, 9, 3, 4], TOKENS[1]], [[1, 2, 9, 4], TOKENS[1]]
    write(work, "awq-uno", tokens=near)
    assert verdict(work, "greedy-awq")[0] is True
    write(work, "awq-uno", tokens=far)
    assert verdict(work, "greedy-awq")[0] is False
    write(work, "awq-ngram", tokens=far)
    assert verdict(work, "greedy-awq")[0] is True
    # As many as stock's, but where plain was surer.
    surer = [[9, 2, 3, 4], TOKENS[1]]
    write(work, "awq-plain", gaps=[[3.0, *GAPS[0][1:]], GAPS[1]])
    write(work, "awq-uno", tokens=surer)
    assert verdict(work, "greedy-awq")[0] is False
    write(work, "users-invariant-uno", tokens=near)
    assert verdict(work, "users-exact")[0] is False


def test_bad(work: Path) -> None:
    write(work, "fp8-uno", stats={"accepted": [90], "proposed": [100]})
    assert verdict(work, "greedy-fp8")[0] is False
    wrappers = {"target": ["A", "B", "LogitsProcessorWithLoRA"], "view": ["A"]}
    write(work, "users-uno", wrappers=wrappers, users_agree=[128, 0, 1])
    assert verdict(work, "users-wrappers")[0] is False
    for fault in ({"tau": 4.0}, {"adapter": {"layer.uno_a": 1.0}}, {"tokens": [[0], [0]]}):
        phases = {"before": SLEEP, "level 1": SLEEP, "level 2": {**SLEEP, **fault}}
        write(work, "sleep", sleep=phases)
        assert verdict(work, "sleep")[0] is False
    write(work, "kv8-tree")
    assert verdict(work, "kv8-tree")[0] is False
    (work / "soak-tree.out").write_text("soak: 29999 of 30000 requests ...: BAD")
    assert verdict(work, "soak-tree")[0] is False
    for missing, check in (("soak-tree.out", "soak-tree"), ("users-uno.json", "users-default")):
        (work / missing).unlink()
        assert verdict(work, check)[0] is False
    (work / "gptq-plain.json").unlink()
    assert verdict(work, "greedy-gptq")[0] is None
