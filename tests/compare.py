"""Tokens of one run against another's: how many requests agree, and why others part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


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


def first_difference(mine: list[int], theirs: list[int]) -> int:
    """Where two unequal texts of one length part."""
    return next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)


def compare(reference: Path, other: Path) -> Parity:
    plain = json.loads(reference.read_text())
    tokens = json.loads(other.read_text())["tokens"]
    equal, widest = 0, 0.0
    for mine, theirs, gaps in zip(plain["tokens"], tokens, plain["gaps"], strict=True):
        if mine == theirs:
            equal += 1
            continue
        widest = max(widest, gaps[first_difference(mine, theirs)])
    distinct = min(len(set(t)) / len(t) for t in plain["tokens"])
    return Parity(len(tokens), equal, widest, distinct)


def same_seeded(reference: Path, other: Path) -> dict[str, int]:
    """By set of seeded requests (`run_engine.SEEDED`): requests with identical tokens."""
    plain = json.loads(reference.read_text())["seeded"]
    parted = seeded_partings(reference, other)
    return {name: len(plain[name]) - len(parted[name]) for name in plain}


def seeded_partings(reference: Path, other: Path) -> dict[str, dict[int, list[int]]]:
    """By set of seeded requests, of each that differs: the tokens before the first difference."""
    plain, tokens = (json.loads(p.read_text())["seeded"] for p in (reference, other))
    partings: dict[str, dict[int, list[int]]] = {}
    for name in plain:
        partings[name] = {}
        for number, (mine, theirs) in enumerate(zip(plain[name], tokens[name], strict=True)):
            if mine != theirs:
                partings[name][number] = mine[: first_difference(mine, theirs)]
    return partings


def filter_edge(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> float:
    """How far apart the last token that top-k and top-p keep and the first they drop are.

    Args:
        logits: fp64 [V].

    Returns:
        Their difference in z / T. Within rounding, the two may change places.
    """
    ranked = (logits / temperature).sort(descending=True).values
    before = ranked[:top_k].softmax(0).cumsum(0).roll(1)
    before[0] = 0.0
    kept = int((before < top_p).sum())
    return float(ranked[kept - 1] - ranked[kept])
