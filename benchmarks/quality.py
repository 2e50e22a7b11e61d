"""Does UNO change what a model answers? Plain vLLM twice, and UNO, on held-out problems.

    python benchmarks/quality.py --out quality                          the bundled model
    python benchmarks/quality.py --out quality --block-sizes 2,4,8,16
    python benchmarks/quality.py --out q --adapter a1 --adapter a2      ablations, a row each

Everything is asked greedily and at temperature 1. The second plain run, an engine of its own, is
the floor: what it differs by from the first, plain vLLM differs by from itself. Greedy outputs are
compared token by token, sampled ones (other seeds) by the problems that only one run solves: the
difference of accuracy, its 95 % interval, and McNemar's exact p-value. Writes quality.json and
quality.png, and may be broken off and called again. Needs pip install ".[eval]": matplotlib,
and math-verify for problems that are not the bundled model's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import (
    Job,
    Outcome,
    Sampling,
    Setup,
    UsageError,
    bundled_problems,
    check,
    default_model,
    figures,
    print_table,
    read_problems,
    run,
    show,
    uno_config,
)

PLAIN, AGAIN = "plain", "plain again"
MODES = ("greedy", "sampled")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument(
        "--adapter", action="append", help="UNO adapter, may be repeated (default: the one found)"
    )
    parser.add_argument(
        "--block-sizes",
        type=lambda text: [int(b) for b in text.split(",")],
        default=[8],
        metavar="B,...",
        help="default: 8",
    )
    parser.add_argument(
        "--problems", type=Path, metavar="F.jsonl", help="default: those of the bundled model"
    )
    parser.add_argument("--count", type=int, default=200, help="problems (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help='more settings of vLLM\'s LLM, such as {"dtype": "float32"}',
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    if args.count < 1 or args.concurrency < 1 or min(args.block_sizes) < 1:
        parser.error("--count, --concurrency and --block-sizes must be at least 1")
    return args


def engines(args: argparse.Namespace) -> dict[str, Setup]:
    """By name: plain, plain again, and UNO for each adapter and block size."""
    model = default_model() if args.model is None else args.model
    plain = Setup(model=model, concurrency=args.concurrency, engine=args.engine)
    found = {PLAIN: plain, AGAIN: plain}
    for number, adapter in enumerate(args.adapter or [None]):
        for block in args.block_sizes:
            name = f"UNO B={block}"
            if len(args.adapter or []) > 1:
                name += f" {number}:{Path(adapter).name}"
            found[name] = dataclasses.replace(plain, uno=uno_config(adapter, block))
    return found


def jobs(args: argparse.Namespace, name: str, problems: Sequence[Any]) -> list[Job]:
    """Greedy and sampled. The seeds of plain, plain again and UNO differ, the last alike."""
    folder = args.out / name.replace(" ", "-").replace("/", "-").replace(":", "-")
    seed = args.seed + {PLAIN: 0, AGAIN: 1}.get(name, 2)
    greedy = Sampling(max_tokens=args.max_tokens)
    sampled = Sampling(max_tokens=args.max_tokens, temperature=1.0, seed=seed)
    return [
        Job(folder / f"{mode}.jsonl", problems, sampling)
        for mode, sampling in zip(MODES, (greedy, sampled), strict=True)
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """By engine and mode: the figures, and the comparison with the first plain run."""
    problems = (
        bundled_problems(args.count) if args.problems is None else read_problems(args.problems)
    )
    problems = problems[: args.count]
    setups = engines(args)
    asked = {name: jobs(args, name, problems) for name in setups}
    for name, setup in setups.items():
        for job in asked[name]:
            check(setup, job)  # before an engine has worked for nothing
    outcomes = {name: run(setup, asked[name], name) for name, setup in setups.items()}
    report: dict[str, Any] = {}
    for name, (greedy, sampled) in outcomes.items():
        report[name] = {"greedy": figures(greedy), "sampled": figures(sampled)}
        if name != PLAIN:
            report[name]["greedy"]["identical"] = identical(outcomes[PLAIN][0], greedy)
            report[name]["greedy"] |= paired(outcomes[PLAIN][0], greedy)
            report[name]["sampled"] |= paired(outcomes[PLAIN][1], sampled)
    return report


def identical(one: Outcome, two: Outcome) -> float:
    """Share of requests whose tokens are the same."""
    same = [one.results[key]["digest"] == two.results[key]["digest"] for key in one.results]
    return sum(same) / len(same)


def paired(one: Outcome, two: Outcome) -> dict[str, Any]:
    """How much more of the problems `two` solves, and how sure that is."""
    pairs = [(one.results[key]["correct"], two.results[key]["correct"]) for key in one.results]
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    low, high = difference_interval(lost, won, len(pairs))
    return {
        "difference": (won - lost) / len(pairs),
        "difference_95": [low, high],
        "lost": lost,
        "won": won,
        "mcnemar_p": mcnemar(lost, won),
    }


def difference_interval(lost: int, won: int, total: int) -> tuple[float, float]:
    """95 % interval of a difference of paired shares.

    Wald's with half a problem added to each cell of the 2x2 table (Agresti and Min 2005): Wald's
    own has no width where no problem changed sides.
    """
    b, c, n = lost + 0.5, won + 0.5, total + 2
    difference = (c - b) / n
    half = 1.96 * math.sqrt((b + c) / n - difference**2) / math.sqrt(n)
    return difference - half, difference + half


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p-value: were `lost` and `won` drawn with equal chances?"""
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**n)


