"""Tokens of one run against another's: how many requests agree, and why others part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parity:
    """Attributes:
    equal: requests with identical tokens, of `requests`.
    widest_gap: largest top-2 gap (nat) of the reference at a first divergence.
    distinct: least share of distinct tokens within one request.
    """

    requests: int
    equal: int
    widest_gap: float
    distinct: float


def compare(reference: Path, other: Path) -> Parity:
    plain = json.loads(reference.read_text())
    tokens = json.loads(other.read_text())["tokens"]
    equal, widest = 0, 0.0
    for mine, theirs, gaps in zip(plain["tokens"], tokens, plain["gaps"], strict=True):
        if mine == theirs:
            equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        widest = max(widest, gaps[at])
    distinct = min(len(set(t)) / len(t) for t in plain["tokens"])
    return Parity(len(tokens), equal, widest, distinct)


def same_seeded(reference: Path, other: Path) -> dict[str, int]:
    """By set of seeded requests (`run_engine.SEEDED`): requests with identical tokens."""
    plain, tokens = (json.loads(p.read_text())["seeded"] for p in (reference, other))
    return {
        name: sum(a == b for a, b in zip(plain[name], tokens[name], strict=True)) for name in plain
    }
