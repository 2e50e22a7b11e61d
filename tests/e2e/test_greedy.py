"""Greedy on the CPU: UNO's tokens are plain vLLM's, whatever the engine is busy with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, Engine, engine
from prompts import make_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PROMPTS = make_prompts(2048)
STOP_AFTER = 12
END = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
PROCESSED = [
    SamplingParams(**_GREEDY, repetition_penalty=1.3),
    SamplingParams(**_GREEDY, frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(**_GREEDY, logit_bias={7: 2.0, 11: -3.0}),
    SamplingParams(**_GREEDY, allowed_token_ids=list(range(40, 90))),
    SamplingParams(**_GREEDY, min_tokens=8, stop_token_ids=list(range(1, 2048, 17))),
    SamplingParams(**_GREEDY, bad_words=["ba", "ce"]),
    SamplingParams(**_GREEDY, min_p=0.1),
    SamplingParams(**_GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-c]{12}")),
]


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[dict[str, Any]]:
    """Plain vLLM's outputs, made once."""
    with engine(model) as e:
        tokens = e.tokens(PROMPTS)
        yield {
            "tokens": tokens,
            "end": e.tokens([PROMPTS[7] * 3], END)[0],
            "processed": e.tokens(PROMPTS, PROCESSED),
        }


def test_model_varies(model: Path, plain: dict[str, Any]) -> None:
    """A model whose output loops would hide faults of the KV cache."""
    for tokens in plain["tokens"]:
        assert len(set(tokens)) >= 0.6 * len(tokens)


