"""Imposed acceptance: as many nodes as asked for, on average, and lawful paths."""

import pytest
import torch

from vllm_uno.tree.synthetic import impose_paths

V = 6


def impose(rates, rows, row_tokens, positions, slots):
    n = len(rows)
    out = {
        "path": torch.full((n, V + 1), -7, dtype=torch.int32),
        "num_sampled": torch.full((n,), -7, dtype=torch.int32),
        "sampled": torch.full((n, V + 1), -7, dtype=torch.int64),
    }
    cu = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    target = torch.arange(int(cu[-1])) + 500
    impose_paths(
        *out.values(),
        target_tokens=target,
        row_tokens=row_tokens,
        positions=positions,
        cu_num_logits=cu,
        idx_mapping=torch.tensor(slots),
        seeds=torch.arange(n) * 11 + 3,
        rates=torch.tensor(rates),
    )
    return out, cu, target


def test_last_nodes_are_accepted():
    rows = [V + 1, 3, 1]
    tokens = torch.arange(sum(rows), dtype=torch.int32) + 100
    slots = [2, 0, 1]
    rates = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    out, cu, target = impose(rates, rows, tokens, torch.arange(sum(rows)), slots)
    assert out["num_sampled"].tolist() == [4, 3, 1]  # never more than there are
    for r, (count, accepted) in enumerate(zip(rows, (3, 2, 0), strict=True)):
        path = [0, *range(count - accepted, count)] + [0] * (V - accepted)
        assert out["path"][slots[r]].tolist() == path
        first = int(cu[r])
        last = first + path[accepted]
        emitted = [*tokens[first + count - accepted : first + count].tolist(), int(target[last])]
        assert out["sampled"][r].tolist() == emitted + [0] * (V - accepted)


def test_placeholders_are_never_accepted():
    tokens = torch.full((V + 1,), -1, dtype=torch.int32)
    out, _, _ = impose([1.0] * V, [V + 1], tokens, torch.arange(V + 1), [0])
    assert out["num_sampled"].tolist() == [1]


def test_mean_is_that_of_the_rates():
    rates = [0.9, 0.6, 0.5, 0.25, 0.0, 0.0]
    n = 1500
    rows = [V + 1] * n
    positions = torch.arange(n).repeat_interleave(V + 1)
    out, _, _ = impose(
        rates, rows, torch.ones(n * (V + 1), dtype=torch.int32), positions, list(range(n))
    )
    assert out["num_sampled"].float().mean() == pytest.approx(1 + sum(rates), abs=0.12)
