"""Every request parameter in tree mode: plain vLLM's answers, seeded sampling included.

The noise is fp64 and the logprobs are those of the processed law, which no other test sets.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from engines import Engine, asynchronous, engine
from logits_processors import Repeat
from peak import Peak
from request_kinds import (
    GRAMMARS,
    PARAMETERS,
    SETTINGS,
    Answer,
    abort_every_third,
    answers,
    assert_lawful,
    assert_no_block_lost,
    assert_same,
    chat_prompts,
    draft_answers,
    greedy,
    sampled,
    step_through,
)
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_uno.bundled import bundled_model
from vllm_uno.tree import verification

pytestmark = pytest.mark.slow

TREE = {"uno_mode": "tree", "uno_block_size": 6, "uno_tree_top_k": 6, "num_speculative_tokens": 16}
NOISE_AND_LOGPROBS = {"use_fp64_gumbel": True, "logprobs_mode": "processed_logprobs"}
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)
THREE = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=24)
# A user's processor makes a chain of every request: `test_a_custom_processor`.
NAMES = [name for name in (*GRAMMARS, *PARAMETERS) if name != "extra_args"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return chat_prompts()


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[str, Any]:
    """Plain vLLM's answers, made once."""
    with engine(bundled_model(), **SETTINGS, **NOISE_AND_LOGPROBS) as e:
        beams = e.llm.beam_search([{"prompt_token_ids": prompts[1]}], BEAMS)[0].sequences
        return {
            "answers": answers(e, prompts, NAMES),
            "sampled": [Answer.of(o) for o in e.outputs(prompts, sampled())],
            "beams": [s.tokens for s in beams],
            "n": [[list(c.token_ids) for c in o.outputs] for o in e.outputs(prompts[:2], THREE)],
        }


@pytest.fixture(scope="module")
def uno(plain: dict[str, Any]) -> Iterator[Engine]:  # one engine at a time: `plain` first
    """Scheduled asynchronously, as on a GPU; test_tree.py is not."""
    with asynchronous(), engine(bundled_model(), TREE, **SETTINGS, **NOISE_AND_LOGPROBS) as e:
        assert isinstance(e.scheduler, AsyncScheduler)
        yield e


