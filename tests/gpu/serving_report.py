"""The verdicts of one `serving.sh`, by name: `python tests/gpu/serving_report.py WORK`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compare import Parity, compare

# Stock vLLM's own runs part from each other at ties of bf16 logits; so may UNO's.
NEAR_TIE = 0.05
ROW_ZERO = 0.97  # bf16: a batch of other rows now and then breaks a tie another way
# FP8 with fused quantisation: half of plain's tokens lie within the 0.13 nat at which stock `ngram`
# parts from plain. 0.91 was measured.
ROW_ZERO_COMPILED = 0.88
KINDS = ("online", "online-compiled", "fp8", "awq", "gptq", "kv8", "kv8-triton")
CHECKS = (
    "users-exact",
    "users-default",
    "users-wrappers",
    *(f"greedy-{kind}" for kind in KINDS),
    "kv8-tree",
    "sleep",
    "sleep-vocab",
    "sleep-fp8",
    "soak-linear",
    "soak-tree",
)


def verdict(work: Path, check: str) -> tuple[bool | None, str]:
    """Whether `check` holds, and the figures; None where stock vLLM itself did not run."""
    kind = check.removeprefix("greedy-")
    if kind in KINDS and not (work / f"{kind}-plain.json").exists():
        return None, f"plain vLLM gave no result: see {work / f'{kind}-plain.log'}"
    try:
        if check == "users-exact":
            return _exact(work)
        if check == "users-default":
            return _default(work, "users")
        if check == "users-wrappers":
            return _wrappers(work)
        if check == "kv8-tree":
            return _refused(work)
        if check.startswith("sleep"):
            return _sleep(work, check)
        if check.startswith("soak"):
            line = (work / f"{check}.out").read_text().strip()
            return line.endswith(": good"), line
        return _default(work, kind)
    except FileNotFoundError as missing:
        return False, f"no result: {missing.filename}"


def load(work: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return found


def parity(work: Path, reference: str, other: str) -> Parity:
    return compare(work / f"{reference}.json", work / f"{other}.json")


def _exact(work: Path) -> tuple[bool, str]:
    """In batch-invariant mode every request's tokens are plain's, as plain's own are."""
    plain = "users-invariant-plain"
    floor, found = (parity(work, plain, f"users-invariant-{o}") for o in ("plain2", "uno"))
    good = floor.equal == floor.requests == found.equal == found.requests
    return good, f"plain again {floor}; uno {found}"


def _default(work: Path, kind: str) -> tuple[bool, str]:
    """Requests part from plain at near ties alone, or as many and as near as stock's; row 0 holds.

    (Not under users' adapters: row 0 is the base model's.)
    """
    found = parity(work, f"{kind}-plain", f"{kind}-uno")
    others = [o for o in ("plain2", "ngram") if (work / f"{kind}-{o}.json").exists()]
    floors = [parity(work, f"{kind}-plain", f"{kind}-{o}") for o in others]
    stats = load(work, f"{kind}-uno")["stats"]
    row_zero = stats["accepted"][0] / stats["proposed"][0]
    tied = found.widest_gap <= NEAR_TIE
    no_more = bool(floors) and found.equal >= min(floor.equal for floor in floors)
    no_more = no_more and found.widest_gap <= max(floor.widest_gap for floor in floors)
    enough = row_zero >= (ROW_ZERO_COMPILED if kind == "online-compiled" else ROW_ZERO)
    good = (tied or no_more) and (enough or kind == "users")
    shown = "; ".join(f"{o} {f}" for o, f in zip(others, floors, strict=True))
    return good, f"{shown}; uno {found}, row 0 accepted {row_zero:.4f}"


def _wrappers(work: Path) -> tuple[bool, str]:
    """vLLM wrapped the target's layers and its logits processor; none is left in the view."""
    found = load(work, "users-uno")
    target, view = found["wrappers"]["target"], found["wrappers"]["view"]
    agree = found["users_agree"]
    good = "LogitsProcessorWithLoRA" in target and len(target) > 2 and view == []
    # Base, first, second user: the batch did have three models.
    good = good and max(agree[1:]) <= 8 and agree[0] > max(agree[1:])
    return good, f"target {target}, view {view}; tokens in common with the base model's: {agree}"


def _refused(work: Path) -> tuple[bool, str]:
    reason = "kv_cache_dtype=fp8 with uno_mode 'tree'"
    log = (work / "kv8-tree.log").read_text()
    line = next((text for text in log.splitlines() if reason in text), "not refused")
    return reason in log and not (work / "kv8-tree.json").exists(), line[-300:]


def _sleep(work: Path, name: str) -> tuple[bool, str]:
    """Tokens, acceptance and the adapter itself are after each sleep what they were before."""
    phases = load(work, name)["sleep"]
    before = phases.pop("before")
    good, shown = True, [f"tau {before['tau']:.3f}"]
    for phase, after in phases.items():
        equal = sum(a == b for a, b in zip(after["tokens"], before["tokens"], strict=True))
        same = after["adapter"] == before["adapter"] and len(before["adapter"]) > 0
        # One may part at a tie, in batches that an asynchronous scheduler put together otherwise.
        good &= equal >= len(before["tokens"]) - 1 and same
        good &= abs(after["tau"] - before["tau"]) < 0.02 * before["tau"]
        shown.append(f"{phase}: {equal} equal, tau {after['tau']:.3f}, adapter same: {same}")
    return good, "; ".join(shown)


def main() -> int:
    work = Path(sys.argv[1])
    good = True
    for check in CHECKS:
        holds, figures = verdict(work, check)
        good &= holds is True
        word = {True: "good", False: "BAD ", None: "none"}[holds]
        print(f"{word} {check}: {figures}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
