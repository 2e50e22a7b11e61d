"""The draft is right: lossless output would hide a LoRA that never ran.

Draft logits of all B rows against transformers + PEFT in fp32. Each run is a
process of its own, so that compiled code comes from the cache it is told to use.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "run_engine.py"


def run(work: Path, name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--work", str(work), "--name", name, "--oracle"]
    command += ["--dtype", "float32", "--kv-block-size", "32", "--max-num-seqs", "8", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    result["log"] = done.stdout + done.stderr
    return result


def check(result: dict[str, Any]) -> None:
    assert result["oracle_blocks"] >= 9
    assert result["adapter_moves"] >= 1.0
    assert result["oracle_error"] <= 1e-3
    assert result["oracle_row0"] <= 1e-3


def test_eager(tmp_path: Path) -> None:
    check(run(tmp_path, "eager", "--eager"))


def test_a_part_of_the_context(tmp_path: Path) -> None:
    """Against a PEFT model with a mask over what the draft's rows leave out."""
    result = run(tmp_path, "part", "--eager", "--draft-context", "40")
    assert result["oracle_blocks"] >= 20 and result["left_out"] >= 128
    assert result["oracle_error"] <= 1e-3
    assert result["oracle_row0"] >= 0.5  # which is not the target's row then


def test_fp8_weights(tmp_path: Path) -> None:
    """Against a PEFT model that multiplies draft rows in FP8. Numbers between two of FP8's may be
    rounded either way: 0.009 was seen, where the target's own products are 0.13 away."""
    check_fp8(run(tmp_path, "fp8", "--eager", "--draft-fp8"))


def check_fp8(result: dict[str, Any]) -> None:
    assert result["oracle_blocks"] >= 9
    assert result["oracle_error"] <= 0.03
    assert result["oracle_row0"] >= 0.08


@pytest.mark.slow
def test_trained_adapter(tmp_path: Path) -> None:
    """The bundled model's, whose laws are sharp; the trainer's own are compared with PEFT's in
    tests/unit/test_train.py."""
    check(run(tmp_path, "bundled", "--bundled", "--eager"))


def test_view_without_lora_is_the_target_bitwise(model: Path) -> None:
    """And one with a LoRA is not, on the same real layers."""
    import torch
    from engines import engine
    from vllm.forward_context import set_forward_context

    from vllm_uno.adapter import load_adapter
    from vllm_uno.draft_view import build_draft_view
    from vllm_uno.tiny_model import write_random_adapter

    with engine(model) as running, torch.inference_mode():
        target, config = running.runner.model, running.runner.vllm_config
        ids = torch.arange(1, 9, dtype=torch.int32)
        positions = torch.arange(8)

        def hidden(module: torch.nn.Module) -> torch.Tensor:
            with set_forward_context(None, config, num_tokens=8):
                out: torch.Tensor = module(ids, positions, None, None)
            # Attention writes nothing without metadata; what it leaves is no number of ours.
            return out

        for layer in target.model.layers:
            layer.self_attn.attn.forward = lambda q, k, v: torch.zeros_like(q)
        expected = hidden(target)
        assert expected.isfinite().all() and expected.abs().sum() > 0
        assert torch.equal(hidden(build_draft_view(target, {}, 4, config)), expected)
        folder = write_random_adapter(model.parent / "bitwise", model)
        loras = load_adapter(folder, target, torch.float32, "cpu")
        moved = hidden(build_draft_view(target, loras, 4, config)) != expected
        assert moved.any(1).tolist() == [False, True, True, True] * 2


def test_view_of_a_target_with_users_adapters_holds_none_of_their_wrappers(model: Path) -> None:
    """Not the logits processor's either: their state is that of the verify batch."""
    import torch
    from engines import engine
    from run_engine import wrappers

    from vllm_uno.adapter import load_adapter
    from vllm_uno.draft_view import build_draft_view
    from vllm_uno.tiny_model import write_random_adapter

    # Without UNO, which is refused beside users' adapters on a CPU.
    with engine(model, enable_lora=True, max_loras=2) as running, torch.inference_mode():
        target, config = running.runner.model, running.runner.vllm_config
        assert "LogitsProcessorWithLoRA" in wrappers(target) and len(wrappers(target)) >= 4
        folder = write_random_adapter(model.parent / "stripped", model)
        loras = load_adapter(folder, target, torch.float32, "cpu")
        view = build_draft_view(target, loras, 4, config)
        assert wrappers(view) == []
        assert len(loras) == 8
        for name in loras:  # found by the wrappers' names, attached to what they wrap
            method = view.get_submodule(name).quant_method
            assert method.target is target.get_submodule(name).base_layer
        hidden = torch.randn(3, 256)
        bare = target.logits_processor.base_layer(target.lm_head, hidden)
        assert torch.equal(view.compute_logits(hidden), bare)


@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """A and B slices, the all-reduce behind the LoRA, and the same rows on every rank."""
    result = run(tmp_path, "tp2", "--eager", "--tensor-parallel", "2")
    check(result)
    assert result["ranks_agree"]


@pytest.mark.slow
def test_two_tensor_parallel_ranks_in_fp8(tmp_path: Path) -> None:
    """Each rank quantises its own part of a row, where the oracle takes the row as one."""
    result = run(tmp_path, "tp2-fp8", "--eager", "--tensor-parallel", "2", "--draft-fp8")
    assert result["ranks_agree"]
    assert result["oracle_error"] <= 0.3 <= result["adapter_moves"]
    assert result["oracle_row0"] >= 0.08


@pytest.mark.slow
def test_two_tensor_parallel_ranks_share_a_draft_vocabulary(tmp_path: Path) -> None:
    result = run(tmp_path, "tp2-vocab", "--eager", "--tensor-parallel", "2", "--draft-vocab")
    check(result)
    assert result["ranks_agree"]
    assert result["columns"] == 683  # every third of 2,048: the ranks' shares are unequal


@pytest.mark.slow
def test_compiled_cold_other_block_size_other_adapter_and_warm(tmp_path: Path) -> None:
    cache = ("--cache", str(tmp_path / "cache"))
    check(run(tmp_path, "cold", *cache))
    check(run(tmp_path, "b4", "--block-size", "4", *cache))
    check_fp8(run(tmp_path, "fp8", "--draft-fp8", *cache))
    # An adapter of equal shape shares the compiled code, with its own weights.
    check(run(tmp_path, "other", "--adapter-seed", "1", *cache))
    warm = run(tmp_path, "warm", *cache)
    check(warm)
