"""A reduced draft head: tokens and law stay plain vLLM's, drafts are of the list only."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, engine
from law_run import (
    ALPHA,
    SETTINGS,
    VOCAB_SIZE,
    law_engine,
    make_params,
    run_setting,
    write_models,
)
from prompts import make_prompts
from safetensors.torch import load_file
from vllm import SamplingParams

PROMPTS = make_prompts(2048)
KEPT = list(range(1, 2048, 2))
DRAFT_VOCAB = [1, 2, 3, 6, 9, 12, 13]  # of the law's model, of 16 tokens


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    with engine(model) as e:
        return e.tokens(PROMPTS)


@pytest.fixture(scope="module")
def uno(
    model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    file = tmp_path_factory.mktemp("vocab") / "odd.json"
    file.write_text(json.dumps(KEPT))
    yield {
        "uno_lora_path": str(adapter),
        "num_speculative_tokens": 4,
        "uno_draft_vocab": str(file),
    }


def follow(e: Engine, params: SamplingParams | list[SamplingParams]) -> tuple[Any, torch.Tensor]:
    """Outputs, and every token that a drafting request was given as a draft."""
    drafts = []
    propose = e.speculator.propose

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens: torch.Tensor = propose(*args, **kwargs)
        drafts.append(tokens[e.speculator.rows.drafting[: len(tokens)]].clone())
        return tokens

    e.speculator.propose = recorded
    try:
        tokens = e.tokens(PROMPTS, params)
    finally:
        del e.speculator.propose
    return tokens, torch.cat(drafts).flatten()


def share_kept(tokens: list[list[int]]) -> float:
    """Of the tokens that a cycle begins with: row 0 is right exactly where it is in the list."""
    flat = [t for text in tokens for t in text]
    return sum(t in set(KEPT) for t in flat) / len(flat)


class TestOneEngine:
    """One engine at a time: plain's is closed before this one starts."""

    @pytest.fixture(scope="class")
    def running(self, model: Path, uno: dict[str, Any], plain: list[list[int]]) -> Iterator[Engine]:
        with engine(model, uno) as e:
            yield e

    def test_greedy_is_plains(self, running: Engine, plain: list[list[int]]) -> None:
        running.speculator.counters.reset()
        tokens, drafts = follow(
            running, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        )
        assert tokens == plain
        assert set(drafts.tolist()) <= set(KEPT) and len(drafts) > 100
        stats = running.speculator.counters.snapshot()
        # The base model's own first choice, wherever the list has it.
        assert stats.acceptance[0] == pytest.approx(share_kept(plain), abs=0.08)

    def test_processed_greedy_takes_the_full_width_path(
        self, running: Engine, plain: list[list[int]]
    ) -> None:
        greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        bias = SamplingParams(**greedy, logit_bias={2001: 50.0})
        _, drafts = follow(running, [bias] * len(PROMPTS))
        assert set(drafts.tolist()) == {2001}

    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}])
    def test_no_allowed_token_in_the_list(self, running: Engine, params: dict[str, Any]) -> None:
        allowed = [10, 20, 30]  # the list is odd
        kind = SamplingParams(
            **params, allowed_token_ids=allowed, max_tokens=12, ignore_eos=True, seed=3
        )
        running.speculator.counters.reset()
        tokens = running.tokens(PROMPTS[:3], kind)
        assert all(set(text) <= set(allowed) and len(text) == 12 for text in tokens)
        if params["temperature"]:
            assert {t for text in tokens for t in text} == set(allowed)
        assert running.speculator.counters.snapshot().acceptance[0] == 0.0

    def test_the_weights_stay_one_copy(self, running: Engine) -> None:
        speculator = running.speculator
        target = {id(p) for p in running.runner.model.parameters()}
        assert {id(p) for p in speculator.model.parameters()} == target
        buffers = dict(speculator.model.named_buffers())
        assert buffers["logits_processor.rows.weight"].shape == (len(KEPT), 256)
        rows = speculator.reduced_head.rows.weight
        assert not rows.is_inference()
        rows.data.copy_(rows.clone())  # as waking from sleep does
        hidden = torch.randn(3, 256)
        with torch.inference_mode():
            whole, full = speculator.reduced_head.whole(hidden), speculator.compute_logits(hidden)
            assert torch.equal(whole, running.runner.model.compute_logits(hidden))
        torch.testing.assert_close(full[:, KEPT], whole[:, KEPT])
        assert full.isfinite().sum() == 3 * len(KEPT)
        held = sum(t.nbytes for t in speculator.reduced_head.tensors)
        assert held == len(KEPT) * (256 * 4 + 8)


def test_reloaded_weights_are_gathered_again(
    model: Path, uno: dict[str, Any], plain: list[list[int]]
) -> None:
    weights = load_file(model / "model.safetensors")
    with engine(model, uno) as e:
        rows = e.speculator.reduced_head.rows
        assert torch.equal(rows.weight, weights["lm_head.weight"][KEPT])
        address = rows.weight.data_ptr()
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
        e.runner.reload_weights(weights_iterator=iter(weights.items()))
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        e.speculator.counters.reset()
        flipped = e.tokens(PROMPTS, short)
        # lm_head's rows in reverse: token t is now 2047 - t, at least at first.
        assert [t[0] for t in flipped] == [2047 - t[0] for t in plain]
        assert torch.equal(rows.weight, weights["lm_head.weight"][KEPT])
        assert rows.weight.data_ptr() == address  # graphs read it there
        stats = e.speculator.counters.snapshot()
        assert stats.acceptance[0] == pytest.approx(share_kept(flipped), abs=0.15)


class TestSampledLaw:
    @pytest.fixture(scope="class")
    def law(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
        folder = tmp_path_factory.mktemp("law") / "models"
        write_models(folder)
        file = folder / "vocab.json"
        file.write_text(json.dumps(DRAFT_VOCAB))
        with law_engine(folder, SETTINGS["t1"], max_num_seqs=64, draft_vocab=file) as e:
            yield e, folder

    @pytest.mark.parametrize("name", [pytest.param("t0.7", marks=pytest.mark.slow), "top_k-top_p"])
    def test_continuations_follow_the_law(self, law: tuple[Engine, Path], name: str) -> None:
        running, folder = law
        report = run_setting(running, SETTINGS[name], folder, requests=120, tokens=7)
        assert report.impossible == 0
        assert report.p_value > ALPHA
        assert all(0.1 < a < 0.95 for a in report.acceptance)

    @pytest.mark.parametrize("name", ["t0.7", "top_k"])
    def test_stored_law_is_of_the_list(self, law: tuple[Engine, Path], name: str) -> None:
        running, _ = law
        running.speculator.draft_logits.fill_(float("-inf"))
        params = make_params(SETTINGS[name], tokens=12, seed=7)
        params.output_kind = params.output_kind.FINAL_ONLY
        running.tokens(make_prompts(VOCAB_SIZE, 1, lengths=(6,), seed=3), params)
        (slot,) = running.speculator.draft_logits.isfinite().any(-1).all(-1).nonzero().tolist()
        kept = params.top_k or len(DRAFT_VOCAB)
        for row in running.speculator.draft_logits[slot[0]]:
            finite = row.isfinite().nonzero().flatten().tolist()
            assert set(finite) <= set(DRAFT_VOCAB)
            # A top-k of the draft law itself: of the listed tokens, not of all.
            assert len(finite) == min(kept, len(DRAFT_VOCAB))
