"""Servers for tests, plain or with UNO, and random requests for them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import serve_client

from vllm_uno.bundled import as_chat, bundled_model, problems

OPTIONS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
OPTIONS += ["--max-num-batched-tokens", "256", "--block-size", "32", "--enforce-eager"]
OPTIONS += ["--seed", "0", "--served-model-name", "bundled"]
if torch.cuda.is_available():
    OPTIONS += ["--gpu-memory-utilization", "0.2"]  # two servers share a GPU
# No whitespace without end: a model that knows no JSON likes it best.
OPTIONS += ["--structured-outputs-config"]
OPTIONS += ['{"backend": "xgrammar", "disable_any_whitespace": true}']
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
SCHEMA = {
    "type": "object",
    "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["left"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,5} has [0-9]{1,3} left\."


@contextmanager
def serve(folder: Path, uno: dict[str, Any] | None = None, *more: str) -> Iterator[str]:
    """The URL of a server of the bundled model, started with `more` options."""
    # The engine lives in a process of its own, as it does for users.
    left_out = ("VLLM_ENABLE_V1_MULTIPROCESSING",)
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    options = [*OPTIONS, *TOOLS, *more]
    if uno is not None:
        options += ["--speculative-config", json.dumps({"method": "uno", **uno})]
    log = folder / "server.log"
    with serve_client.server(str(bundled_model()), options, environment, log, 300) as url:
        yield url


def gauge(url: str, name: str) -> float:
    """A metric of the server, summed over its labels."""
    with serve_client.LOCAL.open(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]
    assert found, name
    return sum(found)


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=300,
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


@dataclass(frozen=True)
class Request:
    """A completion to ask for.

    Attributes:
        body: of the request.
        stream: ask for the tokens as they come.
        leave_after: chunks of the stream after which the client goes away, or None.
        patience: seconds after which the client of a whole answer goes away, or None.
    """

    body: dict[str, Any]
    stream: bool = False
    leave_after: int | None = None
    patience: float | None = None


@dataclass
class Reply:
    """What came back: all of it if there is a reason for its end."""

    text: str = ""
    reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def random_request(seed: int, *, greedy: bool | None = None) -> Request:
    """Any parameters, size and fate; the same for the same seed."""
    rng = random.Random(seed)
    text = as_chat(next(iter(problems.generate("test", 1, seed=rng.randrange(1000)))).question)
    body: dict[str, Any] = {
        "prompt": text[: rng.randrange(5, len(text))] if rng.random() < 0.3 else text,
        "max_tokens": rng.choice([1, 2, 3, 5, 8, 16, 30, 60]),
        "logprobs": rng.choice([0, 1, 4]),
        "seed": seed,
    }
    extra: dict[str, Any] = {"return_token_ids": True}
    if greedy if greedy is not None else rng.random() < 0.5:
        body["temperature"] = 0.0
    else:
        body["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.6])
        body["top_p"] = rng.choice([1.0, 1.0, 0.9, 0.5])
        extra["top_k"] = rng.choice([0, 0, 1, 5, 50])
        extra["min_p"] = rng.choice([0.0, 0.0, 0.05, 0.3])
    for name, values in (
        ("presence_penalty", (-0.5, 0.7)),
        ("frequency_penalty", (-0.2, 0.9)),
        ("logit_bias", ({"300": 3.0, "17": -5.0}, {"400": -100.0})),
        ("stop", ([". "], ["has", "\n"])),
    ):
        if rng.random() < 0.2:
            body[name] = rng.choice(values)
    for name, values in (
        ("repetition_penalty", (1.1, 1.4)),
        ("bad_words", (["so"], [" now", "Then"])),
        ("allowed_token_ids", (list(range(3, 900, 2)),)),
        ("ignore_eos", (True,)),
        ("priority", (0,)),
        ("prompt_logprobs", (1,)),
        ("min_tokens", (1,)),
    ):
        if rng.random() < 0.12:
            extra[name] = rng.choice(values)
    if rng.random() < 0.2 and "allowed_token_ids" not in extra and "bad_words" not in extra:
        kind = rng.choice([{"json": SCHEMA}, {"regex": REGEX}, {"choice": ["nuts", "nails"]}])
        extra["structured_outputs"] = kind
        extra.pop("ignore_eos", None)
        body.pop("logit_bias", None)
    body["extra_body"] = extra
    fate = rng.random()
    if fate < 0.2 and "prompt_logprobs" not in extra:  # vLLM streams none
        return Request(body, stream=True, leave_after=rng.randrange(1, 5))
    if fate < 0.3:
        return Request(body, patience=rng.uniform(0.01, 1.5))
    return Request(body, stream=fate < 0.6 and "prompt_logprobs" not in extra)


async def ask(to: AsyncOpenAI, request: Request) -> Reply:
    call = {"model": "bundled", **request.body}
    reply = Reply()
    if not request.stream:
        try:
            done = await asyncio.wait_for(to.completions.create(**call), request.patience)
        except TimeoutError:
            return reply
        _add(reply, done.choices[0])
        return reply
    stream = await to.completions.create(**call, stream=True)
    chunks = 0
    async for chunk in stream:
        if chunk.choices:
            _add(reply, chunk.choices[0])
            chunks += 1
        if chunks == request.leave_after:
            await stream.close()
            break
    return reply


def _add(reply: Reply, choice: Any) -> None:
    reply.text += choice.text
    reply.reason = choice.finish_reason
    more = choice.model_extra or {}
    reply.tokens += more.get("token_ids") or []
    reply.prompt += more.get("prompt_token_ids") or []
    if choice.logprobs is not None:
        reply.logprobs += choice.logprobs.token_logprobs


async def ask_all(url: str, requests: list[Request], at_once: int) -> list[Reply]:
    """Replies in order; `at_once` requests under way at any time."""
    places = asyncio.Semaphore(at_once)

    async def one(request: Request) -> Reply:
        async with places:
            return await ask(to, request)

    async with client(url) as to:
        return list(await asyncio.gather(*(one(request) for request in requests)))


def lawful(request: Request, reply: Reply) -> bool:
    """A whole reply ends as its request allows and keeps to its grammar."""
    limit = request.body["max_tokens"]
    if reply.reason == "length":
        return len(reply.tokens) == limit
    if reply.reason != "stop" or not 0 < len(reply.tokens) <= limit:
        return False
    kind = request.body["extra_body"].get("structured_outputs")
    if kind is None or "stop" in request.body:
        return True
    if "json" in kind:
        found = json.loads(reply.text)
        return list(found) == ["left"] and 0 <= found["left"] <= 999
    if "regex" in kind:
        return re.fullmatch(REGEX, reply.text) is not None
    return reply.text in kind["choice"]
