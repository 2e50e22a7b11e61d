"""Can the trainer learn what can be learnt? Text that says each thing in one way only.

    python benchmarks/fixed_wording.py --out fixed           one H200: about five minutes

Trains a base model and an adapter on the bundled problems in their fixed wording. With nothing left
to chance but the numbers' own arithmetic, every row's token is certain and tau should come close to
its limit of B + 1; what a base model is unsure of is lost.
Expected: held-out tau of at least 8.8 at B = 8, the adapter trained within five minutes. It prints
both and writes result.json; the exit status says whether they were reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAU, SECONDS = 8.8, 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--base-seconds", type=float, default=100, help="to train the base model")
    parser.add_argument("--steps", type=int, default=1300, help="of the adapter")
    args = parser.parse_args()
    recipe = ROOT / "examples" / "bundled_model"
    base, adapter = args.out / "model", args.out / "model" / "adapter"
    run(
        recipe / "train_base.py",
        *("--out", base, "--wording", "fixed", "--seconds", args.base_seconds),
    )
    run(
        recipe / "train_adapter.py",
        *("--wording", "fixed", "--model", base, "--output", adapter, "--steps", args.steps),
        *("--seed", 0),  # of the figures measured
        *("--block_sizes", 2, 4, 8, 8),
    )
    log = [json.loads(line) for line in (adapter / "log.jsonl").read_text().splitlines()]
    tau = [entry["tau"] for entry in log if "tau" in entry][-1]
    seconds = [entry["seconds"] for entry in log if "seconds" in entry][-1]
    reached = tau >= TAU and seconds <= SECONDS
    result = {"tau": tau, "seconds": seconds, "steps": args.steps, "reached": reached}
    (args.out / "result.json").write_text(json.dumps(result) + "\n")
    print(f"held-out tau {tau:.2f} (at least {TAU}) after {seconds:.0f} s (at most {SECONDS})")
    return 0 if reached else 1


def run(script: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
