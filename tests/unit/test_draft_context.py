"""Block tables of a draft that reads a part of the context, against their oracle."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from vllm_uno.draft_context import SINK_BLOCKS, DraftBlocks, shorten_reference  # noqa: E402
from vllm_uno.proposer import UnoProposer  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import DraftModelSpeculator  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60 * 8), min_size=1, max_size=5),
    kv_block=st.sampled_from([8, 16, 32]),
    context=st.one_of(st.integers(1, 300), st.just(10**6)),
    block=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_shortened_tables(
    lengths: list[int], kv_block: int, context: int, block: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 900, (8, 60), generator=gen, dtype=torch.int32)
    lengths = [min(n, 60 * kv_block) for n in lengths]
    seq_lens = torch.tensor([*lengths, 0, 77][:8], dtype=torch.int32)
    n = len(lengths)
    fake = SimpleNamespace(input_block_tables=[table.to(DEVICE)], block_sizes=[kv_block])
    blocks = DraftBlocks(fake, context, block)
    out = blocks.table.fill_(POISON)
    shortened = seq_lens.clone().to(DEVICE)
    blocks.shorten(shortened, n)
    want, want_lengths = shorten_reference(table[:n], seq_lens[:n], kv_block, blocks._last)
    assert shortened[:n].tolist() == want_lengths.tolist()
    assert shortened[n:].tolist() == seq_lens[n:].tolist()  # padding's are not touched
    for row, kept, length, new in zip(
        out.tolist(), want, lengths, want_lengths.tolist(), strict=False
    ):
        assert row[: len(kept)] == kept
        assert set(row[len(kept) :]) <= {POISON}
        assert len(kept) <= blocks.kept_blocks and new <= blocks.max_seq_len
        assert (length - new) % kv_block == 0
        if new < length:
            # Beside the sink the rows' own tokens are there, and `context` before the seed.
            assert new - SINK_BLOCKS * kv_block >= context + block
            assert len(kept) == SINK_BLOCKS + blocks._last


def test_it_has_what_vllm_reads_of_block_tables() -> None:
    source = inspect.getsource(DraftModelSpeculator) + inspect.getsource(UnoProposer)
    read = set(re.findall(r"self\.block_tables\.(\w+)", source))
    assert "input_block_tables" in read
    fake = SimpleNamespace(input_block_tables=[torch.zeros(2, 9)], block_sizes=[16])
    blocks = DraftBlocks(fake, 16, 4)
    # Beside context parallelism, which is refused, and slots, which the draft has its own of.
    missing = {name for name in read if not hasattr(blocks, name)}
    assert missing <= {"cp_rank", "cp_interleave", "slot_mappings"}
    assert [t.shape[0] for t in blocks.get_dummy_block_tables(1)] == [1]


SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=64)


@pytest.mark.parametrize(
    "specs",
    [[WINDOW], [FULL, WINDOW], [FULL, FULL], [FullAttentionSpec(**SIZES, sliding_window=64)]],
)
def test_models_with_windows_are_refused(specs: list[FullAttentionSpec]) -> None:
    def config(specs: list[FullAttentionSpec]) -> SimpleNamespace:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return SimpleNamespace(kv_cache_groups=groups)

    UnoProposer._refuse_partial_context(config([FULL]))
    with pytest.raises(ValueError, match=r"uno_draft_context needs a model with one kind"):
        UnoProposer._refuse_partial_context(config(specs))
