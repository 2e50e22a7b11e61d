"""Tree mode on the bundled model: more tokens a cycle than linear mode of the same block size."""

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Engine, engine
from vllm import SamplingParams

B = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
SAMPLED = [SamplingParams(temperature=1.0, max_tokens=64, seed=seed) for seed in range(4)]
LINEAR = {"num_speculative_tokens": B}
TREE = {"uno_mode": "tree", "uno_block_size": B, "uno_tree_top_k": 8, "num_speculative_tokens": 32}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    from vllm_uno.bundled import as_chat, bundled_model, problems

    tokenizer = AutoTokenizer.from_pretrained(str(bundled_model()))
    return [tokenizer.encode(as_chat(p.question)) for p in problems.generate("test", 4)]


def bundled(uno: dict[str, Any] | None) -> Any:
    from vllm_uno.bundled import bundled_model

    return engine(bundled_model(), uno)


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[str, Any]:
    with bundled(None) as e:
        return {"greedy": e.tokens(prompts, GREEDY), "sampled": e.tokens(prompts, SAMPLED)}


@pytest.fixture(scope="module")
def linear(prompts: list[list[int]]) -> dict[str, float]:
    with bundled(LINEAR) as e:
        return {kind: tau(e, prompts, params)[0] for kind, params in KINDS.items()}


@pytest.fixture(scope="module")
def tree(plain: Any, linear: Any) -> Iterator[Engine]:  # one engine at a time: these first
    with bundled(TREE) as e:
        yield e


KINDS: dict[str, Any] = {"greedy": GREEDY, "sampled": SAMPLED}


def tau(e: Engine, prompts: list[list[int]], params: Any) -> tuple[float, list[list[int]]]:
    e.speculator.counters.reset()
    tokens = e.tokens(prompts, params)
    return e.speculator.counters.snapshot().tokens_per_cycle, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tree_accepts_more_and_changes_nothing(
    kind: str,
    tree: Engine,
    linear: dict[str, float],
    plain: dict[str, Any],
    prompts: list[list[int]],
) -> None:
    tokens_per_cycle, tokens = tau(tree, prompts, KINDS[kind])
    assert tokens == plain[kind]
    print(f"{kind}: tree {tokens_per_cycle:.2f}, linear {linear[kind]:.2f}")
    assert tokens_per_cycle > linear[kind]
