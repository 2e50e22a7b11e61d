"""vLLM's Ray executor with UNO, over real Ray workers that stand in for GPUs (ray_cpu.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from parallel import (
    check_draft_example,
    drafts_of_ranks,
    kill_while_generating,
    sampled,
    tokens,
    worker_pid,
    workers,
)
from prompts import make_prompts
from vllm import SamplingParams

from vllm_uno.inspect_engine import draft_stats

pytest.importorskip("ray", reason="needs ray: pip install ray")
from ray_cpu import cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have tests of their own"),
]

PROMPTS = make_prompts(2048)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def ray_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Started before any engine, as the Ray of a cluster is: it inherits nothing from one."""
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the tests' helpers.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
        # Ray keeps a token of its clusters there.
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with cluster():
            yield


def variable(worker: Any, name: str) -> str | None:
    """For `collective_rpc`."""
    return os.environ.get(name)


def test_greedy_noise_switches_and_a_killed_worker(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine for all of it: a start takes a minute."""
    with workers(model) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
    # Set in the driver alone, after Ray has started.
    monkeypatch.setenv("UNO_FUSED_LORA", "0")
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with workers(model, uno, backend="ray") as llm:
        pids = llm.collective_rpc(worker_pid)
        assert len(set(pids)) == 2 and os.getpid() not in pids
        assert all("RayWorkerProc" in " ".join(psutil.Process(p).cmdline()) for p in pids)
        assert llm.collective_rpc(variable, args=("UNO_FUSED_LORA",)) == ["0", "0"]
        assert tokens(llm, PROMPTS, GREEDY) == plain
        stats = draft_stats(llm)
        assert stats.cycles > 50 and stats.acceptance[0] == 1.0
        one, other = drafts_of_ranks(llm, PROMPTS, sampled(len(PROMPTS)))
        assert len(one) == len(other) > 4
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        end = kill_while_generating(llm, pids[1], PROMPTS)
    assert isinstance(end, RuntimeError), end


def test_ray_tp_example() -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "ray_cpu.py"), "examples/ray_tp.py", "--max-tokens", "24"],
        cwd=TESTS.parent,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    check_draft_example(done.stdout)
