"""What the scheduler sees of UNO: one draft width, no row outside a request's blocks, no more
preemptions than stock speculation, and schedules of the width by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine, engine
from prompts import make_prompts
from vllm import SamplingParams

from vllm_uno.vllm_hooks.runner_api import PAD_SLOT_ID

PROMPTS = make_prompts(2048)
B = 4


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def watch_widths(e: Engine) -> list[tuple[int, set[int]]]:
    """Of every step from now on: requests scheduled, and numbers of drafts a decoding request."""
    seen: list[tuple[int, set[int]]] = []
    schedule = e.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens.values()
        seen.append((len(output.num_scheduled_tokens), {len(tokens) for tokens in drafts}))
        return output

    e.scheduler.schedule = watched
    return seen


def watch_rows(e: Engine) -> list[int]:
    """Check, from now on, where every draft row writes; gives the PAD rows of each pass.

    A row of a drafting request writes to its own position's place in a block that the scheduler
    gave this request; all others write nowhere.
    """
    padded: list[int] = []
    proposer = e.speculator
    propose = proposer.propose

    def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        kv_block = e.runner.block_tables.block_sizes[0]
        pad = 0
        for row, request_id in enumerate(batch.req_ids):
            rows = slice(row * B, (row + 1) * B)
            slots = proposer.rows.slots[0, rows].tolist()
            positions = proposer.input_buffers.positions[rows].tolist()
            pad += slots.count(PAD_SLOT_ID)
            request = e.scheduler.requests.get(request_id)
            if not bool(proposer.rows.drafting[row]):
                assert slots == [PAD_SLOT_ID] * B
                continue
            assert positions[-1] < proposer.req_states.max_model_len
            if request is None:
                continue
            (blocks,) = e.scheduler.kv_cache_manager.get_block_ids(request_id)
            for slot, position in zip(slots, positions, strict=True):
                if slot != PAD_SLOT_ID and blocks:  # none: preempted while the step ran
                    assert slot == blocks[position // kv_block] * kv_block + position % kv_block
        padded.append(pad)
        return drafts

    proposer.propose = watched
    return padded


class TestOneEngine:
    @pytest.fixture(scope="class")
    def uno(self, model: Path, adapter: Path) -> Any:
        uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": B}
        with engine(model, uno, max_model_len=192) as e:
            yield e

    def test_the_width_is_uniform_to_the_end_of_requests(self, uno: Engine) -> None:
        """One narrower request, and the whole batch would leave its CUDA graph."""
        widths = watch_widths(uno)
        uno.tokens(PROMPTS, [greedy(n) for n in (1, 2, 3, 5, 8, 13, 17, 22)])
        drafting = [found for _, found in widths if found]
        assert len(drafting) > 5
        assert all(found == {B} for found in drafting)

    def test_rows_stay_in_their_requests_blocks(self, uno: Engine) -> None:
        padded = watch_rows(uno)
        uno.tokens(PROMPTS, greedy(10))
        uno.tokens([PROMPTS[7], PROMPTS[6]], greedy(400))  # to the end of max_model_len
        assert padded and any(padded), "no row was ever past its end"


@pytest.mark.slow
def test_preemptions_are_no_more_than_ngrams(model: Path, adapter: Path) -> None:
    tight: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 14,
        "max_model_len": 256,
    }
    with engine(model, {"uno_lora_path": str(adapter), "num_speculative_tokens": B}, **tight) as e:
        padded = watch_rows(e)
        ours = e.tokens(PROMPTS, greedy(48))
        preempted = e.preemptions
        assert padded
    ngram = {
        "method": "ngram_gpu",
        "num_speculative_tokens": B,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with engine(model, speculative_config=ngram, **tight) as e:
        assert e.tokens(PROMPTS, greedy(48)) == ours
        assert 0 < preempted <= e.preemptions


def test_a_schedule_by_batch_size_is_honoured(model: Path, adapter: Path) -> None:
    """8 requests plain, 3 to 7 with two drafts, fewer with the whole block: tokens are plain's."""
    with engine(model) as e:
        plain = e.tokens(PROMPTS, greedy(24))
    uno = {
        "uno_lora_path": str(adapter),
        "num_speculative_tokens": B,
        "num_speculative_tokens_per_batch_size": [[1, 2, B], [3, 7, 2], [8, 8, 0]],
    }
    params = [greedy(n) for n in (24, 20, 16, 12, 9, 6, 4, 2)]
    with engine(model, uno) as e:
        widths = watch_widths(e)
        tokens = e.tokens(PROMPTS, params)
        assert tokens == [t[: p.max_tokens] for t, p in zip(plain, params, strict=True)]
        assert {width for _, found in widths for width in found} == {2, B}
        whole = [found for requests, found in widths if requests == 8]
        assert whole.count(set()) >= 2
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0 and stats.acceptance[0] == 1.0
        assert stats.proposed[1] > stats.proposed[2] > 0  # two of four, then all
