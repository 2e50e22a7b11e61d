"""Tree mode on the CPU: greedy and seeded sampled tokens are plain vLLM's, one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import GREEDY, Engine, engine
from oracle import DraftOracle
from oracle_trees import drafted_trees, oracle_trees
from prompts import make_prompts
from sabotage import first_child_always_taken, noise_of_rows, noise_of_wrong_depth
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_uno.tree import state as tree_state
from vllm_uno.tree import verification
from vllm_uno.tree.state import chain_ancestors
from vllm_uno.vllm_hooks.attention_api import AttentionBackendEnum

PROMPTS = make_prompts(2048)
KEYS = [tuple(p) for p in PROMPTS]
B, K = 6, 4
_SEEDED: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
SAMPLED = [
    SamplingParams(**_SEEDED, temperature=1.0, seed=1),
    SamplingParams(**_SEEDED, temperature=0.6, seed=2),
    SamplingParams(**_SEEDED, temperature=1.4, top_k=12, seed=3),
    SamplingParams(**_SEEDED, temperature=1.0, top_p=0.7, seed=4),
    SamplingParams(**_SEEDED, temperature=1.0, min_p=0.2, seed=5),
    SamplingParams(**_SEEDED, temperature=0.8, logit_bias={7: 2.0, 11: -3.0}, seed=6),
    SamplingParams(**_SEEDED, temperature=1.0, top_k=50, top_p=0.9, seed=7),
    SamplingParams(
        **_SEEDED, temperature=1.0, min_tokens=6, stop_token_ids=list(range(1, 2048, 17)), seed=8
    ),
]
_SHORT: dict[str, Any] = {"max_tokens": 11, "ignore_eos": True}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
# Requests that are served as chains, beside some that are not.
CHAINED = [
    SamplingParams(**_SHORT, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(**_SHORT, temperature=1.0, frequency_penalty=0.7, presence_penalty=0.4, seed=1),
    SamplingParams(**_SHORT, temperature=0.0, bad_words=["ba", "ce"]),
    SamplingParams(
        **_SHORT, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-c]{9}")
    ),
    SamplingParams(
        max_tokens=11,
        temperature=1.0,
        seed=2,
        structured_outputs=StructuredOutputsParams(json=_SCHEMA),
    ),
    SamplingParams(**_SHORT, temperature=0.0, logprobs=3),
    SamplingParams(**_SHORT, temperature=1.0, seed=3, top_k=40, logprobs=2),
    SamplingParams(**_SHORT, temperature=1.0, seed=4, repetition_penalty=1.2, logprobs=2),
]
# From 150 tokens to a max_model_len of 256.
END = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)


def texts(continuations: Sequence[Sequence[int]]) -> dict[Sequence[int], Sequence[int]]:
    return dict(zip(KEYS, continuations, strict=True))


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def logprobs_of(outputs: Sequence[Any]) -> list[list[dict[int, float]]]:
    """Of each request that asked for them: at each token, by token id."""
    return [
        [{t: entry.logprob for t, entry in at.items()} for at in o.outputs[0].logprobs]
        for o in outputs
        if o.outputs[0].logprobs
    ]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Any]:
    """Plain vLLM's outputs, made once."""
    with engine(model) as e:
        chained = e.outputs(PROMPTS, CHAINED)
        return {
            "greedy": e.tokens(PROMPTS),
            "sampled": e.tokens(PROMPTS, SAMPLED),
            "chained": tokens_of(chained),
            "logprobs": logprobs_of(chained),
            "end": e.tokens([PROMPTS[7]], END)[0],
        }


def settings(adapter: Path, nodes: int, **more: Any) -> dict[str, Any]:
    return {
        "uno_lora_path": str(adapter),
        "uno_mode": "tree",
        "num_speculative_tokens": nodes,
        "uno_block_size": B,
        "uno_tree_top_k": K,
        **more,
    }


slow = pytest.mark.slow


@pytest.fixture(
    scope="class",
    params=[4, 64, pytest.param(16, marks=slow), pytest.param(32, marks=slow)],
    ids=lambda nodes: f"V{nodes}",
)
def tree(
    request: Any, model: Path, adapter: Path, plain: dict[str, Any]
) -> Iterator[Engine]:  # one engine at a time: `plain` first
    with engine(model, settings(adapter, request.param)) as e:
        yield e


