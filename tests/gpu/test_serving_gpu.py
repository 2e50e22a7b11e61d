"""User LoRA, quantised targets, sleep and a soak on one GPU; several ranks on two.

`serving.sh` runs what one GPU is needed for (engines side by side, then the soak); each test
reads its verdict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.serving_report import CHECKS, verdict
from parallel import (
    check_data_parallel,
    check_draft_example,
    check_killed_worker,
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

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PROMPTS = make_prompts(2048)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
B = 4
MODES = {
    "linear": {"num_speculative_tokens": B},
    "tree": {"num_speculative_tokens": 8, "uno_tree_top_k": 4, "uno_block_size": B},
}
RANKS: dict[str, Any] = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.3}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    subprocess.run([str(Path(__file__).with_name("serving.sh")), str(folder)], check=False)
    return folder


@pytest.mark.parametrize("check", CHECKS)
def test_one_gpu(work: Path, check: str) -> None:
    good, figures = verdict(work, check)
    if good is None:
        pytest.skip(figures)
    assert good, figures


def run_example(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_user_lora_example() -> None:
    out = run_example("examples/user_lora.py")
    answers = [line.partition(" -> ")[2] for line in out.splitlines() if " -> " in line]
    assert len(answers) == 3 and len(set(answers)) == 3, out
    assert "tokens per cycle" in out


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Of the engines' processes."""
    with pytest.MonkeyPatch.context() as patch:
        # fp32 proper, so that no tie is broken another way.
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        # Asking for GPUs, as pytest's own process has, forbids to fork.
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Ray's workers import the tests' helpers.
        paths = [str(ROOT / "tests"), str(ROOT), *sys.path]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    with workers(model, **RANKS) as llm:
        return tokens(llm, PROMPTS, GREEDY)


@two_gpus
@pytest.mark.parametrize("backend", ["mp", "ray"])
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel(
    mode: str,
    backend: str,
    plain: list[list[int]],
    model: Path,
    adapter: Path,
) -> None:
    """Greedy tokens are plain's, noise is the same on both ranks, a dead worker is an error."""
    if backend == "ray":
        pytest.importorskip("ray", reason="needs ray: pip install ray")
    uno = {"uno_lora_path": str(adapter), **MODES[mode]}
    with workers(model, uno, backend=backend, **RANKS) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain
        stats = draft_stats(llm)
        assert stats.cycles > 50 and stats.acceptance[0] == 1.0
        one, other = drafts_of_ranks(llm, PROMPTS, sampled(len(PROMPTS)))
        assert len(one) == len(other) > 4
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        end = kill_while_generating(llm, llm.collective_rpc(worker_pid)[1], PROMPTS)
    assert isinstance(end, RuntimeError), end


@two_gpus
def test_sliced_adapter_by_the_kernels(tmp_path: Path) -> None:
    """Draft logits of two ranks in bf16, which the kernels take, against PEFT's."""
    run_example(
        "tests/run_engine.py", "--work", str(tmp_path), "--name", "tp", "--oracle",
        "--tensor-parallel", "2",
    )  # fmt: skip
    run = json.loads((tmp_path / "tp.json").read_text())
    assert run["slow_layers"] == [0, 0] and run["ranks_agree"] and run["oracle_blocks"] >= 9
    assert run["adapter_moves"] >= 1.0
    assert run["oracle_error"] <= 0.1 and run["oracle_row0"] <= 0.1


@two_gpus
def test_a_killed_worker_ends_the_server(tmp_path: Path) -> None:
    check_killed_worker(tmp_path)


@two_gpus
def test_two_data_parallel_engines_serve(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_data_parallel(tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("uno"))


@two_gpus
def test_ray_tp_example() -> None:
    pytest.importorskip("ray", reason="needs ray: pip install ray")
    check_draft_example(run_example("examples/ray_tp.py", "--max-tokens", "48"))
