"""Quantised checkpoints made by hand from a tiny model, in the formats that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 128  # inputs that share a scale, in AWQ and GPTQ; of every layer a multiple
# Of eight columns packed into an int32, which one lies in the i-th four bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantise(model: Path, folder: Path, kind: str) -> Path:
    """Write `model` with quantised projections: kind "int8", "fp8", "awq" or "gptq"."""
    layer, config = _KINDS[kind]
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        for suffix, part in layer(tensor.float()).items():
            tensors[name.replace("weight", suffix)] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((model / "config.json").read_text())
    whole["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def _int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.t().unflatten(0, (-1, GROUP))  # [groups, inputs, out]
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    levels = (groups / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15).flatten(0, 1)
    return {
        "qweight": _pack(levels, _AWQ_ORDER),
        "qzeros": _pack(zero, _AWQ_ORDER),
        "scales": scale,
    }


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.t().unflatten(0, (-1, GROUP))
    scale = (groups.abs().amax(1) / 7).half()
    levels = ((groups / scale.float()[:, None]).round().clamp(-8, 7) + 8).flatten(0, 1)
    return {
        "qweight": _pack(levels.t(), tuple(range(8))).t(),
        "qzeros": _pack(torch.full(scale.shape, 7.0), tuple(range(8))),  # one less than they are
        "scales": scale,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _pack(levels: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [rows, columns / 8] of numbers 0 ... 15."""
    eights = levels.long().unflatten(1, (-1, 8))[:, :, list(order)]
    packed = (eights << torch.arange(0, 32, 4)).sum(dim=2)
    return (packed - ((packed >> 31) << 32)).to(torch.int32)  # the highest bit is a sign


def _compressed_tensors(number: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }


_FOUR_BITS = {"bits": 4, "group_size": GROUP}
_KINDS: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "int8": (
        _int8,
        _compressed_tensors({"num_bits": 8, "type": "int", "symmetric": True}, "int-quantized"),
    ),
    "fp8": (
        _fp8,
        _compressed_tensors({"num_bits": 8, "type": "float", "symmetric": True}, "float-quantized"),
    ),
    "awq": (
        _awq,
        {"quant_method": "awq", "zero_point": True, "version": "gemm", **_FOUR_BITS},
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "desc_act": False, "sym": True, **_FOUR_BITS},
    ),
}
