"""Tree mode on the CPU: greedy and seeded sampled tokens are plain vLLM's, one by one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import GREEDY, Engine, engine
from oracle_trees import oracle_candidates
from prompts import make_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_uno.tree import verification

PROMPTS = make_prompts(2048)
KEYS = [tuple(p) for p in PROMPTS]
B, K = 6, 4
_SEEDED: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
SAMPLED = [
    SamplingParams(**_SEEDED, temperature=1.0, seed=1),
    SamplingParams(**_SEEDED, temperature=0.6, seed=2),
    SamplingParams(**_SEEDED, temperature=1.4, top_k=12, seed=3),
    SamplingParams(**_SEEDED, temperature=1.0, top_p=0.7, seed=4),
    SamplingParams(**_SEEDED, temperature=1.0, min_p=0.2, seed=5),
    SamplingParams(**_SEEDED, temperature=0.8, logit_bias={7: 2.0, 11: -3.0}, seed=6),
    SamplingParams(**_SEEDED, temperature=1.0, top_k=50, top_p=0.9, seed=7),
    SamplingParams(
        **_SEEDED, temperature=1.0, min_tokens=9, stop_token_ids=list(range(1, 2048, 17)), seed=8
    ),
]
_SHORT: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
# Requests that are served as chains, next to two that are not.
CHAINED = [
    SamplingParams(**_SHORT, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(**_SHORT, temperature=1.0, frequency_penalty=0.7, presence_penalty=0.4, seed=1),
    SamplingParams(**_SHORT, temperature=0.0, bad_words=["ba", "ce"]),
    SamplingParams(
        **_SHORT, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-c]{12}")
    ),
    SamplingParams(
        max_tokens=14,
        temperature=1.0,
        seed=2,
        structured_outputs=StructuredOutputsParams(json=_SCHEMA),
    ),
    SamplingParams(**_SHORT, temperature=0.0),
    SamplingParams(**_SHORT, temperature=1.0, seed=3, logprobs=2),
    SamplingParams(**_SHORT, temperature=1.0, seed=4, repetition_penalty=1.2, top_k=30, logprobs=2),
]
END = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)


def texts(continuations: Sequence[Sequence[int]]) -> dict[Sequence[int], Sequence[int]]:
    return dict(zip(KEYS, continuations, strict=True))


def logprobs(outputs: Sequence[Any]) -> list[list[dict[int, float]]]:
    """Of each request that asked for them: at each token, by token id."""
    return [
        [{t: entry.logprob for t, entry in at.items()} for at in o.outputs[0].logprobs]
        for o in outputs
        if o.outputs[0].logprobs
    ]


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[dict[str, Any]]:
    """Plain vLLM's outputs, made once."""
    with engine(model) as e:
        greedy = e.tokens(PROMPTS)
        chained = e.outputs(PROMPTS, CHAINED)
        yield {
            "greedy": greedy,
            "sampled": e.tokens(PROMPTS, SAMPLED),
            "chained": tokens_of(chained),
            "logprobs": logprobs(chained),
            "end": e.tokens([PROMPTS[7]], END)[0],
        }


def settings(adapter: Path, nodes: int, block: int = B, top_k: int = K) -> dict[str, Any]:
    return {
        "uno_lora_path": str(adapter),
        "uno_mode": "tree",
        "num_speculative_tokens": nodes,
        "uno_block_size": block,
        "uno_tree_top_k": top_k,
    }


@pytest.fixture(
    scope="module",
    params=[
        4,
        64,
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(32, marks=pytest.mark.slow),
    ],
    ids=lambda nodes: f"V{nodes}",
)
def tree(request: Any, model: Path, adapter: Path) -> Iterator[Engine]:
    with engine(model, settings(adapter, request.param)) as e:
        yield e


class TestParity:
    def test_greedy(self, tree: Engine, plain: dict[str, Any]) -> None:
        tree.speculator.counters.reset()
        with oracle_candidates(tree, texts(plain["greedy"])):
            assert tree.tokens(PROMPTS) == plain["greedy"]
        stats = tree.speculator.counters.snapshot()
        assert stats.acceptance[0] == 1.0  # the clean token
        # Paths are deep and seldom a tree's first nodes: else nothing was tried.
        assert stats.tokens_per_cycle > (2.2 if tree.speculator.num_speculative_steps < 8 else 3.0)
        assert sum(stats.proposed) == stats.cycles * tree.speculator.num_speculative_steps or (
            sum(stats.proposed) > 0.8 * stats.cycles * tree.speculator.num_speculative_steps
        )

    def test_own_drafts(self, tree: Engine, plain: dict[str, Any]) -> None:
        assert tree.tokens(PROMPTS) == plain["greedy"]

    def test_seeded_sampling(self, tree: Engine, plain: dict[str, Any]) -> None:
        tree.speculator.counters.reset()
        with oracle_candidates(tree, texts(plain["sampled"]), seed=1):
            assert tree.tokens(PROMPTS, SAMPLED) == plain["sampled"]
        stats = tree.speculator.counters.snapshot()
        assert stats.acceptance[0] == 1.0  # sampled by the same law with the same noise
        assert stats.tokens_per_cycle > 2.2

    def test_chains_beside_trees(self, tree: Engine, plain: dict[str, Any]) -> None:
        with oracle_candidates(tree, texts(plain["chained"]), seed=2):
            outputs = tree.outputs(PROMPTS, CHAINED)
        assert tokens_of(outputs) == plain["chained"]
        for got, want in zip(logprobs(outputs), plain["logprobs"], strict=True):
            for at, expected in zip(got, want, strict=True):
                assert at == pytest.approx(expected, abs=1e-4)
