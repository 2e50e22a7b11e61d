"""The helpers that judge one run's tokens against another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compare import filter_edge, same_seeded, seeded_partings


def test_partings_have_what_both_said_before(tmp_path: Path) -> None:
    said = {"a": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "b": [[1, 1, 1]]}
    other = {"a": [[1, 2, 3], [4, 0, 6], [0, 8, 9]], "b": [[1, 1, 1]]}
    for name, tokens in (("plain", said), ("tree", other)):
        (tmp_path / name).write_text(json.dumps({"seeded": tokens}))
    files = (tmp_path / "plain", tmp_path / "tree")
    assert seeded_partings(*files) == {"a": {1: [4], 2: []}, "b": {}}
    assert same_seeded(*files) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(20, 0.7, 3), (20, 0.4, 1), (20, 1.0, 20), (2, 0.7, 2), (2, 0.4, 1)],
)
def test_edge_lies_behind_what_is_kept(top_k: int, top_p: float, kept: int) -> None:
    shares = torch.tensor([0.45, 0.2, 0.15, 0.1], dtype=torch.float64)
    rest = torch.linspace(2, 1, 28, dtype=torch.float64)
    shares = torch.cat((shares, 0.1 * rest / rest.sum()))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    logits = 0.8 * shares.log()[order]
    ranked = shares.log()
    edge = filter_edge(logits, temperature=0.8, top_k=top_k, top_p=top_p)
    assert edge == pytest.approx(float(ranked[kept - 1] - ranked[kept]))