class TestParity:
    def test_greedy(self, tree: Engine, plain: dict[str, Any]) -> None:
        tree.speculator.counters.reset()
        with oracle_trees(tree, texts(plain["greedy"])):
            assert tree.tokens(PROMPTS) == plain["greedy"]
        stats = tree.speculator.counters.snapshot()
        nodes = tree.speculator.num_speculative_steps
        assert stats.acceptance[0] == 1.0  # the clean token
        # Deep paths, or nothing was tried.
        assert stats.tokens_per_cycle > (2.5 if nodes == 4 else 3.0)
        # The scheduler cuts trees at the end of a request only.
        assert 0.8 * nodes * stats.cycles < sum(stats.proposed) <= nodes * stats.cycles

    def test_seeded_sampling(self, tree: Engine, plain: dict[str, Any]) -> None:
        tree.speculator.counters.reset()
        with oracle_trees(tree, texts(plain["sampled"]), seed=1):
            assert tree.tokens(PROMPTS, SAMPLED) == plain["sampled"]
        stats = tree.speculator.counters.snapshot()
        assert stats.acceptance[0] == 1.0  # the same law, the same noise
        assert stats.tokens_per_cycle > 2.2

    def test_chains_beside_trees(self, tree: Engine, plain: dict[str, Any]) -> None:
        # Rows in chunks, two requests of the small trees at a time, as with a large vocabulary.
        chunks = mock.patch.object(verification, "get_max_chunk_logits", lambda vocab_size: 11)
        with chunks, oracle_trees(tree, texts(plain["chained"]), seed=2):
            outputs = tree.outputs(PROMPTS, CHAINED)
        assert tokens_of(outputs) == plain["chained"]
        for got, want in zip(logprobs_of(outputs), plain["logprobs"], strict=True):
            for at, expected in zip(got, want, strict=True):
                assert at == pytest.approx(expected, abs=1e-4)

    def test_nodes_are_best_tokens_of_the_draft_rows(
        self, tree: Engine, model: Path, adapter: Path
    ) -> None:
        prompt = PROMPTS[3]
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        with drafted_trees(tree.speculator) as records:
            text = [*prompt, *tree.tokens([prompt], params)[0]]
        oracle, checked = DraftOracle(model, adapter), 0
        for record in records:
            if record.context >= len(text) or text[record.context] != record.ids[0]:
                continue  # drafted past the end of the request
            checked += 1
            logits = oracle.draft_logits(text[: record.context], record.ids)
            worst = logits.topk(K).values[:, -1]
            worst[0] = logits[0].max()  # the root, greedily
            for token, depth in zip(record.tokens, record.depths, strict=True):
                assert logits[depth, token] >= worst[depth] - 1e-3
        assert checked >= 3

    def test_warm_up_leaves_trees_alone(self, tree: Engine) -> None:
        memory = tree.speculator.memory
        held = [*vars(memory.trees).values(), memory.path, *tree.runner.kv_caches]
        before = [t.clone() for t in held]
        tree.speculator._capture_sampling()
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


# What must not go unseen by the tests above, each a patch of one place; more in sabotage.py.


@contextmanager
def positions_of_rows() -> Iterator[None]:
    """Rotary positions C + row."""
    with mock.patch.object(verification, "write_depth_positions"):
        yield


