"""The demo and the examples run as users run them: scripts with their defaults."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_uno import demo

ROOT = Path(__file__).parents[2]
SWITCHES = ("UNO_CPU_INTERPRETER", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING")


def run(*command: str) -> str:
    """Standard output of a script that must succeed, and must set the switches itself."""
    environment = {k: v for k, v in os.environ.items() if k not in SWITCHES}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_demo() -> None:
    out = run(
        "-m", "vllm_uno.demo", "--max-tokens", "8", "--block-size", "3", "--prompts", "A", "B"
    )
    assert "RANDOM (untrained)" in out
    assert out.count("same: yes, all 8 tokens") == 2
    assert "Greedy: 2 of 2 outputs are identical" in out
    greedy, sampled = out[out.index("Greedy (") :].split("Sampled (")
    for part in (greedy, sampled):
        rows = re.findall(r"^ +(\d) +(\d+) +(\d+) +([\d.]+)", part, re.MULTILINE)
        assert [row[0] for row in rows] == ["1", "2", "3"]
        assert rows[0][1] == rows[0][2] != "0", "the clean token is always right"
        assert float(re.search(r"([\d.]+) tokens per cycle", part)[1]) >= 2


def test_offline_example() -> None:
    out = run("examples/offline.py")
    assert len(re.findall(r"^'.*' -> '.+' \(32 tokens\)$", out, re.MULTILINE)) == 2


def test_serve_client_example() -> None:
    out = run("examples/serve_client.py")
    assert re.search(r"^answer: +'.+'$", out, re.MULTILINE)
    counts = re.search(r"^32 tokens; (\d+) drafts, of whose tokens (\d+) were accepted$", out, re.M)
    assert counts, out
    # Greedy: every draft has its first token accepted.
    assert int(counts[2]) >= int(counts[1]) > 0


def completion(tokens: list[int], best: tuple[float, float] = (-1.0, -1.5)) -> SimpleNamespace:
    entry = {i: SimpleNamespace(logprob=value) for i, value in enumerate(best)}
    return SimpleNamespace(token_ids=tokens, text="text", logprobs=[entry] * len(tokens))


@pytest.mark.parametrize(
    ("plain", "ours", "verdict"),
    [
        ([1, 2, 3], [1, 2, 3], "same: yes, all 3 tokens"),
        ([1, 2, 3], [1, 5, 3], "same: NO, from token 1 on, where plain's best two are 0.5000 nat"),
        ([1, 2, 3], [1, 2], "same: NO, from token 2 on"),
        ([1, 2], [1, 2, 3], "same: NO, UNO goes on after token 2"),
    ],
)
def test_demo_tells_different_outputs(
    plain: list[int], ours: list[int], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    same = demo._show_outputs(["prompt"], [completion(plain)], [completion(ours)])
    assert same == (plain == ours)
    assert verdict in capsys.readouterr().out
