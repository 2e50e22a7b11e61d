"""`vllm serve` on the CPU with UNO and the bundled model, through the OpenAI client."""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from serving import Reply, Request, ask_all, client, gauge, lawful, random_request, serve
from transformers import AutoTokenizer

from vllm_uno.bundled import bundled_model, problems

pytestmark = pytest.mark.slow  # two servers start in a minute

QUESTION = next(iter(problems.generate("test", 1, seed=3))).question
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "left": {"enum": [1, 2, 30]}},
    "required": ["name", "left"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "count", "strict": True, "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Plain and UNO, started side by side."""
    with ExitStack() as running, ThreadPoolExecutor() as pool:
        kinds = [("plain", None), ("uno", {"num_speculative_tokens": 4})]
        contexts = [serve(tmp_path_factory.mktemp(name), uno) for name, uno in kinds]
        plain, uno = pool.map(running.enter_context, contexts)
        yield plain, uno


@pytest.fixture(scope="module")
def plain(servers: tuple[str, str]) -> str:
    return servers[0]


@pytest.fixture(scope="module")
def uno(servers: tuple[str, str]) -> str:
    return servers[1]


@pytest.fixture(autouse=True)
def nothing_is_left(uno: str) -> Iterator[None]:
    yield
    assert_idle(uno)


def assert_idle(url: str) -> None:
    """No request is left in the engine and every KV block is free again.

    Metrics come with the engine's steps, and an abort only before the next one: ask once more.
    """
    deadline = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    left = {}
    while time.monotonic() < deadline:
        asyncio.run(ask_all(url, [Request({"prompt": "Tom", "max_tokens": 2})], 1))
        left = {name: gauge(url, name) for name in names}
        if not any(left.values()):
            return
    raise AssertionError(left)


async def stream_chat(to: AsyncOpenAI) -> list[str]:
    stream = await to.chat.completions.create(
        model="bundled", messages=MESSAGES, temperature=0, max_tokens=60, stream=True
    )
    return [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]


async def completion(to: AsyncOpenAI) -> Any:
    done = await to.completions.create(
        model="bundled", prompt=QUESTION, temperature=0, max_tokens=40, logprobs=3
    )
    found = done.choices[0].logprobs
    return done.choices[0].text, found.tokens, found.token_logprobs, found.top_logprobs


async def json_schema(to: AsyncOpenAI) -> Any:
    kind: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    done = await to.chat.completions.create(
        model="bundled",
        messages=MESSAGES,
        temperature=0,
        max_tokens=80,
        response_format=kind,
    )
    return done.choices[0].message.content, done.choices[0].finish_reason


def whitespace() -> dict[str, int]:
    """A bias against tokens of whitespace, which a call's arguments may have without end."""
    tokenizer = AutoTokenizer.from_pretrained(str(bundled_model()))
    ids = range(len(tokenizer))
    return {
        str(i): -100 for i in ids if tokenizer.decode([i]) and not tokenizer.decode([i]).strip()
    }


async def tool_call(to: AsyncOpenAI) -> Any:
    done = await to.chat.completions.create(
        model="bundled",
        messages=MESSAGES,
        temperature=0,
        max_tokens=160,
        logit_bias=whitespace(),
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "count"}},
    )
    calls = done.choices[0].message.tool_calls
    assert calls, done
    call = calls[0].function
    return call.name, call.arguments


def both(plain: str, uno: str, what: Any) -> tuple[Any, Any]:
    async def one(url: str) -> Any:
        async with client(url) as to:
            return await what(to)

    return asyncio.run(one(plain)), asyncio.run(one(uno))


def test_streamed_chat(plain: str, uno: str) -> None:
    want, got = both(plain, uno, stream_chat)
    assert "".join(got) == "".join(want) != ""
    assert len(got) < len(want)  # a cycle's tokens come together


