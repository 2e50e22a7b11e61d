"""Every request parameter of vLLM's V2 runner, linear mode, against plain vLLM.

The trained model drafts well, so that most rows tested are drafts: with a random adapter nearly
every cycle would end at its first row. What test_greedy.py shows is not repeated here.
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from engines import Engine, engine
from logits_processors import Repeat
from vllm import SamplingParams
from vllm.config import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from vllm_uno.bundled import as_chat, bundled_model, problems

pytestmark = pytest.mark.slow  # not yet confirmed within the time of `make test`

B = 4
# Of both engines.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 12,
    "scheduling_policy": "priority",
    "logits_processors": [Repeat],
    # No whitespace without end: a model that knows no JSON likes it best.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "reasoning_config": ReasoningConfig(
        reasoning_start_str="<|assistant|>", reasoning_end_str=" Therefore"
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "left": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "left", "kinds"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= sum " = " number
sum ::= number (" + " number)+
number ::= [1-9] [0-9]?
"""
REGEX = r"[A-Z][a-z]{2,5} has [0-9]{1,3} left\."
CHOICES = ["marbles and nuts", "marbles and keys", "nothing"]
TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f>"],
    }
)


def structured(**kind: Any) -> dict[str, Any]:
    return {"max_tokens": 48, "structured_outputs": StructuredOutputsParams(**kind)}


GRAMMARS: dict[str, dict[str, Any]] = {
    "json": structured(json=SCHEMA),
    "json-logprobs": {**structured(json=SCHEMA), "logprobs": 3},
    "json-text": structured(json=json.dumps(SCHEMA)),
    "json_object": structured(json_object=True),
    "regex": structured(regex=REGEX),
    "grammar": structured(grammar=GRAMMAR),
    "choice": structured(choice=CHOICES),
    "structural_tag": structured(structural_tag=TAG),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 2.0, "max_tokens": 48},
    "presence_penalty": {"presence_penalty": -1.5},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.6},
    "logit_bias": {"logit_bias": {300: 14.0, 17: -9.0, 401: 12.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(4, 900, 2))},
    "bad_words": {"bad_words": [".", "gives"]},
    "min_tokens": {"min_tokens": 60, "max_tokens": 62},
    "min_tokens-stop_token_ids": {"min_tokens": 15, "stop_token_ids": list(range(10, 60))},
    "stop": {"stop": [". ", "has"]},
    "stop-included": {"stop": ["."], "include_stop_str_in_output": True, "min_tokens": 4},
    "stop_token_ids": {"stop_token_ids": list(range(4, 40))},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 66},
    "special_tokens": {"skip_special_tokens": False, "max_tokens": 66},
    "no-text": {"detokenize": False},
    "extra_args": {"extra_args": {"repeat": 12.0}},
    "thinking_token_budget": {"thinking_token_budget": 9},
    "repetition_detection": {
        "logit_bias": {17: 60.0},
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=2, min_pattern_size=1, min_count=5
        ),
    },
    "logprobs-0": {"logprobs": 0},
    "logprobs-5": {"logprobs": 5},
    "logprobs-flat": {"logprobs": 3, "flat_logprobs": True},
    "logprobs-penalties": {"logprobs": 4, "repetition_penalty": 1.3},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "prompt_logprobs-0": {"prompt_logprobs": 0, "logprobs": 2},
    "prompt_logprob_token_ids": {"prompt_logprob_start": 2},  # ids: by the prompt
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "final_only": {"output_kind": RequestOutputKind.FINAL_ONLY},
}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.8, "logit_bias": {300: 2.0}, "frequency_penalty": 0.4},
    {"temperature": 1.0, "allowed_token_ids": list(range(4, 1000, 2))},
    {"temperature": 1.0, "stop": ["."], "min_tokens": 5},
    {"temperature": 1.0, **GRAMMARS["json"]},
    {"temperature": 1.5, **GRAMMARS["choice"]},
]


def greedy(name: str, prompt: list[int]) -> SamplingParams:
    # vLLM writes into a request's structured output parameters.
    kind = {"temperature": 0.0, "max_tokens": 24, **copy.deepcopy((GRAMMARS | PARAMETERS)[name])}
    if name == "prompt_logprob_token_ids":
        kind[name] = [[5, token] for token in prompt[3:]]
    return SamplingParams(**kind)


def sampled(size: int = 20) -> list[SamplingParams]:
    return [
        SamplingParams(
            **{"logprobs": 2, "seed": 100 + i, **copy.deepcopy(kind), "max_tokens": size}
        )
        for i, kind in enumerate(SAMPLED)
    ]


@dataclass
class Answer:
    """What a user sees of one completion."""

    tokens: list[int]
    text: str
    reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float] | None] | None

    @classmethod
    def of(cls, output: Any, index: int = 0) -> "Answer":
        done = output.outputs[index]
        return cls(
            list(done.token_ids),
            done.text,
            done.finish_reason,
            done.stop_reason,
            values(done.logprobs),
            values(output.prompt_logprobs),
        )


