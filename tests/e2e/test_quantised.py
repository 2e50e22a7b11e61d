"""Quantised targets, fp8 KV caches and reloaded weights, as far as a CPU has kernels for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine
from prompts import make_prompts
from quantised_models import quantise
from safetensors.torch import load_file
from vllm import SamplingParams

from vllm_uno.tiny_model import write_tiny_model

PROMPTS = make_prompts(2048)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# On a CPU, of four bits, vLLM has kernels for AVX-512 alone.
NO_FOUR_BITS = not torch.cuda.is_available() and not hasattr(torch.ops._C, "cpu_gemm_wna16")
SCHEMES = {"int8": "Int8", "fp8": "Fp8"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "awq", "gptq"])
def test_quantised(kind: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    if kind not in SCHEMES and NO_FOUR_BITS:
        pytest.skip("vLLM's AWQ and GPTQ on a CPU need AVX-512")
    quantised = quantise(model, tmp_path / kind, kind)
    with engine(quantised, dtype="bfloat16") as e:
        plain = e.tokens(PROMPTS, SHORT)
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with engine(quantised, uno, dtype="bfloat16") as e:
        layer = e.speculator.model.model.layers[0].mlp.down_proj
        if kind in SCHEMES:
            assert SCHEMES[kind] in type(layer.scheme).__name__
        else:
            assert kind in type(layer.quant_method.base).__name__.lower()
        equal = sum(a == b for a, b in zip(e.tokens(PROMPTS, SHORT), plain, strict=True))
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and stats.acceptance[0] >= 0.9
        assert equal >= len(PROMPTS) - 2  # bf16 ties


def test_reloaded_weights_are_the_drafts_too(model: Path, adapter: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=5)
    with engine(other) as e:
        expected = e.tokens(PROMPTS, SHORT)
    with engine(model, {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}) as e:
        assert e.tokens(PROMPTS, SHORT) != expected
        weights: dict[str, Any] = load_file(other / "model.safetensors")
        e.runner.reload_weights(weights_iterator=iter(weights.items()))
        e.llm.reset_prefix_cache()
        e.speculator.counters.reset()
        assert e.tokens(PROMPTS, SHORT) == expected
        # Row 0 drafts with the base weights: old ones would propose other tokens.
        assert e.speculator.counters.snapshot().acceptance[0] == 1.0


@pytest.mark.skipif(
    not torch.cuda.is_available() and not torch.cpu._is_avx512_supported(),
    reason="vLLM's fp8 KV cache on a CPU needs AVX-512",
)
def test_fp8_kv_cache(model: Path, adapter: Path) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}
    with engine(model, **settings) as e:
        plain = e.tokens(PROMPTS, SHORT)
    with engine(
        model, {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}, **settings
    ) as e:
        equal = sum(a == b for a, b in zip(e.tokens(PROMPTS, SHORT), plain, strict=True))
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and stats.acceptance[0] >= 0.9
        assert equal >= len(PROMPTS) - 2