def test_completion_with_logprobs(plain: str, uno: str) -> None:
    want, got = both(plain, uno, completion)
    assert got[:2] == want[:2]
    assert got[2] == pytest.approx(want[2], abs=1e-3)
    for ours, theirs in zip(got[3], want[3], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_json_schema(plain: str, uno: str) -> None:
    want, got = both(plain, uno, json_schema)
    assert got == want
    found = json.loads(got[0])
    assert got[1] == "stop" and found["left"] in (1, 2, 30) and len(found["name"]) <= 8


def test_tool_call(plain: str, uno: str) -> None:
    want, got = both(plain, uno, tool_call)
    assert got == want
    name, found = got[0], json.loads(got[1])
    assert name == "count" and found["left"] in (1, 2, 30)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2.0}, "top_p"),
    ({"max_tokens": 100_000}, "max"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 500}, "logprobs"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"model": "another"}, "another"),
    ({"prompt": [5000]}, "vocab|token|out of"),
    ({"prompt": "Tom has " * 500}, "context|length|token"),
    ({"n": 3, "temperature": 0}, "n must be 1"),
    ({"extra_body": {"min_p": 7}}, "min_p"),
    ({"extra_body": {"top_k": -5}}, "top_k"),
    ({"extra_body": {"structured_outputs": {"regex": "[a-"}}}, "."),
    ({"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}}, "."),
    ({"extra_body": {"structured_outputs": {"json": "no schema"}}}, "."),
]


def test_bad_requests_are_told_so_and_harm_nobody(plain: str, uno: str) -> None:
    """Between good ones, whose answers stay plain's."""
    good = [random_request(seed, greedy=True) for seed in range(900, 904)]
    good = [dataclasses.replace(g, leave_after=None, patience=None) for g in good]

    async def ask_badly() -> tuple[list[Any], list[Reply]]:
        async with client(uno) as to:
            calls = [
                to.completions.create(**{"model": "bundled", "prompt": "Tom", **body})
                for body, _ in BAD
            ]
            errors = asyncio.gather(*calls, return_exceptions=True)
            return await errors, await ask_all(uno, good, 4)

    errors, replies = asyncio.run(ask_badly())
    for (body, text), error in zip(BAD, errors, strict=True):
        assert isinstance(error, APIStatusError), (body, error)
        assert 400 <= error.status_code < 500, (body, error)
        assert re.search(text, error.message), (body, error)
    for got, want in zip(replies, asyncio.run(ask_all(plain, good, 4)), strict=True):
        assert (got.text, got.tokens, got.reason) == (want.text, want.tokens, want.reason)


def check_random_requests(plain: str, uno: str, seeds: range, at_once: int) -> None:
    requests = [random_request(seed) for seed in seeds]
    replies = asyncio.run(ask_all(uno, requests, at_once))
    assert_idle(uno)

    def stays(request: Request) -> bool:
        return request.leave_after is None and request.patience is None

    whole = [dataclasses.replace(r, leave_after=None, patience=None) for r in requests]
    greedy = [i for i, r in enumerate(requests) if r.body["temperature"] == 0]
    wanted = asyncio.run(ask_all(plain, [whole[i] for i in greedy], at_once))
    for i, want in zip(greedy, wanted, strict=True):
        got = replies[i]
        if stays(requests[i]) or got.reason:
            assert (got.text, got.tokens, got.reason) == (want.text, want.tokens, want.reason), i
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3), i
        else:
            assert want.text.startswith(got.text), i
    for i, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        if stays(request) or reply.reason:
            assert lawful(request, reply), (request, reply)
        else:
            assert (
                i not in greedy
                or reply.tokens == wanted[greedy.index(i)].tokens[: len(reply.tokens)]
            )
    # A grammar's mask comes before the logprobs, so a pass without it has others.
    free = ["structured_outputs" not in r.body["extra_body"] for r in requests]
    forced = [r for r, f in zip(replies, free, strict=True) if f and r.reason and r.prompt]
    assert len(forced) > len(requests) // 4
    check_forced(plain, forced, at_once)


def check_forced(plain: str, replies: list[Reply], at_once: int) -> None:
    """Logprobs are those of a plain pass over the same tokens."""

    async def force(reply: Reply) -> list[float]:
        async with places, client(plain) as to:
            done = await to.completions.create(
                model="bundled",
                prompt=reply.prompt + reply.tokens[:-1],
                max_tokens=1,
                temperature=0,
                logprobs=0,
                extra_body={
                    "prompt_logprobs": 0,
                    "allowed_token_ids": [reply.tokens[-1]],
                },
            )
        choice = done.choices[0]
        at = choice.model_extra["prompt_logprobs"][len(reply.prompt) :]
        found = [entry[str(t)]["logprob"] for entry, t in zip(at, reply.tokens, strict=False)]
        return found + choice.logprobs.token_logprobs

    async def force_all() -> list[list[float]]:
        return list(await asyncio.gather(*(force(reply) for reply in replies)))

    places = asyncio.Semaphore(at_once)
    for reply, want in zip(replies, asyncio.run(force_all()), strict=True):
        assert len(reply.logprobs) == len(reply.tokens)
        assert reply.logprobs == pytest.approx(want, abs=1e-3)


def test_random_requests(plain: str, uno: str) -> None:
    check_random_requests(plain, uno, range(24), at_once=12)


def test_two_hundred_random_requests(plain: str, uno: str) -> None:
    check_random_requests(plain, uno, range(1000, 1200), at_once=24)


def test_random_requests_are_of_every_kind() -> None:
    requests = [random_request(seed) for seed in range(1000, 1200)]
    assert requests == [random_request(seed) for seed in range(1000, 1200)]
    for some in (
        [r for r in requests if r.leave_after],
        [r for r in requests if r.patience],
        [r for r in requests if r.stream and not r.leave_after],
        [r for r in requests if r.body["temperature"] == 0],
        [r for r in requests if "structured_outputs" in r.body["extra_body"]],
        [r for r in requests if "presence_penalty" in r.body],
    ):
        assert 10 < len(some) < 150
    assert {r.body["max_tokens"] for r in requests} >= {1, 60}
