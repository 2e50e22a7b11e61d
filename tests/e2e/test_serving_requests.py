"""Every request parameter of vLLM's V2 runner, linear mode, against plain vLLM.

What test_greedy.py shows is not repeated here. Tree mode: test_tree_requests.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import request_kinds
from engines import Engine, asynchronous, engine
from logits_processors import Repeat
from request_kinds import (
    GRAMMARS,
    PARAMETERS,
    Answer,
    abort_every_third,
    answers,
    assert_lawful,
    assert_no_block_lost,
    assert_same,
    chat_prompts,
    draft_answers,
    sampled,
    step_through,
)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_uno.bundled import bundled_model

pytestmark = pytest.mark.slow

B = 4
SETTINGS = request_kinds.SETTINGS | {"logits_processors": [Repeat]}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return chat_prompts()


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Iterator[Engine]:
    with engine(bundled_model(), **SETTINGS) as e:
        yield e


@pytest.fixture(scope="module")
def plain_answers(plain: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    return answers(plain, prompts)


@pytest.fixture(scope="module")
def uno(plain_answers: dict[str, Answer]) -> Iterator[Engine]:
    """Scheduled asynchronously, as on a GPU; the server's tests and test_greedy.py are not."""
    with (
        asynchronous(),
        engine(bundled_model(), {"num_speculative_tokens": B}, **SETTINGS) as e,
    ):
        assert isinstance(e.scheduler, AsyncScheduler)
        yield e


