"""Quantised targets, fp8 KV caches and reloaded weights, as far as a CPU has kernels for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine
from prompts import make_prompts
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_uno.tiny_model import write_tiny_model

PROMPTS = make_prompts(2048)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def quantise_int8(model: Path, folder: Path) -> Path:
    """`model` as a compressed-tensors checkpoint: int8 weights by channel, dynamic int8 inputs."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor / scale).round().to(torch.int8)
        tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    number = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_compressed_tensors(model: Path, adapter: Path, tmp_path: Path) -> None:
    quantised = quantise_int8(model, tmp_path / "int8")
    with engine(quantised, dtype="bfloat16") as e:
        plain = e.tokens(PROMPTS, SHORT)
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with engine(quantised, uno, dtype="bfloat16") as e:
        layer = e.speculator.model.model.layers[0].mlp.down_proj
        assert "Int8" in type(layer.scheme).__name__
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
