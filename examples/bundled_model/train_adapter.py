"""Train the UNO adapter of the bundled model as the shipped one was: 70 s on one H200.

    python examples/bundled_model/train_base.py --out out/model
    python examples/bundled_model/train_adapter.py --model out/model --output out/model/adapter

The text is the generator's, on which the base model itself was trained: it writes alike. Other
flags are those of `vllm-uno train`; what is set here is set again by giving it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from vllm_uno import cli
from vllm_uno.bundled import problems

# For 5 million parameters; the released 8B recipe has smaller steps and many more of them.
RECIPE = {
    "context": "512",
    "block_sizes": ["2", "4", "8", "16", "16"],
    "steps": "1000",
    "batch_size": "64",
    "micro_batch_size": "64",
    "rank": "64",
    "scale": "2",
    "lr": "2e-3",
    "schedule": "cosine",
    "warmup_steps": "50",
    # TV alone stalls: where a draft gives a token no mass, it has no gradient (docs/training.md).
    "loss_kl": "0.05",
    "noise_low": "4",  # the first four ids are the special tokens
    "heldout_samples": "256",
    "eval_every": "500",
    "save_every": "1000",
    "log_every": "20",
    "attention": "sdpa",
    "seed": "1",  # the shipped adapter's
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--problems", type=int, default=60_000, help="to train on")
    parser.add_argument("--wording", choices=("varied", "fixed"), default="varied")
    parser.add_argument("--output", type=Path, required=True, help="folder for the adapter")
    args, rest = parser.parse_known_args()
    flags = ["--output", str(args.output)]
    for name, value in RECIPE.items():
        if f"--{name}" not in rest:
            flags += [f"--{name}", *(value if isinstance(value, list) else [value])]
    # Beside the output and not in a temporary folder: a resumed run wants the same data.
    folder = args.output.with_name(f"{args.output.name}-data")
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.problems), ("test", int(RECIPE["heldout_samples"]))):
        path = folder / f"{split}.jsonl"
        problems.write_records(path, split, count, wording=args.wording)
        flags += ["--data" if split == "train" else "--heldout", str(path)]
    status = cli.main(["train", *flags, *rest])
    if (args.output / "adapter_config.json").is_file():
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
