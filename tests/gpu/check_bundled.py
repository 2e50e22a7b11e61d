"""Do the results of bundled.sh reach what the bundled model must show?

    python tests/gpu/check_bundled.py WORK          parts that were not run are listed as such
    python tests/gpu/check_bundled.py WORK --all    and fail

Prints a line for each requirement; the exit status is 1 where one is missed. The margins are the
requirements', but for these:

- *offline against the engine*: the mean over the positions of the share of cycles that accepted a
  draft there, (tau - 1) / B, within 3 % of the engine's; 500 answers to the same problems (greedy
  the same answers, at T = 1 others, whose chance makes about 1 %).
- *UNO within the plain-vs-plain floor*: the second plain run and UNO are each compared with the
  first plain run, problem by problem (McNemar's exact test). UNO is within the floor where the
  smallest p-value of its runs, times their number, is at least 0.01, or where it is no smaller than
  that of the second plain run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

FLOOR_P = 0.01


@dataclass(frozen=True)
class Line:
    requirement: str
    passed: bool | None  # None: not run
    found: str


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def offline(work: Path, name: str, block: int, temperature: float) -> dict[str, Any]:
    """One row of an acceptance.json of `vllm-uno eval-adapter`."""
    rows = load(work / name / "acceptance.json")
    (row,) = (r for r in rows if (r["block_size"], r["temperature"]) == (block, temperature))
    found: dict[str, Any] = row
    return found


def quality(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(work / "quality" / "quality.json")
    return found


def retrained_tau(work: Path, block: int) -> tuple[bool, str]:
    new = offline(work, "retrained", block, 1.0)["tau"]
    shipped = offline(work, "shipped", block, 1.0)["tau"]
    return abs(new - shipped) <= 0.2, f"{new:.2f}, shipped {shipped:.2f}"


def training_time(work: Path) -> tuple[bool, str]:
    lines = (work / "adapter" / "log.jsonl").read_text().splitlines()
    seconds = [entry["seconds"] for entry in map(json.loads, lines) if "seconds" in entry][-1]
    return seconds <= 600, f"{seconds:.0f} s"


def fixed_wording(work: Path) -> tuple[bool, str]:
    found = load(work / "fixed" / "result.json")
    tau, seconds = found["tau"], found["seconds"]
    return tau >= 8.8 and seconds <= 300, f"{tau:.2f} after {seconds:.0f} s"


def greedy_accuracy(work: Path) -> tuple[bool, str]:
    found = load(work / "math-0" / "report.json")
    plain, uno = found["plain"]["accuracy"], found["uno"]["accuracy"]
    return min(plain, uno) >= 0.95, f"plain {plain:.4f}, UNO {uno:.4f}"


def sampled_tau(work: Path) -> tuple[bool, str]:
    tau = load(work / "math-1" / "report.json")["uno"]["tau"]
    return 4 <= tau <= 6.5, f"{tau:.2f}"


def share_of_bound(work: Path) -> tuple[bool, str]:
    bound = load(work / "bound.json")["8"]
    tau = load(work / "math-1" / "report.json")["uno"]["tau"]
    interval = f"{bound['tau']:.2f} [{bound['low']:.2f}, {bound['high']:.2f}]"
    return tau >= 0.9 * bound["tau"], f"{tau:.2f} of {interval}: {tau / bound['tau']:.0%}"


def longer_blocks(work: Path) -> tuple[bool, str]:
    eight, sixteen = (quality(work)[f"UNO B={b}"]["sampled"]["tau"] for b in (8, 16))
    return sixteen > eight, f"{sixteen:.2f}, B=8 {eight:.2f}"


def offline_acceptance(work: Path, block: int, mode: str) -> tuple[bool, str]:
    temperature = {"greedy": 0.0, "sampled": 1.0}[mode]
    engine = mean(quality(work)[f"UNO B={block}"][mode]["acceptance"])
    ours = mean(offline(work, "offline", block, temperature)["acceptance"])
    difference = ours / engine - 1
    return abs(difference) <= 0.03, f"{ours:.3f}, engine {engine:.3f}: {difference:+.1%}"


def mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


def within_floor(work: Path) -> tuple[bool, str]:
    report = quality(work)
    ours = [
        found["mcnemar_p"]
        for name, modes in report.items()
        if name.startswith("UNO")
        for found in modes.values()
    ]
    floor = min(found["mcnemar_p"] for found in report["plain again"].values())
    least = min(ours)
    passed = least * len(ours) >= FLOOR_P or least >= floor
    return passed, f"least p {least:.3g} of {len(ours)}, plain again {floor:.3g}"


def draft_logits(work: Path) -> tuple[bool, str]:
    found = load(work / "oracle" / "oracle.json")
    errors = found["oracle_error"], found["oracle_row0"]
    return max(errors) <= 1e-3, "{:.1e}, first row {:.1e}".format(*errors)


CHECKS: tuple[tuple[str, Callable[[Path], tuple[bool, str]]], ...] = (
    ("retrained adapter: tau at B=8, T=1 within 0.2 of shipped", partial(retrained_tau, block=8)),
    ("retrained adapter: tau at B=16, T=1 within 0.2 of shipped", partial(retrained_tau, block=16)),
    ("retraining takes at most 10 minutes", training_time),
    ("fixed wording: tau at least 8.8 within 300 s", fixed_wording),
    ("accuracy, greedy: at least 95 %", greedy_accuracy),
    ("UNO's accuracy within the plain-vs-plain floor", within_floor),
    ("tau at B=8, T=1: 4 to 6.5", sampled_tau),
    ("tau at B=8, T=1: at least 90 % of the text's bound", share_of_bound),
    ("tau at B=16, T=1 above B=8", longer_blocks),
    *(
        (
            f"offline acceptance within 3 % of the engine's: B={block}, {mode}",
            partial(offline_acceptance, block=block, mode=mode),
        )
        for block in (8, 16)
        for mode in ("greedy", "sampled")
    ),
    ("draft logits: relative error against PEFT at most 1e-3", draft_logits),
)


def check(work: Path) -> list[Line]:
    """A line for each of CHECKS; a result that is there but cannot be read is a failed one."""
    lines = []
    for requirement, test in CHECKS:
        try:
            lines.append(Line(requirement, *test(work)))
        except FileNotFoundError as error:
            lines.append(Line(requirement, None, f"no {Path(error.filename).relative_to(work)}"))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            lines.append(Line(requirement, False, f"unreadable: {error!r}"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of bundled.sh's results")
    parser.add_argument("--all", action="store_true", help="what was not run fails")
    args = parser.parse_args(argv)
    lines = check(args.work)
    width = max(len(line.requirement) for line in lines)
    for line in lines:
        verdict = {True: "ok", False: "FAILED", None: "not run"}[line.passed]
        print(f"{verdict:8}{line.requirement:{width}}  {line.found}")
    failed = any(line.passed is False or (args.all and line.passed is None) for line in lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
