"""Tensor parallelism over processes, data parallelism, and what happens when a worker dies.

The draft itself (slices of A and B, logits) is test_draft.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import (
    check_data_parallel,
    check_killed_worker,
    drafts_of_ranks,
    sampled,
    tokens,
    workers,
)
from prompts import make_prompts
from vllm import SamplingParams

from vllm_uno.inspect_engine import draft_stats

pytestmark = pytest.mark.slow

PROMPTS = make_prompts(2048)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
B = 4
TREE = {"num_speculative_tokens": 6, "uno_tree_top_k": 4, "uno_block_size": B}
LINEAR = {"num_speculative_tokens": B}


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    with workers(model) as llm:
        return tokens(llm, PROMPTS, GREEDY)


class TestTensorParallel:
    """Two ranks."""

    @pytest.mark.parametrize("uno", [LINEAR, TREE], ids=["linear", "tree"])
    def test_greedy_is_plains(
        self, uno: dict[str, Any], plain: list[list[int]], model: Path, adapter: Path
    ) -> None:
        with workers(model, {"uno_lora_path": str(adapter), **uno}) as llm:
            assert tokens(llm, PROMPTS, GREEDY) == plain
            stats = draft_stats(llm)
            assert stats.cycles > 50 and stats.acceptance[0] == 1.0
            ranks = drafts_of_ranks(llm, PROMPTS, sampled(len(PROMPTS)))
            assert len(ranks) == 2 and len(ranks[0]) == len(ranks[1]) > 4
            for one, other in zip(*ranks, strict=True):
                assert torch.equal(one, other)
            # It is noise that was compared: ids past the seed differ within a pass.
            assert len(ranks[0][-1][:, 1:].unique()) > 1


def test_a_killed_worker_ends_the_server(tmp_path: Path) -> None:
    check_killed_worker(tmp_path)


def test_two_data_parallel_engines_serve(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_data_parallel(tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("uno"))
