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
    hidden = {}
    for block in (4, 7):
        offsets = draw_offsets(rows.documents, block, generator)
        seeds = block_seeds(rows.documents, rows.positions, offsets, block).to(device)
        noise = torch.randint(1, 2048, rows.ids.shape, generator=generator).to(device)
        for attention in ("sdpa", "flex"):
            base = load_model(
                str(tmp_path / "model"),
                revision=None,
                dtype=torch.float32,
                attention=attention,
                device=device,
            )
            torch.manual_seed(1)
            model = NoisedModel(add_adapter(base, TARGETS, 4, 2.0), attention)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, 0, 0.1)
            clean, noised = model.hidden_states(rows.rows(torch.arange(3), device), seeds, noise)
            (clean.sum() + noised.square().sum()).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            hidden[attention] = (clean.detach(), noised.detach(), gradient)
        inside = (rows.documents >= 0).to(device)
        for flex, sdpa in zip(hidden["flex"][:2], hidden["sdpa"][:2], strict=True):
            torch.testing.assert_close(flex[inside], sdpa[inside], rtol=1e-3, atol=1e-3)
        flex, sdpa = hidden["flex"][2], hidden["sdpa"][2]
        assert float((flex - sdpa).norm() / sdpa.norm()) < 1e-2


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
