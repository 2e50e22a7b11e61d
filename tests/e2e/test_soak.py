"""A small soak on the CPU: the script that the GPU runs with 30,000 requests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "gpu" / "soak.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/serving.sh runs all of it")
@pytest.mark.parametrize("mode", ["linear", "tree"])
def test_sixty_requests(mode: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--requests", "60", "--mode", mode],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = done.stdout.splitlines()[-1]
    assert line.startswith("soak: 60 of 60 requests") and line.endswith(": good"), line
