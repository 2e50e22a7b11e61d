"""The GPU session's runs of tree mode, a few requests on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare import compare, same_seeded

SCRIPT = Path(__file__).parents[1] / "run_engine.py"


def run(work: Path, name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--work", str(work), "--name", name, *arguments]
    command += ["--dtype", "float32", "--kv-block-size", "32", "--max-num-seqs", "4", "--eager"]
    command += ["--prompts", "3", "--tokens", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return result


@pytest.mark.slow
def test_trees_that_hold_plains_text(tmp_path: Path) -> None:
    run(tmp_path, "plain", "--method", "plain", "--seeded")
    tree = run(tmp_path, "tree", "--tree", "8/8/16", "--seeded", "--texts", "plain")
    files = tmp_path / "plain.json", tmp_path / "tree.json"
    assert compare(*files).equal == 3
    assert same_seeded(*files) == {"temperature": 3, "top_k-top_p": 3, "chains": 3}
    assert min(tree["tau"].values()) > 2.5


@pytest.mark.slow
def test_as_many_requests_as_the_engine_takes(tmp_path: Path) -> None:
    run(tmp_path, "memory", "--tree", "16/32/32", "--memory", "--vocab", "4096")