class TestSabotage:
    """On one engine: greedy for what acts on the forward pass, sampled for what acts on noise."""

    @pytest.fixture(scope="class")
    def tree(self, model: Path, adapter: Path, plain: dict[str, Any]) -> Iterator[Engine]:
        with engine(model, settings(adapter, 16)) as e:
            yield e

    def differ(self, tree: Engine, plain: dict[str, Any], kind: str) -> bool:
        params = {"greedy": GREEDY, "sampled": SAMPLED[4:]}[kind]
        with oracle_trees(tree, texts(plain[kind])):
            return tree.tokens(PROMPTS[4:], params) != plain[kind][4:]

    def test_without(self, tree: Engine, plain: dict[str, Any]) -> None:
        assert not self.differ(tree, plain, "greedy")
        assert not self.differ(tree, plain, "sampled")

    @pytest.mark.parametrize(
        ("sabotage", "kind"),
        [
            (first_child_always_taken, "sampled"),
            (noise_of_wrong_depth, "sampled"),
            (noise_of_rows, "sampled"),
            (positions_of_rows, "greedy"),
        ],
    )
    def test_is_seen(
        self,
        tree: Engine,
        plain: dict[str, Any],
        sabotage: Any,
        kind: str,
    ) -> None:
        with sabotage():
            assert self.differ(tree, plain, kind)

    def test_missing_compaction_is_seen(self, tree: Engine, plain: dict[str, Any]) -> None:
        with mock.patch.object(tree.runner.model_state, "uno_compact"):
            assert self.differ(tree, plain, "greedy")

    def test_causal_attention_is_seen(self, tree: Engine, plain: dict[str, Any]) -> None:
        state = tree.speculator.memory.attention
        chain = chain_ancestors(state.num_nodes, state.ancestors.device).expand_as(state.ancestors)
        with mock.patch.object(state, "ancestors", chain.contiguous()):
            assert self.differ(tree, plain, "greedy")


def test_preemption_chunked_prefill_and_the_end(
    model: Path, adapter: Path, plain: dict[str, Any]
) -> None:
    """A pool of 14 blocks, prompts in chunks, and requests that meet max_model_len."""
    with engine(
        model,
        settings(adapter, 12),
        max_num_batched_tokens=64,
        num_gpu_blocks_override=14,
        max_model_len=256,
    ) as e:
        with oracle_trees(e, texts(plain["greedy"])):
            assert e.tokens(PROMPTS) == plain["greedy"]
        assert e.preemptions > 0
        stats = e.speculator.counters.snapshot()
        assert stats.tokens_per_cycle > 2.0
        with oracle_trees(e, {KEYS[7]: plain["end"]}):
            tokens = e.tokens([PROMPTS[7]], END)[0]
        assert len(PROMPTS[7]) + len(tokens) == 256
        assert tokens == plain["end"][: len(tokens)]
        assert AttentionBackendEnum.CPU_ATTN.is_overridden()
    # The next engine of this process is vLLM's own again.
    assert tree_state.installed() is None
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()


@pytest.mark.slow
def test_compiled(model: Path, adapter: Path, plain: dict[str, Any]) -> None:
    with engine(model, settings(adapter, 12), enforce_eager=False) as e:
        with oracle_trees(e, texts(plain["greedy"])):
            assert e.tokens(PROMPTS) == plain["greedy"]
        assert e.speculator.counters.snapshot().tokens_per_cycle > 2.5


def test_prefix_caching_n_and_imposed_acceptance(
    model: Path, adapter: Path, plain: dict[str, Any]
) -> None:
    """Placeholder drafts of repeated prompts, n > 1, and, last, the benchmark's acceptance."""
    with engine(model, settings(adapter, 8)) as e:
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        with oracle_trees(e, texts(plain["greedy"])):
            for prompt in (3, 6, 3, 6):  # 33 tokens: a whole KV block and one
                assert e.tokens([PROMPTS[prompt]], short)[0] == plain["greedy"][prompt][:8]
            before = e.placeholders
            repeated = e.tokens([PROMPTS[3]] * 3 + [PROMPTS[6]] * 3, short)
            assert repeated == [plain["greedy"][3][:8]] * 3 + [plain["greedy"][6][:8]] * 3
            assert e.placeholders == before + 3
            both = SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=8, ignore_eos=True)
            for output, want in zip(e.outputs(PROMPTS[:3], both), plain["greedy"], strict=False):
                assert [list(c.token_ids) for c in output.outputs] == [want[:8]] * 2
        sampler = e.runner.rejection_sampler
        sampler.rates = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
        e.speculator.counters.reset()
        e.tokens(PROMPTS, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        stats = e.speculator.counters.snapshot()
        assert stats.tokens_per_cycle == pytest.approx(4.5, abs=0.3)
