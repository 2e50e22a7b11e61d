"""Trainer on a GPU: flex_attention against SDPA, and whole steps in bf16."""

import json
import random
from pathlib import Path

import pytest
import torch

from vllm_uno.tiny_model import write_tiny_model
from vllm_uno.train.blocks import block_seeds, draw_offsets
from vllm_uno.train.data import Sample, pack
from vllm_uno.train.model import NoisedModel, add_adapter, load_model
from vllm_uno.train.settings import TrainSettings
from vllm_uno.train.trainer import train

pytestmark = pytest.mark.gpu
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_flex_attention_is_sdpa(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    device = torch.device("cuda")
    r = random.Random(0)
    samples = [
        Sample([r.randrange(1, 2048) for _ in range(n)], [i > 0 for i in range(n)])
        for n in (100, 90, 180, 3, 40, 120)
    ]
    rows = pack(samples, 192).rows(torch.arange(3), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    inside = (rows.documents >= 0).to(device)
    for block in (4, 7):
        offsets = draw_offsets(rows.documents, block, generator)
        seeds = block_seeds(rows.documents, rows.positions, offsets, block).to(device)
        noise = torch.randint(1, 2048, rows.ids.shape, generator=generator).to(device)

        def passed(
            attention: str,
            dtype: torch.dtype,
            seeds: torch.Tensor = seeds,
            noise: torch.Tensor = noise,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            base = load_model(
                str(tmp_path / "model"),
                revision=None,
                dtype=dtype,
                attention=attention,
                device=device,
            )
            model = NoisedModel(add_adapter(base, TARGETS, 4, 2.0), attention)
            draws = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    values = torch.randn(parameter.shape, generator=draws) * 0.1
                    parameter.data = values.to(device, dtype)
            clean, noised = model.hidden_states(rows.rows(torch.arange(3), device), seeds, noise)
            # Random weights: the plain sum of squares is a constant behind an RMSNorm.
            weights = torch.randn(noised.shape, generator=draws).to(device, dtype)
            (noised * weights)[inside].sum().backward()
            gradient = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
            return clean[inside].detach(), noised[inside].detach(), torch.cat(gradient)

        exact = passed("sdpa", torch.float64)
        for found, reference in zip(passed("flex", torch.float32), exact, strict=True):
            error = float((found - reference).norm() / reference.norm())
            print(f"flex_attention in fp32: relative error {error:.1e}")
            assert error < 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_steps_with_flex_attention(tmp_path: Path, checkpointing: bool) -> None:
    write_tiny_model(tmp_path / "model", std=0.1)
    r = random.Random(0)
    lines = (" ".join(r.choices(["ab", "cd", "ef", "gh"], k=24)) for _ in range(200))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    result = train(
        TrainSettings(
            model=str(tmp_path / "model"),
            data=str(tmp_path / "d.jsonl"),
            output=str(tmp_path / "out"),
            context=128,
            block_sizes=[4, 8],
            steps=60,
            batch_size=8,
            micro_batch_size=4,
            rank=8,
            scale=2.0,
            lr=2e-3,
            warmup_steps=5,
            log_every=1,
            eval_every=30,
            attention="flex",
            gradient_checkpointing=checkpointing,
        )
    )
    assert result.adapter is not None
    entries = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in entries if "loss" in e]
    taus = [e["tau"] for e in entries if "tau" in e]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert taus[-1] > taus[0] + 0.1
