"""Train an adapter for a model, then decode with it.

python examples/train.py                              the bundled model, a minute on a CPU
python examples/train.py --model Qwen/Qwen3-0.6B --data my.jsonl --output my-adapter \
    --steps 2000 --context 2048 --batch 32 --lr 1e-4 --block-size 8

Each line of the data has `text`, or chat `messages`. `vllm-uno train --help` shows all settings;
docs/training.md says what to train on and for how long.
"""

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

ON_CPU = is_cpu_build()
if ON_CPU:
    os.environ.setdefault("UNO_CPU_INTERPRETER", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
else:
    # The draft statistics are read by a function sent to the engine's process.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--data", help="JSONL (default: generated problems)")
    parser.add_argument("--output", help="folder for the adapter (default: a temporary one)")
    parser.add_argument("--block-size", type=int, default=4, help="B (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--context", type=int, default=280, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.model and not (args.data and args.output):
        parser.error("--model needs --data and --output")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from vllm_uno.bundled import bundled_model

            args.model = str(bundled_model())
        if args.data is None:
            from vllm_uno.bundled import problems

            args.data = str(Path(folder, "data.jsonl"))
            problems.write_records(Path(args.data), "train", 400)
        output = Path(args.output or Path(folder, "adapter"))
        train(args, output)
        decode(args, output)


def train(args: argparse.Namespace, output: Path) -> None:
    from vllm_uno.train.settings import TrainSettings
    from vllm_uno.train.trainer import train

    train(
        TrainSettings(
            model=args.model,
            data=args.data,
            output=str(output),
            heldout_samples=16,
            context=args.context,
            block_sizes=[args.block_size],
            steps=args.steps,
            batch_size=args.batch,
            micro_batch_size=min(args.batch, 4),
            rank=args.rank,
            scale=2.0,
            lr=args.lr,
            warmup_steps=5,
            schedule="cosine",
            eval_every=args.steps,
            dtype="float32" if ON_CPU else "bfloat16",
        )
    )
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    taus = [line["tau"] for line in lines if "tau" in line]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"tokens per cycle on held-out text {taus[0]:.2f} -> {taus[-1]:.2f}")


def decode(args: argparse.Namespace, adapter: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # vLLM looks at what is free
    from vllm import LLM, SamplingParams

    from vllm_uno.inspect_engine import draft_stats

    speculative: dict[str, Any] = {
        "method": "uno",
        "num_speculative_tokens": args.block_size,
        "uno_lora_path": str(adapter),
    }
    llm = LLM(
        args.model,
        speculative_config=speculative,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=ON_CPU,
    )
    with open(args.data) as lines:
        record = json.loads(next(lines))
    params = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, seed=0)
    try:
        if "messages" in record:
            turns = [message["role"] for message in record["messages"]]
            question = record["messages"][: turns.index("assistant")]
            (answer,) = llm.chat(question, params, use_tqdm=False)
        else:
            (answer,) = llm.generate([record["text"][:100]], params, use_tqdm=False)
        print(f"answer: {answer.outputs[0].text!r}")
        print(f"tokens per cycle in vLLM {draft_stats(llm).tokens_per_cycle:.2f}")
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
