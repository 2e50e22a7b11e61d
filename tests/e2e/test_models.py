"""Kinds of models with tiny random weights: UNO's greedy tokens are plain vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, engine
from prompts import make_prompts

from vllm_uno.tiny_model import ALL_TARGETS, write_random_adapter, write_tiny_model

PROMPTS = make_prompts(2048)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        # Qwen3 is test_greedy.py's.
        pytest.param("llama", ALL_TARGETS, id="llama", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ATTENTION, id="qwen3_moe"),
        pytest.param("gemma3", ALL_TARGETS, id="gemma3"),
    ],
)
def test_greedy(architecture: Any, targets: tuple[str, ...], tmp_path: Path) -> None:
    # Sharper than the default: these architectures' own factors flatten the logits.
    model = write_tiny_model(tmp_path / "model", architecture=architecture)
    adapter = write_random_adapter(tmp_path / "adapter", model, targets=targets)
    with engine(model) as e:
        plain = e.tokens(PROMPTS, GREEDY)
    varied = [len(set(tokens)) / len(tokens) for tokens in plain]
    assert sum(varied) / len(varied) > 0.5, "an output that loops hides faults"
    with engine(model, {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}) as e:
        assert e.tokens(PROMPTS, GREEDY) == plain
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and stats.acceptance[0] == 1.0
        if architecture == "gemma3":
            assert len(e.runner.kv_cache_config.kv_cache_groups) == 2
    with engine(
        model,
        {"uno_lora_path": str(adapter), "num_speculative_tokens": 4},
        max_num_batched_tokens=48,
        num_gpu_blocks_override=28 if architecture == "gemma3" else 14,
        max_model_len=256,
    ) as e:
        assert e.tokens(PROMPTS, GREEDY) == plain
        assert e.preemptions > 0


def test_experts_cannot_be_targets(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture="qwen3_moe")
    adapter = write_random_adapter(tmp_path / "adapter", model, targets=("q_proj", "up_proj"))
    with pytest.raises(Exception, match="experts"):
        with engine(model, {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}):
            pass


def test_a_sliding_window_is_refused_in_tree_mode(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture="gemma3")
    adapter = write_random_adapter(tmp_path / "adapter", model, targets=ATTENTION)
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 6, "uno_tree_top_k": 4}
    with pytest.raises(Exception, match="sliding|SlidingWindowSpec"):
        with engine(model, uno):
            pass