def print_report(report: dict[str, Any]) -> None:
    for mode, title in zip(
        MODES, ("greedy (temperature 0)", "sampled (temperature 1)"), strict=True
    ):
        print(f"\n{title}, compared with the first plain run")
        rows = [["", "accuracy", "difference", "95 % interval", "p", "identical", "tau", "TPF"]]
        for name, modes in report.items():
            found = modes[mode]
            low, high = found.get("difference_95", (None, None))
            rows.append(
                [
                    name,
                    show(found["accuracy"], 4),
                    show(found.get("difference"), 4),
                    "-" if low is None else f"{low:+.4f} {high:+.4f}",
                    show(found.get("mcnemar_p")),
                    show(found.get("identical"), 4),
                    show(found["tau"]),
                    show(found["tpf"]),
                ]
            )
        print_table(rows)
        for name, modes in report.items():
            if modes[mode]["acceptance"] is not None:
                shares = " ".join(show(a) for a in modes[mode]["acceptance"])
                print(f"acceptance by position, {name}: {shares}")
    print("\ntau, TPF and acceptance leave out the last two cycles of each request")


def plot(report: dict[str, Any], file: Path) -> None:
    """Accuracy with 95 % intervals of its own, and acceptance by position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    names = list(report)
    for shift, mode in zip((-0.15, 0.15), MODES, strict=True):
        found = [report[name][mode] for name in names]
        axes[0].errorbar(
            [f["accuracy"] for f in found],
            [row + shift for row in range(len(names))],
            xerr=[1.96 * (f["accuracy_error"] or 0) for f in found],
            fmt="o",
            capsize=3,
            label=mode,
        )
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("accuracy, 95 % interval")
    axes[0].legend()
    for axis, mode in zip(axes[1:], MODES, strict=True):
        for name in names:
            found = report[name][mode]
            if found["acceptance"]:
                shares = [math.nan if a is None else a for a in found["acceptance"]]
                label = f"{name}, tau {show(found['tau'], 2)}"
                axis.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axis.set(title=mode, xlabel="position in the block", ylabel="acceptance", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        import matplotlib  # noqa: F401 -- here, and not when all has been measured
    except ImportError:
        print(
            'error: the plot needs matplotlib: pip install ".[eval]" brings it',
            file=sys.stderr,
        )
        return 2
    try:
        report = measure(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (args.out / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    plot(report, args.out / "quality.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
