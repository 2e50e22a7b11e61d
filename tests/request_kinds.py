"""Requests of every kind that vLLM's V2 runner knows, on the bundled model, and their answers.

The trained model drafts well, so that most rows tested are drafts: with a random adapter nearly
every cycle would end at its first row.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from engines import Engine
from vllm import SamplingParams
from vllm.config import ReasoningConfig
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from vllm_uno.bundled import as_chat, bundled_model, problems

# Of all engines.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 12,
    "scheduling_policy": "priority",
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
    def of(cls, output: Any, index: int = 0) -> Answer:
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


def answers(
    e: Engine, prompts: list[list[int]], names: Sequence[str] = (*GRAMMARS, *PARAMETERS)
) -> dict[str, Answer]:
    """By parameter, each alone with a prompt of its own, all in one batch."""
    texts = [prompts[i % len(prompts)] for i in range(len(names))]
    outputs = e.outputs(texts, [greedy(n, t) for n, t in zip(names, texts, strict=True)])
    return {name: Answer.of(output) for name, output in zip(names, outputs, strict=True)}


def draft_answers(
    e: Engine, prompts: list[list[int]], names: Sequence[str] = (*GRAMMARS, *PARAMETERS)
) -> dict[str, Answer]:
    """`answers` of an engine that drafts, and well enough to show something."""
    e.speculator.counters.reset()
    found = answers(e, prompts, names)
    assert e.speculator.counters.snapshot().tokens_per_cycle > 2, "drafts must be accepted"
    return found


def free_blocks(e: Engine) -> int:
    return e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def total_blocks(e: Engine) -> int:
    return e.runner.kv_cache_config.num_blocks - 1  # one is vLLM's null block


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


def step_through(e: Engine, requests: Sequence[tuple[str, list[int], SamplingParams, int]]) -> Any:
    """Outputs of each engine step, of requests (id, prompt, parameters, priority)."""
    llm_engine = e.llm.llm_engine
    for name, prompt, params, priority in requests:
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
    while llm_engine.has_unfinished_requests():
        yield llm_engine.step()


def chat_prompts(count: int = 12) -> list[list[int]]:
    """Token ids of problems in the bundled model's chat form."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(bundled_model()))
    return [tokenizer.encode(as_chat(p.question)) for p in problems.generate("test", count)]


def assert_no_block_lost(e: Engine) -> None:
    assert not e.llm.llm_engine.has_unfinished_requests()
    assert free_blocks(e) == total_blocks(e)


def abort_every_third(
    e: Engine, want: dict[str, Answer], prompts: list[list[int]], names: Sequence[str]
) -> None:
    """Aborted waiting, in its prefill and at any step of decoding; the others' answers stay."""
    texts = [prompts[i % len(prompts)] for i in range(len(names))]
    requests = [(f"{i}", texts[i], greedy(name, texts[i]), 0) for i, name in enumerate(names)]
    done: dict[int, Answer] = {}
    for step, outputs in enumerate(step_through(e, requests)):
        assert free_blocks(e) <= total_blocks(e)
        for output in outputs:
            if output.finished:
                done[int(output.request_id)] = Answer.of(output)
        if step % 2 == 0:
            e.llm.llm_engine.abort_request([str(3 * (step // 2) % len(names))])
    kept = [i for i in range(len(names)) if i % 3]
    assert all(names[i] in want for i in kept)
    for i in kept:
        if i in done and done[i].reason != "abort":
            assert_same(done[i], want[names[i]])
    assert sum(answer.reason != "abort" for answer in done.values()) >= len(kept) // 2
