"""What training an adapter costs, by model size: tokens a second, and GPU memory.

    python benchmarks/train_speed.py --out train_speed.json          an H200: some four minutes

Random weights of two Qwen3 shapes and random words, the released recipe's rank and targets: the
figures say how long a step takes, not what is learnt. Text tokens are counted once, though the pass
covers them twice. The first half of the steps, in which code is compiled, is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from vllm_uno.bundled import bundled_model
from vllm_uno.train.settings import TrainSettings
from vllm_uno.train.trainer import train

# Layers, hidden size, inner size, heads, key heads, tied output head.
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "tiny": (2, 64, 128, 4, 2, True),
    "0.6B": (28, 1024, 3072, 16, 8, True),
    "8B": (36, 4096, 12288, 32, 8, False),
}
VOCABULARY, HEAD_DIM = 151_936, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "8B"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2, help="of a step, one a pass")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("train_speed.json"))
    args = parser.parse_args()
    table = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            row = {"shape": shape, "context": args.context, **measure(args, shape, Path(folder))}
        table.append(row)
        print(row, flush=True)
        args.out.write_text(json.dumps(table, indent=1) + "\n")


def measure(args: argparse.Namespace, shape: str, work: Path) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    write_model(work / "model", shape)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    chance = random.Random(0)
    # Of some 500 tokens each, packed into rows; the tokenizer has a token for most of the words.
    lines = [
        json.dumps({"text": " ".join(chance.choices(words, k=args.context // 8))})
        for _ in range(args.rows * (args.steps + 2) * 8)
    ]
    (work / "data.jsonl").write_text("\n".join(lines) + "\n")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    train(
        TrainSettings(
            model=str(work / "model"),
            data=str(work / "data.jsonl"),
            output=str(work / "adapter"),
            context=args.context,
            block_sizes=[16],
            steps=args.steps,
            warmup_steps=0,
            batch_size=args.rows,
            gradient_checkpointing=True,
            heldout_samples=1,
            eval_every=args.steps,
            save_every=args.steps,
            log_every=args.steps // 2,
        )
    )
    log = [json.loads(line) for line in (work / "adapter" / "log.jsonl").read_text().splitlines()]
    rates = [entry["tokens_per_second"] for entry in log if "tokens_per_second" in entry]
    return {
        "tokens_per_s": round(rates[-1]),
        "hours_per_billion_tokens": round(1e9 / rates[-1] / 3600, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    }


def write_model(folder: Path, shape: str) -> None:
    """A random model with the bundled one's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, inner, heads, key_heads, tied = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=HEAD_DIM,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder / name)


if __name__ == "__main__":
    main()
