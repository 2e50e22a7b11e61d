"""What UNO says it takes is what is allocated, and the profile holds what sampling will."""

from types import SimpleNamespace

import pytest
import torch
from peak import Peak
from torch import nn

from vllm_uno.memory import Footprint, footprint, sampling_peak

CPU = torch.device("cpu")


def test_footprint_counts_each_storage_once() -> None:
    view = nn.Module()
    view.layer = nn.Linear(4, 4)  # the target's weights: not ours
    view.layer.register_buffer("uno_a", torch.zeros(8, 4, dtype=torch.bfloat16))
    view.layer.register_buffer("uno_b0", torch.zeros(4, 8, dtype=torch.bfloat16))
    view.layer.register_buffer("rotary", torch.zeros(100))
    shared = torch.zeros(6, dtype=torch.int32)
    view.register_buffer("uno_shared", shared)
    view.layer.register_buffer("uno_shared", shared[:6])
    quantised = torch.zeros(12, dtype=torch.float8_e4m3fn)
    view.layer.register_buffer("uno_wq", quantised)  # counted by itself
    laws = torch.zeros(3, 2, 50)
    owner = SimpleNamespace(
        ids=torch.zeros(7, dtype=torch.int64), name="x", laws=laws[1:], none=None
    )
    other = SimpleNamespace(
        meta=torch.zeros(9, device="meta"), flags=torch.zeros(5, dtype=torch.bool)
    )
    found = footprint(view, laws, [torch.zeros(10)], CPU, owner, other)
    assert found == Footprint(
        adapter=2 * 64 + 24,
        draft_laws=3 * 2 * 50 * 4,
        draft_head=40,
        fp8_weights=12,
        buffers=7 * 8 + 5,
    )
    assert found.total == 152 + 1200 + 40 + 12 + 61


def test_line_leaves_out_what_is_not_there() -> None:
    line = Footprint(3 * 2**29, 2**30, 0, 0, 2**28).line()
    assert line == "2.75 GiB beside the model: adapter 1.50, draft laws 1.00, buffers 0.25"


@pytest.mark.parametrize(
    "rows", [(20, 0, 20, 25, 25), (512, 0, 128, 576, 300), (64, 64, 16, 20, 5)]
)
def test_sampling_peak_by_formula(rows: tuple[int, int, int, int, int]) -> None:
    draft_rows, copied, filtered, verify_rows, chunk = rows
    hidden, vocab = 8, 500
    like = torch.zeros(1, hidden, dtype=torch.bfloat16)
    with Peak() as seen, torch.inference_mode():
        sampling_peak(
            lambda h: torch.empty(len(h), vocab, dtype=h.dtype),
            lambda h: torch.empty(len(h), vocab, dtype=h.dtype),
            like,
            draft_rows=draft_rows,
            copied_rows=copied,
            filtered_rows=filtered,
            verify_rows=verify_rows,
            chunk_rows=chunk,
        )
    draft = (draft_rows * (2 + 4) + copied * 2 + filtered * 4) * vocab
    verify = (verify_rows * 2 + chunk * 8) * vocab
    inputs = max(draft_rows, verify_rows) * hidden * 2
    assert max(draft, verify) <= seen.peak <= max(draft, verify) + inputs