def values(logprobs: Any) -> Any:
    """By token id; without those that a grammar forbids, of which any may be among the best."""
    if logprobs is None:
        return None
    return [
        at and {token: entry.logprob for token, entry in at.items() if entry.logprob > -math.inf}
        for at in logprobs
    ]


def assert_same(got: Answer, want: Answer) -> None:
    assert got.tokens == want.tokens
    assert got.text == want.text
    assert (got.reason, got.stop_reason) == (want.reason, want.stop_reason)
    for ours, theirs in (
        (got.logprobs, want.logprobs),
        (got.prompt_logprobs, want.prompt_logprobs),
    ):
        assert (ours is None) == (theirs is None)
        for at, expected in zip(ours or [], theirs or [], strict=True):
            if expected is None:
                assert at is None
                continue
            assert at.keys() == expected.keys()
            assert at == pytest.approx(expected, abs=1e-3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(bundled_model()))
    return [tokenizer.encode(as_chat(p.question)) for p in problems.generate("test", 12)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Iterator[Engine]:
    with engine(bundled_model(), **SETTINGS) as e:
        yield e


@pytest.fixture(scope="module")
def plain_answers(plain: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    """By parameter, each alone with a prompt of its own, all in one batch."""
    return answers(plain, prompts)


def answers(e: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    names = [*GRAMMARS, *PARAMETERS]
    texts = [prompts[i % len(prompts)] for i in range(len(names))]
    outputs = e.outputs(texts, [greedy(n, t) for n, t in zip(names, texts, strict=True)])
    return {name: Answer.of(output) for name, output in zip(names, outputs, strict=True)}


@pytest.fixture(scope="module")
def uno(plain_answers: dict[str, Answer]) -> Iterator[Engine]:
    with engine(bundled_model(), {"num_speculative_tokens": B}, **SETTINGS) as e:
        yield e


@pytest.fixture(scope="module")
def uno_answers(uno: Engine, prompts: list[list[int]]) -> dict[str, Answer]:
    uno.speculator.counters.reset()
    found = answers(uno, prompts)
    assert uno.speculator.counters.snapshot().tokens_per_cycle > 2, "drafts must be accepted"
    return found


@pytest.fixture(autouse=True)
def no_block_is_lost(request: Any) -> Iterator[None]:
    yield
    if "uno" in request.fixturenames:
        e = request.getfixturevalue("uno")
        assert not e.llm.llm_engine.has_unfinished_requests()
        assert free_blocks(e) == total_blocks(e)


def free_blocks(e: Engine) -> int:
    return e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def total_blocks(e: Engine) -> int:
    return e.runner.kv_cache_config.num_blocks - 1  # one is vLLM's null block


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


def assert_lawful(name: str, answer: Answer) -> None:
    """The text keeps to its grammar, to the end unless it was cut."""
    if answer.reason != "stop" or name == "structural_tag":
        return
    if name.startswith("json-") or name == "json":
        assert lawful_json(json.loads(answer.text))
    elif name == "json_object":
        json.loads(answer.text)
    elif name == "regex":
        assert re.fullmatch(REGEX, answer.text)
    elif name == "grammar":
        assert re.fullmatch(r"[1-9]\d?( \+ [1-9]\d?)+ = [1-9]\d?", answer.text)
    else:
        assert answer.text in CHOICES


def lawful_json(found: dict[str, Any]) -> bool:
    return (
        list(found) == ["name", "left", "kinds"]
        and len(found["name"]) <= 8
        and 0 <= found["left"] <= 999
        and set(found["kinds"]) <= {"red", "blue"}
    )


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


def step_through(e: Engine, requests: Sequence[tuple[str, list[int], SamplingParams, int]]) -> Any:
    """Outputs of each engine step, of requests (id, prompt, parameters, priority)."""
    llm_engine = e.llm.llm_engine
    for name, prompt, params, priority in requests:
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
    while llm_engine.has_unfinished_requests():
        yield llm_engine.step()


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
    """Aborted waiting, in its prefill and at any step of decoding; grammars among them."""
    names = [*GRAMMARS, *PARAMETERS]
    texts = [prompts[i % len(prompts)] for i in range(len(names))]
    requests = [(f"{i}", texts[i], greedy(name, texts[i]), 0) for i, name in enumerate(names)]
    done: dict[int, Answer] = {}
    for step, outputs in enumerate(step_through(uno, requests)):
        assert free_blocks(uno) <= total_blocks(uno)
        for output in outputs:
            if output.finished:
                done[int(output.request_id)] = Answer.of(output)
        if step % 2 == 0:
            uno.llm.llm_engine.abort_request([str(3 * (step // 2) % len(names))])
    kept = [i for i in range(len(names)) if i % 3]
    assert all(names[i] in plain_answers for i in kept)
    for i in kept:
        if i in done and done[i].reason != "abort":
            assert_same(done[i], plain_answers[names[i]])
    assert sum(answer.reason != "abort" for answer in done.values()) >= len(kept) // 2


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
