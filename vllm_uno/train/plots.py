"""Plots of a training run and of an adapter's acceptance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _figure(width: float, panels: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(width, 4), constrained_layout=True, squeeze=False)


def plot_training(log: Path, out: Path) -> None:
    """Losses, and held-out tau and acceptance, against steps.

    Args:
        log: log.jsonl of a run.
        out: PNG to write.

    """
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [e for e in entries if "loss" in e]
    measured = [e for e in entries if "tau" in e]
    figure, axes = _figure(13, 3)
    left, middle, right = axes[0]
    steps = [e["step"] for e in losses]
    for name in ("tv", "ce", "kl"):
        left.plot(steps, [e[name] for e in losses], label=name.upper())
    left.set(xlabel="step", ylabel="loss (mean over trained rows)", title="losses", yscale="log")
    left.legend()
    middle.plot([e["step"] for e in measured], [e["tau"] for e in measured], marker="o")
    middle.set(xlabel="step", ylabel="tokens per cycle", title="held-out tau")
    for number in range(len(measured[0]["acceptance"]) if measured else 0):
        right.plot(
            [e["step"] for e in measured],
            [e["acceptance"][number] for e in measured],
            label=str(number + 1),
        )
    right.set(xlabel="step", ylabel="share of cycles", title="held-out acceptance by position")
    right.legend(fontsize="small", ncols=2)
    for before, after in itertools.pairwise(losses):
        if before["block_size"] != after["block_size"]:
            for axis in (left, middle, right):
                axis.axvline(before["step"], color="grey", linewidth=0.5)
    figure.savefig(out, dpi=120)


def plot_acceptance(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Acceptance by position, a line for each row of `eval-adapter`'s table.

    Args:
        rows: with block_size, temperature, tau and acceptance.
        out: PNG to write.

    """
    figure, axes = _figure(7, 1)
    axis = axes[0][0]
    for row in rows:
        positions = range(1, len(row["acceptance"]) + 1)
        label = f"B={row['block_size']}, T={row['temperature']:g}: tau {row['tau']:.2f}"
        axis.plot(positions, row["acceptance"], marker="o", label=label)
    axis.set(xlabel="position", ylabel="share of cycles accepted so far", ylim=(0, 1.02))
    axis.legend()
    figure.savefig(out, dpi=120)
