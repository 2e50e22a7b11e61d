"""Tensor parallelism over processes, data parallelism, and what happens when a worker dies.

The draft itself (slices of A and B, logits) is test_draft.py's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from parallel import drafts_of_ranks, processes, sampled, tokens, workers
from prompts import make_prompts
from serving import ask_all, client, random_request, serve, serve_client
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
    """While it streams: the client gets an error, every process ends, the log says why."""
    with pytest.raises(openai.APIError):
        with serve(tmp_path, {"num_speculative_tokens": B}, "--tensor-parallel-size", "2") as url:
            server = psutil.Process().children()
            everyone = [*server, *server[0].children(recursive=True)]
            assert len(server) == 1 and len(processes("VLLM::Worker")) == 2
            asyncio.run(stream_and_kill(url))
    gone, alive = psutil.wait_procs(everyone, timeout=120)
    assert not alive and len(gone) >= 4
    log = (tmp_path / "server.log").read_text()
    assert re.search(r"Worker proc .* died unexpectedly", log)
    assert "EngineDeadError" in log or "EngineCore encountered" in log


async def stream_and_kill(url: str) -> None:
    """Kill a worker after the first token of a long answer, and read on."""
    async with client(url) as to:
        stream = await to.completions.create(
            model="bundled",
            prompt="Tom has",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        killed = False
        async for _ in stream:
            if not killed:
                processes("VLLM::Worker_TP1")[0].kill()
                killed = True


def test_two_data_parallel_engines_serve(tmp_path_factory: pytest.TempPathFactory) -> None:
    requests = [
        dataclasses.replace(random_request(seed, greedy=True), leave_after=None, patience=None)
        for seed in range(500, 516)
    ]
    with serve(tmp_path_factory.mktemp("plain")) as url:
        plain = asyncio.run(ask_all(url, requests, 8))
    options = ("--data-parallel-size", "2")
    uno = {"num_speculative_tokens": B}
    with serve(tmp_path_factory.mktemp("uno"), uno, *options) as url:
        replies = asyncio.run(ask_all(url, requests, 8))
        cycles = by_engine(url, "vllm_uno:cycles_total")
        first = by_engine(url, "vllm_uno:accepted_tokens_total", 'position="0"')
    assert [r.tokens for r in replies] == [r.tokens for r in plain]
    assert set(cycles) == {"0", "1"} and min(cycles.values()) > 0
    assert first == cycles  # greedy: row 0 is always right


def by_engine(url: str, name: str, label: str = "") -> dict[str, float]:
    """A counter of each engine."""
    with serve_client.LOCAL.open(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return {
        re.search(r'engine="(\d+)"', line)[1]: float(line.split()[-1])  # type: ignore[index]
        for line in lines
        if line.startswith(f"{name}{{") and label in line
    }
