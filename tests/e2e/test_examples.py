"""The demo and the examples run as users run them: scripts with their defaults."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
    out = run("-m", "vllm_uno.demo", "--block-size", "4", "--max-tokens", "48")
    assert out.count("same: yes, all ") == 3
    assert "Greedy: 3 of 3 outputs are identical" in out
    greedy, sampled = out[out.index("Greedy (") :].split("Sampled (")
    for part in (greedy, sampled):
        rows = re.findall(r"^ +(\d) +(\d+) +(\d+) +([\d.]+)", part, re.MULTILINE)
        assert [row[0] for row in rows] == ["1", "2", "3", "4"]
        assert rows[0][1] == rows[0][2] != "0", "the clean token is always right"
        # Three short answers: a wide interval, below the most that B = 4 can give.
        assert 3.2 <= float(re.search(r"([\d.]+) tokens per cycle", part)[1]) <= 5


@pytest.mark.slow
def test_demo_of_trees() -> None:
    out = run("-m", "vllm_uno.demo", "--mode", "tree", "--max-tokens", "48")
    assert "Greedy: 3 of 3 outputs are identical" in out
    assert out.count("tokens per cycle (") == 2
    rows = re.findall(r"^ +(\d+) +([\d.]+) +(\d+) +([\d.]+)", out, re.MULTILINE)
    assert [row[0] for row in rows] == [str(depth) for depth in range(16)] * 2
    assert float(rows[0][1]) == float(rows[0][3]) == 1.0, "the clean token is always right"
    picture = out[out.index("32 nodes in one pass") :]
    accepted = int(re.search(r"(\d+) accepted", picture)[1])
    assert picture.count("\n  * ") == accepted > 3
    assert len(re.findall(r"[├└]─ ", picture)) == 31


def test_train_example(tmp_path: Path) -> None:
    """A whole run of the trainer on the CPU: it learns, and vLLM drafts with what it wrote."""
    out = run("examples/train.py", "--output", str(tmp_path / "adapter"))
    loss = re.search(r"^loss ([\d.]+) -> ([\d.]+)$", out, re.M)
    tau = re.search(r"^tokens per cycle on held-out text ([\d.]+) -> ([\d.]+)$", out, re.M)
    assert loss and tau, out
    assert float(loss[2]) < 0.9 * float(loss[1])
    assert float(tau[2]) > float(tau[1]) + 0.12
    in_vllm = re.search(r"^tokens per cycle in vLLM ([\d.]+)$", out, re.M)
    assert in_vllm and float(in_vllm[1]) > float(tau[1]), out


@pytest.mark.slow
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


@pytest.mark.slow
def test_structured_example() -> None:
    out = run("examples/structured.py")
    city, phone, mood = re.findall(r"^(?:'.*'|\".*\") -> '(.*)'$", out, re.MULTILINE)
    found = json.loads(city)
    assert list(found) == ["city", "inhabitants", "coast"]
    assert f"parsed: {found['inhabitants']} inhabitants, on the coast: {found['coast']}" in out
    assert re.fullmatch(r"\+\d{2} \d{3} \d{4}", phone)
    assert mood in ("positive", "neutral", "negative")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it there")
def test_user_lora_example_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "examples/user_lora.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "This needs a GPU" in done.stderr


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
