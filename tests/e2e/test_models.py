"""Kinds of models with tiny random weights: UNO's greedy tokens are plain vLLM's.

Qwen3 is test_greedy.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, engine
from prompts import make_prompts

from vllm_uno.tiny_model import ALL_TARGETS, write_random_adapter, write_tiny_model

PROMPTS = make_prompts(2048)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {"llama": ALL_TARGETS, "qwen3_moe": ATTENTION, "gemma3": ALL_TARGETS}


@dataclass(frozen=True)
class Kind:
    model: Path
    uno: dict[str, Any]
    plain: list[list[int]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """architecture -> model, UNO's settings, plain vLLM's tokens; each made once."""
    made: dict[str, Kind] = {}

    def kind(architecture: Any) -> Kind:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            model = write_tiny_model(folder / "model", architecture=architecture)
            adapter = write_random_adapter(folder / "adapter", model, targets=TARGETS[architecture])
            with engine(model) as e:
                plain = e.tokens(PROMPTS, GREEDY)
            uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
            made[architecture] = Kind(model, uno, plain)
        return made[architecture]

    return kind


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_moe", "llama"])
def test_greedy(kinds: Any, architecture: str) -> None:
    kind = kinds(architecture)
    varied = [len(set(tokens)) / len(tokens) for tokens in kind.plain]
    assert sum(varied) / len(varied) > 0.5, "an output that loops hides faults"
    with engine(kind.model, kind.uno) as e:
        assert e.tokens(PROMPTS, GREEDY) == kind.plain
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and stats.acceptance[0] == 1.0
        # Gemma-3: one group with a window, one without.
        groups = e.runner.kv_cache_config.kv_cache_groups
        assert len(groups) == (2 if architecture == "gemma3" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TARGETS)
def test_chunked_prefill_and_preemption(kinds: Any, architecture: str) -> None:
    kind = kinds(architecture)
    with engine(
        kind.model,
        kind.uno,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=28 if architecture == "gemma3" else 14,  # two groups share them
        max_model_len=256,
    ) as e:
        assert e.tokens(PROMPTS, GREEDY) == kind.plain
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
    with pytest.raises(Exception, match=r"sliding|SlidingWindowSpec"):
        with engine(model, uno):
            pass
