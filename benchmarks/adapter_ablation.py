"""What makes a good adapter: rank, loss and block size, on the bundled model.

    python benchmarks/adapter_ablation.py --out ablation         one H200: about ten minutes

Trains an adapter for each row of the table, all with the same data and steps, and measures each
offline along the model's own answers at T = 1 for B = 2, 4, 8, 16 (`vllm-uno eval-adapter`). Prints
the table; writes ablation.json and ablation.png. Rows that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_uno.bundled import bundled_model, problems

ROOT = Path(__file__).parents[1]
BLOCKS = ("2", "4", "8", "16")
# Name -> flags of the trainer that differ from the bundled adapter's recipe.
ROWS: dict[str, tuple[str, ...]] = {
    "TV + 0.05 KL, rank 64": (),
    "TV alone, rank 64": ("--loss_kl", "0"),
    "KL alone, rank 64": ("--loss_tv", "0", "--loss_kl", "1"),
    "TV + 0.05 KL, rank 16": ("--rank", "16"),
    "TV + 0.05 KL, rank 128": ("--rank", "128"),
    "TV + 0.05 KL, rank 64, attention only": (
        *("--targets", "q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "TV + 0.05 KL, rank 64, block 16 from the start": ("--block_sizes", "16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=800, help="of each adapter")
    parser.add_argument("--samples", type=int, default=256, help="answers to measure along")
    parser.add_argument("--jobs", type=int, default=1, help="adapters trained at a time")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    test = args.out / "test.jsonl"
    problems.write_records(test, "test", args.samples)
    waiting = [n for n in args.rows if not (folder(args, n) / "acceptance.json").is_file()]
    while waiting:
        batch, waiting = waiting[: args.jobs], waiting[args.jobs :]
        running = [subprocess.Popen(["bash", "-ec", command(args, n, test)]) for n in batch]
        for name, process in zip(batch, running, strict=True):
            if process.wait() != 0:
                sys.exit(f"{name}: failed, see above")
    table = [
        (name, json.loads((folder(args, name) / "acceptance.json").read_text()))
        for name in args.rows
    ]
    print(f"{'adapter':40}" + "".join(f"  B={b:>2}" for b in BLOCKS))
    for name, rows in table:
        print(f"{name:40}" + "".join(f" {row['tau']:5.2f}" for row in rows))
    (args.out / "ablation.json").write_text(json.dumps(dict(table), indent=1) + "\n")
    plot(table, args.out / "ablation.png")


def folder(args: argparse.Namespace, name: str) -> Path:
    """Of one row and number of steps."""
    return Path(args.out, "".join(c if c.isalnum() else "-" for c in name) + f"-{args.steps}")


def command(args: argparse.Namespace, name: str, test: Path) -> str:
    """Shell lines that train and measure one row."""
    model, adapter = str(bundled_model()), folder(args, name)
    trainer = [
        *(sys.executable, str(ROOT / "examples" / "bundled_model" / "train_adapter.py")),
        *("--model", model, "--output", str(adapter), "--steps", str(args.steps), *ROWS[name]),
    ]
    if (adapter / "checkpoint").is_dir():
        trainer.append("--resume")
    measure = [
        *(sys.executable, "-m", "vllm_uno.cli", "eval-adapter", "--model", model),
        *("--adapter", str(adapter), "--data", str(test), "--samples", str(args.samples)),
        *("--temperatures", "1", "--block_sizes", *BLOCKS, "--batch_size", "128"),
        *("--output", str(adapter)),
    ]
    return f"{shlex.join(trainer)}\n{shlex.join(measure)}"


def plot(table: list[tuple[str, list[dict[str, Any]]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name, rows in table:
        axis.plot([r["block_size"] for r in rows], [r["tau"] for r in rows], marker="o", label=name)
    axis.set(xlabel="B", ylabel="tokens per cycle, T = 1", xscale="log")
    axis.set_xticks([int(b) for b in BLOCKS], BLOCKS)
    axis.legend(fontsize="small")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