@pytest.fixture(scope="module")
def uno_answers(uno: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    return draft_answers(uno, prompts, NAMES)


@pytest.fixture(autouse=True)
def no_block_is_lost(request: Any) -> Iterator[None]:
    yield
    if "uno" in request.fixturenames:
        assert_no_block_lost(request.getfixturevalue("uno"))


@pytest.mark.parametrize("name", NAMES)
def test_parameter(name: str, uno_answers: dict[str, Answer], plain: dict[str, Any]) -> None:
    assert_same(uno_answers[name], plain["answers"][name])
    if name in GRAMMARS:
        assert_lawful(name, uno_answers[name])


def test_seeded_sampling(uno: Engine, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    """Trees and chains in one batch: tokens, texts, ends and logprobs."""
    uno.speculator.counters.reset()
    for output, want in zip(uno.outputs(prompts, sampled()), plain["sampled"], strict=True):
        assert_same(Answer.of(output), want)
    assert uno.speculator.counters.snapshot().tokens_per_cycle > 2


def test_seeds_do_not_see_the_batch(
    uno: Engine, plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    for start in range(0, len(prompts), 5):
        part = slice(start, start + 5)
        tokens = uno.tokens(prompts[part], sampled()[part])
        assert tokens == [want.tokens for want in plain["sampled"][part]]


def test_fp32_noise_is_other_noise(
    uno: Engine, plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    """Else the tokens above would not show whose noise is drawn."""
    with mock.patch.object(uno.runner.sampler, "use_fp64_gumbel", False):
        tokens = uno.tokens(prompts[:3], sampled()[:3])
    assert tokens != [want.tokens for want in plain["sampled"][:3]]


def test_raw_logprobs_are_others(
    uno: Engine, plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    with mock.patch.object(uno.runner.sampler, "logprobs_mode", "raw_logprobs"):
        found = [Answer.of(o) for o in uno.outputs(prompts[:3], sampled()[:3])]
    assert [f.tokens for f in found] == [want.tokens for want in plain["sampled"][:3]]
    assert found[2].logprobs != plain["sampled"][2].logprobs  # top_k 8


def test_n_sampled(uno: Engine, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    outputs = uno.outputs(prompts[:2], THREE)
    assert [[list(c.token_ids) for c in o.outputs] for o in outputs] == plain["n"]
    assert all(len({tuple(tokens) for tokens in of_one}) > 1 for of_one in plain["n"])


def test_streamed_parts_make_the_whole(
    uno: Engine, plain: dict[str, Any], prompts: list[list[int]]
) -> None:
    name = "stop-included"
    at = NAMES.index(name) % len(prompts)
    params = greedy(name, prompts[at])
    params.output_kind = RequestOutputKind.DELTA
    parts = [
        output.outputs[0]
        for outputs in step_through(uno, [("a", prompts[at], params, 0)])
        for output in outputs
    ]
    want = plain["answers"][name]
    assert [token for part in parts for token in part.token_ids] == want.tokens
    assert "".join(part.text for part in parts) == want.text
    assert max(len(part.token_ids) for part in parts) > 1  # a cycle's tokens come together


def test_priority(uno: Engine, prompts: list[list[int]]) -> None:
    """Twenty four requests for twelve places: the urgent ones, though last, are done first."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [(f"{i}", prompts[i % 12], params, 1 if i < 12 else 0) for i in range(24)]
    done = [
        int(output.request_id)
        for outputs in step_through(uno, requests)
        for output in outputs
        if output.finished
    ]
    assert set(done[:12]) == set(range(12, 24))


def test_aborts_lose_no_block(uno: Engine, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    abort_every_third(uno, plain["answers"], prompts, NAMES)


def test_beam_search(uno: Engine, plain: dict[str, Any], prompts: list[list[int]]) -> None:
    found = uno.llm.beam_search([{"prompt_token_ids": prompts[1]}], BEAMS)[0].sequences
    assert [s.tokens for s in found] == plain["beams"]


def test_verification_holds_one_chunk(uno: Engine, prompts: list[list[int]]) -> None:
    """Of processed logits, whatever is asked for; memory.sampling_peak has room for two."""
    sampler = uno.runner.rejection_sampler
    vocab_size, chunk_rows = uno.runner.sampler.sampling_states.vocab_size, 40
    peaks, rows = [], []

    def measured(logits: Any, *args: Any) -> Any:
        with Peak() as seen:
            output = sampler(logits, *args)
        peaks.append(seen.peak)
        rows.append(len(logits))
        return output

    with (
        mock.patch.object(verification, "get_max_chunk_logits", lambda vocab_size: chunk_rows),
        mock.patch.object(uno.runner, "rejection_sampler", measured),
    ):
        uno.tokens(prompts, sampled(8))
    assert max(rows) > 4 * chunk_rows
    chunk = 4 * chunk_rows * vocab_size
    # Beside it: noise's block maxima, rows' numbers, logprobs.
    assert 0.8 * chunk < max(peaks) < 1.25 * chunk


def test_a_custom_processor(prompts: list[list[int]]) -> None:
    """Nothing is known of what it reads: every request is a chain, and plain's tokens come out."""
    settings: dict[str, Any] = SETTINGS | {"logits_processors": [Repeat]}
    names = ["extra_args", "allowed_token_ids", "logprobs-5", "json"]
    with engine(bundled_model(), **settings) as e:
        want = answers(e, prompts, names)
        assert want["extra_args"].tokens != e.tokens(
            prompts[:1], SamplingParams(temperature=0.0, max_tokens=24)
        )
    with engine(bundled_model(), TREE, **settings) as e:
        found = answers(e, prompts, names)
        assert e.speculator.memory.needs_path.sum() == len(names)
    for name in names:
        assert_same(found[name], want[name])