def test_zeroing_a_kv_block_changes_output(model: Path, plain: dict[str, Any]) -> None:
    prompt = PROMPTS[6]
    with engine(model) as e:
        core = e.llm.llm_engine.engine_core.engine_core
        execute = core.model_executor.execute_model
        steps = 0

        def execute_and_damage(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 4:  # the prompt is in, decoding has begun
                table = e.runner.block_tables.input_block_tables[0]
                for cache in e.runner.kv_caches:
                    blocks = cache.shape.index(e.runner.kv_cache_config.num_blocks)
                    cache.select(blocks, int(table[0, 1])).zero_()
            return execute(*args, **kwargs)

        core.model_executor.execute_model = execute_and_damage
        damaged = e.tokens([prompt])[0]
    assert damaged != plain["tokens"][6]


@pytest.mark.parametrize(
    ("uno", "settings"),
    [
        pytest.param({"num_speculative_tokens": 1}, {}, id="B1"),
        pytest.param({"num_speculative_tokens": 2}, {}, id="B2"),
        pytest.param({"num_speculative_tokens": 8}, {}, id="B8"),
        pytest.param({"num_speculative_tokens": 16}, {}, id="B16"),
        pytest.param({}, {}, id="default"),
        pytest.param({"num_speculative_tokens": 4}, {"block_size": 64}, id="kv64"),
        pytest.param(
            {"num_speculative_tokens": 4}, {"block_size": 128}, id="kv128", marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_speculative_tokens": 4, "draft_sample_method": "greedy"}, {}, id="greedy-draft"
        ),
    ],
)
def test_mixed_batch(
    model: Path,
    adapter: Path,
    plain: dict[str, Any],
    uno: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    with engine(model, {"uno_lora_path": str(adapter), **uno}, **settings) as e:
        assert e.tokens(PROMPTS) == plain["tokens"]
        stats = e.speculator.counters.snapshot()
        assert stats.cycles > 0
        assert stats.acceptance[0] == 1.0  # row 0 is the base model's own law


def test_chunked_prefill_and_preemption(model: Path, adapter: Path, plain: dict[str, Any]) -> None:
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with engine(
        model, uno, max_num_batched_tokens=48, num_gpu_blocks_override=14, max_model_len=256
    ) as e:
        assert e.tokens(PROMPTS) == plain["tokens"]
        assert e.preemptions > 0


def test_compiled(model: Path, adapter: Path, plain: dict[str, Any]) -> None:
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}
    with engine(model, uno, enforce_eager=False) as e:
        assert e.tokens(PROMPTS) == plain["tokens"]


class TestOneEngine:
    """What needs no engine of its own."""

    @pytest.fixture(scope="class")
    def uno(self, model: Path, adapter: Path) -> Iterator[Engine]:
        with engine(model, {"uno_lora_path": str(adapter), "num_speculative_tokens": 4}) as e:
            yield e

    def test_prefix_caching_repeats(self, uno: Engine, plain: dict[str, Any]) -> None:
        # 33 tokens are a whole KV block and one: a repeat leaves a one-token
        # prefill, which vLLM pads with placeholder drafts.
        short = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        three, six = plain["tokens"][3][:12], plain["tokens"][6][:12]
        for prompt, expected in ((3, three), (6, six), (3, three), (6, six)):
            assert uno.tokens([PROMPTS[prompt]], short)[0] == expected
        before = uno.placeholders
        repeated = uno.tokens([PROMPTS[3]] * 3 + [PROMPTS[6]] * 3, short)
        assert repeated == [three] * 3 + [six] * 3
        assert uno.placeholders == before + 3

    def test_repeats_at_temperature_one_emit_real_tokens(self, uno: Engine) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
        first = uno.tokens([PROMPTS[3]] * 6, params)
        again = uno.tokens([PROMPTS[3]] * 6, params)
        assert first == again  # the request's seed decides, cached prefix or not
        assert all(0 < t < 2048 for tokens in first for t in tokens)
        before = uno.speculator.counters.snapshot()
        uno.speculator.counters.reset()
        # The last two cycles of a request do not count.
        uno.tokens(
            [PROMPTS[3]] * 6, SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
        )
        stats = uno.speculator.counters.snapshot()
        assert before.cycles > 0 and stats.acceptance[0] == 1.0

    def test_end_of_max_model_len(self, uno: Engine, plain: dict[str, Any]) -> None:
        prompt = PROMPTS[7] * 3
        tokens = uno.tokens([prompt], END)[0]
        assert len(prompt) + len(tokens) == 512
        assert tokens == plain["end"]

    def test_max_tokens_ends(self, uno: Engine, plain: dict[str, Any]) -> None:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
            for n in (1, 2, 3, 4, 5, 6, 7, 9)
        ]
        expected = [t[: p.max_tokens] for t, p in zip(plain["tokens"], params, strict=True)]
        assert uno.tokens(PROMPTS, params) == expected

    def test_stop_token_and_string(self, uno: Engine, plain: dict[str, Any]) -> None:
        tokens = plain["tokens"][2]
        stop = tokens[STOP_AFTER]
        params = SamplingParams(
            temperature=0.0, max_tokens=GREEDY.max_tokens, stop_token_ids=[stop]
        )
        assert uno.tokens([PROMPTS[2]], params)[0] == tokens[: tokens.index(stop) + 1]
        tokenizer = uno.llm.get_tokenizer()
        text = tokenizer.decode(tokens)
        word = tokenizer.decode([stop]).strip()
        params = SamplingParams(
            temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True, stop=[word]
        )
        stopped = uno.outputs([PROMPTS[2]], params)[0].outputs[0]
        assert stopped.text == text[: text.index(word)]
        assert stopped.stop_reason == word

    def test_n_greater_one(self, uno: Engine, plain: dict[str, Any]) -> None:
        # vLLM refuses n > 1 at temperature 0; top_k=1 is greedy all the same.
        params = SamplingParams(
            n=2, temperature=1.0, top_k=1, max_tokens=GREEDY.max_tokens, ignore_eos=True
        )
        outputs = uno.outputs(PROMPTS[:3], params)
        for output, expected in zip(outputs, plain["tokens"], strict=False):
            assert [list(c.token_ids) for c in output.outputs] == [expected, expected]

    def test_abort_in_flight(self, uno: Engine, plain: dict[str, Any]) -> None:
        llm_engine = uno.llm.llm_engine
        for i, prompt in enumerate(PROMPTS):
            llm_engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, GREEDY)
        done: dict[str, list[int]] = {}
        steps = 0
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 5:
                llm_engine.abort_request(["r0", "r3", "r6"])
        kept = {k.split("-")[0]: v for k, v in done.items() if len(v) == GREEDY.max_tokens}
        assert {f"r{i}" for i in (1, 2, 4, 5, 7)} <= set(kept)
        for i in (1, 2, 4, 5, 7):
            assert kept[f"r{i}"] == plain["tokens"][i]

    def test_sampling_parameters(self, uno: Engine, plain: dict[str, Any]) -> None:
        assert uno.tokens(PROMPTS, PROCESSED) == plain["processed"]

    def test_logprobs(self, uno: Engine, model: Path) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)
        output = uno.outputs([PROMPTS[3]], params)[0].outputs[0]
        assert len(output.logprobs) == 10
        # Teacher-forced: prompt logprobs of a plain prefill over the same text.
        forced = PROMPTS[3] + list(output.token_ids)
        reference = uno.outputs(
            [forced], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
        )[0].prompt_logprobs
        for i, token in enumerate(output.token_ids):
            got = output.logprobs[i][token].logprob
            want = reference[len(PROMPTS[3]) + i][token].logprob
            assert got == pytest.approx(want, abs=1e-4)


def test_counters_follow_the_device(model: Path) -> None:
    """`DraftCounters` starts at zero and resets (the kernel's counts: test_mixed_batch)."""
    from vllm_uno.metrics import DraftCounters

    counters = DraftCounters(4, torch.device("cpu"))
    counters.cycles += 2
    counters.emitted += 5
    counters.proposed += 2
    counters.accepted[:2] += 1
    stats = counters.snapshot()
    assert stats.tokens_per_cycle == 2.5
    assert stats.acceptance == (0.5, 0.5, 0.0, 0.0)
    counters.reset()
    assert counters.snapshot().cycles == 0
