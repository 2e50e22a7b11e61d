"""The hand-made quantised checkpoints hold the model's weights: read by vLLM's own unpacking."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from quantised_models import GROUP, quantise
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization import auto_awq
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.scalar_type import scalar_types

NAME = "model.layers.0.mlp.up_proj"


def parameter(data: torch.Tensor, **kwargs: object) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def unpacked(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers 0 ... 15 of int32 words packed along the first axis."""
    return unpack_quantized_values_into_int32(tensor, scalar_types.uint4, 0).float()


def read(tensors: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The weight [out, in] that vLLM makes of a checkpoint."""
    scales = tensors[f"{NAME}.scales"].float().repeat_interleave(GROUP, 0)
    if kind == "gptq":
        return ((unpacked(tensors[f"{NAME}.qweight"]) - 8) * scales).t()
    layer = torch.nn.Module()
    for name in ("qweight", "qzeros"):
        layer.register_parameter(name, parameter(tensors[f"{NAME}.{name}"]))
    with mock.patch.object(auto_awq, "PackedvLLMParameter", parameter):  # no ranks here
        auto_awq._convert_awq_to_standard_format(layer, "qweight", "qzeros", 4)
    zeros = unpacked(layer.qzeros.data).t().repeat_interleave(GROUP, 0)
    return ((unpacked(layer.qweight.data) - zeros) * scales).t()


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_four_bits(kind: str, model: Path, tmp_path: Path) -> None:
    weight = load_file(model / "model.safetensors")[f"{NAME}.weight"]
    tensors = load_file(quantise(model, tmp_path / kind, kind) / "model.safetensors")
    step = tensors[f"{NAME}.scales"].float().repeat_interleave(GROUP, 0).t()
    # Half a step, and what rounding the zero point adds.
    assert ((read(tensors, kind) - weight).abs() <= 1.01 * step).all()
    assert (read(tensors, kind) - weight).abs().mean() < 0.3 * step.mean()
