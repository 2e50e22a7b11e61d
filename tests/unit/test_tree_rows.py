"""Positions and tokens of verify rows, against the plain rules."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_uno.tree.rows import gather_rows, write_depth_positions

V = 5
SLOTS = 4


@dataclass
class Batch:
    """What the kernels read of vLLM's InputBatch."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    idx_mapping: torch.Tensor
    logits_indices: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor


@st.composite
def batches(draw: Any) -> tuple[Batch, int, torch.Tensor, torch.Tensor]:
    """A batch, its leading requests with drafts, depths by slot, prefill lengths by slot."""
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    drafted = draw(st.integers(0, len(slots)))
    positions, starts, cu, indices, local, expanded = [], [0], [0], [], [], []
    for r, slot in enumerate(slots):
        drafts = draw(st.integers(1, V)) if r < drafted else 0
        rows = drafts + 1 if drafts else draw(st.integers(1, 4))  # a prefill has one with logits
        context = draw(st.integers(0, 50))
        positions += range(context, context + rows)
        starts.append(starts[-1] + rows)
        cu.append(cu[-1] + drafts + 1)
        indices += range(starts[-1] - drafts - 1, starts[-1])
        local += range(drafts + 1)
        expanded += [slot] * (drafts + 1)
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    depths = torch.zeros(SLOTS, V, dtype=torch.int32)
    for node in range(1, V):
        depths[:, node] = torch.randint(1, node + 1, (SLOTS,), generator=generator)
    prefill = torch.randint(0, 60, (SLOTS,), generator=generator, dtype=torch.int32)
    ids = torch.randint(0, 1000, (starts[-1],), generator=generator, dtype=torch.int32)
    batch = Batch(
        ids,
        torch.tensor(positions),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(cu, dtype=torch.int32),
        torch.tensor(slots),
        torch.tensor(indices),
        torch.tensor(expanded),
        torch.tensor(local, dtype=torch.int32),
    )
    return batch, drafted, depths, prefill


@given(batches())
def test_positions_are_those_of_depths(case: Any) -> None:
    batch, drafted, depths, _ = case
    want = batch.positions.tolist()
    for r in range(drafted):
        first, end = batch.query_start_loc[r : r + 2].tolist()
        for node in range(end - first - 1):
            depth = int(depths[batch.idx_mapping[r], node])
            want[first + 1 + node] = want[first] + 1 + depth
    write_depth_positions(batch, drafted, depths)
    assert batch.positions.tolist() == want


@given(batches())
def test_rows_tell_drafts_from_placeholders(case: Any) -> None:
    batch, drafted, depths, prefill = case
    context = {
        slot: int(batch.positions[batch.logits_indices[batch.cu_num_logits[r]]])
        for r, slot in enumerate(batch.idx_mapping.tolist())
    }
    write_depth_positions(batch, drafted, depths)
    tokens, positions = gather_rows(batch, prefill)
    assert positions.tolist() == batch.positions[batch.logits_indices].tolist()
    for row, slot in enumerate(batch.expanded_idx_mapping.tolist()):
        placeholder = batch.expanded_local_pos[row] > 0 and context[slot] < prefill[slot]
        want = -1 if placeholder else int(batch.input_ids[batch.logits_indices[row]])
        assert int(tokens[row]) == want