@pytest.fixture(scope="module")
def uno_answers(uno: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    return draft_answers(uno, prompts)


@pytest.fixture(autouse=True)
def no_block_is_lost(request: Any) -> Iterator[None]:
    yield
    if "uno" in request.fixturenames:
        assert_no_block_lost(request.getfixturevalue("uno"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter(
    name: str, uno_answers: dict[str, Answer], plain_answers: dict[str, Answer]
) -> None:
    assert_same(uno_answers[name], plain_answers[name])


@pytest.mark.parametrize("name", GRAMMARS)
def test_structured_output(
    name: str, uno_answers: dict[str, Answer], plain_answers: dict[str, Answer]
) -> None:
    assert_same(uno_answers[name], plain_answers[name])
    assert_lawful(name, uno_answers[name])
    if name in ("json", "json-logprobs", "regex", "choice"):
        assert uno_answers[name].reason == "stop", uno_answers[name].text


def test_the_parameters_change_plains_answers(
    plain: Engine, plain_answers: dict[str, Answer], prompts: list[list[int]]
) -> None:
    """Else nothing above would show that UNO heeds them."""
    names = list(GRAMMARS | PARAMETERS)
    greedy_params = SamplingParams(temperature=0.0, max_tokens=24)
    bare = [Answer.of(o) for o in plain.outputs(prompts, greedy_params)]
    same = {
        name
        for i, name in enumerate(names)
        if plain_answers[name].tokens == bare[i % len(prompts)].tokens
    }
    # These change what is told, or nothing.
    silent = {n for n in PARAMETERS if "logprob" in n and n != "logprobs-penalties"}
    silent |= {"no-text", "skip_reading_prefix_cache", "final_only", "structural_tag"}
    assert same <= silent, same - silent
    assert plain_answers["repetition_detection"].reason == "repetition"


@pytest.mark.slow
def test_mixed_sampling(uno: Engine, plain: Engine, prompts: list[list[int]]) -> None:
    """All laws in one batch: lawful ends, and the logprobs of a teacher-forced plain pass."""
    params = sampled()
    outputs = uno.outputs(prompts, params)
    forced = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    reference = plain.outputs(
        forced, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    )
    tokenizer = uno.llm.get_tokenizer()
    for prompt, param, output, want in zip(prompts, params, outputs, reference, strict=True):
        answer = Answer.of(output)
        # A grammar's mask comes before the logprobs: `json-logprobs` compares those.
        for i, token in enumerate(answer.tokens if param.structured_outputs is None else []):
            expected = want.prompt_logprobs[len(prompt) + i][token].logprob
            assert answer.logprobs[i][token] == pytest.approx(expected, abs=1e-3)
        assert answer.reason in ("stop", "length")
        if answer.reason == "length":
            assert len(answer.tokens) == param.max_tokens
        elif answer.stop_reason is None:
            assert answer.tokens[-1] == tokenizer.eos_token_id
        else:
            assert answer.stop_reason in param.stop
            assert len(answer.tokens) >= param.min_tokens
        if param.allowed_token_ids:
            assert set(answer.tokens) <= {*param.allowed_token_ids, tokenizer.eos_token_id}
    assert_lawful("json", Answer.of(outputs[10]))
    assert_lawful("choice", Answer.of(outputs[11]))


@pytest.mark.slow
def test_seeds_do_not_see_the_batch(uno: Engine, prompts: list[list[int]]) -> None:
    """Alone, in pairs, in fives and all together."""
    params = sampled(16)
    together = uno.tokens(prompts, params)
    for batch in (1, 2, 5):
        for start in range(0, len(prompts), batch):
            part = slice(start, start + batch)
            assert uno.tokens(prompts[part], params[part]) == together[part]


def test_seeds(uno: Engine, prompts: list[list[int]]) -> None:
    """As above for plain temperatures; another seed gives another output."""
    texts = [prompts[0]] * 6
    params = [SamplingParams(temperature=1.0, max_tokens=16, seed=i // 2) for i in range(6)]
    together = uno.tokens(texts, params)
    assert together[::2] == together[1::2]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert [uno.tokens([prompts[0]], params[i])[0] for i in (0, 2, 4)] == together[::2]
    assert uno.tokens(prompts[:5] + texts[:1], [params[2]] * 6)[5] == together[2]


@pytest.mark.slow
def test_n_sampled(uno: Engine, prompts: list[list[int]]) -> None:
    """The n completions of a seed differ, and each comes again."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=24)
    first, again = (uno.outputs(prompts[:2], params) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        found = [tuple(c.token_ids) for c in a.outputs]
        assert len(set(found)) == 3
        assert found == [tuple(c.token_ids) for c in b.outputs]


def test_streamed_parts_make_the_whole(uno: Engine, prompts: list[list[int]]) -> None:
    whole = uno.outputs(prompts[:2], SamplingParams(temperature=0.0, max_tokens=40))
    params = SamplingParams(temperature=0.0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    parts: dict[str, list[Any]] = {"a": [], "b": []}
    requests = [(name, prompts[i], params, 0) for i, name in enumerate("ab")]
    for outputs in step_through(uno, requests):
        for output in outputs:
            parts[output.request_id].append(output.outputs[0])
    for name, want in zip("ab", whole, strict=True):
        tokens = [token for part in parts[name] for token in part.token_ids]
        assert tokens == list(want.outputs[0].token_ids)
        assert "".join(p.text for p in parts[name]) == want.outputs[0].text
        assert max(len(p.token_ids) for p in parts[name]) > 1  # a cycle's tokens come together


def test_priority(uno: Engine, prompts: list[list[int]]) -> None:
    """Twenty four requests for twelve places: the urgent ones, though last, are done first."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    want = uno.tokens(prompts, params)
    requests = [(f"{i}", prompts[i % 12], params, 1 if i < 12 else 0) for i in range(24)]
    done = {}
    for outputs in step_through(uno, requests):
        for output in outputs:
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    assert {int(name) for name in list(done)[:12]} == set(range(12, 24))
    assert all(tokens == want[int(name) % 12] for name, tokens in done.items())


@pytest.mark.slow
def test_aborts_lose_no_block(
    uno: Engine, plain_answers: dict[str, Answer], prompts: list[list[int]]
) -> None:
    """Grammars among them."""
    abort_every_third(uno, plain_answers, prompts, [*GRAMMARS, *PARAMETERS])


def test_beam_search(uno: Engine, plain: Engine, prompts: list[list[int]]) -> None:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6)
    found, want = (
        e.llm.beam_search([{"prompt_token_ids": prompts[1]}], params)[0].sequences
        for e in (uno, plain)
    )
    assert [s.tokens for s in found] == [s.tokens for s in want]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ({"logit_bias": {5000: 1.0}}, "logit_bias"),
        ({"logprobs": 900}, "logprobs"),
        ({"logprob_token_ids": [5, 77]}, "logprob_token_ids"),
        ({"structured_outputs": StructuredOutputsParams(regex="[a-")}, "regex"),
        ({"structured_outputs": StructuredOutputsParams(grammar="root ::= (")}, "grammar"),
        ({"trace_decode_token_ids": [5, 6]}, "speculative decoding|trace"),
    ],
)
def test_bad_requests_harm_nobody(
    params: dict[str, Any], text: str, uno: Engine, prompts: list[list[int]]
) -> None:
    with pytest.raises((ValueError, VLLMValidationError), match=text):
        uno.outputs(prompts[:1], SamplingParams(**params))
    assert uno.tokens(prompts[:1], SamplingParams(temperature=0.0, max_tokens=4))[0]
