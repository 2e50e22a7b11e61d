"""Sampled law on the CPU: UNO's tokens are distributed as plain vLLM's, and why.

Full size is the GPU's (tests/gpu/test_law_gpu.py): a token costs 20 ms in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Engine, engine
from law import chi_square_tail, processed_law
from law_run import (
    ACCEPTANCE,
    ALPHA,
    BLOCK_SIZE,
    SABOTAGE_P_VALUE,
    SETTINGS,
    STAND_IN_NAME,
    TREE_ACCEPTANCE,
    VOCAB_SIZE,
    law_engine,
    make_params,
    run_setting,
    write_models,
)
from prompts import make_prompts
from sabotage import (
    BONUS_FROM_LAST_DRAFT_ROW,
    RESIDUAL_IS_P,
    RESIDUAL_OFF_BY_ONE,
    TREE_SABOTAGES,
)
from vllm import SamplingParams

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample  # noqa: E402

from vllm_uno.noise import NOISE_DOMAIN, noise_token_id  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import murmur3_hash32, tl, triton  # noqa: E402

NUM_SEQS = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("law") / "models"
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def uno_law(models: Path) -> Iterator[Engine]:
    """UNO on a vocabulary of 16, B = 3."""
    with law_engine(models, SETTINGS["t1"], max_num_seqs=NUM_SEQS) as running:
        yield running


# --- the law -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requests", [pytest.param(40, id="40"), pytest.param(160, id="160", marks=pytest.mark.slow)]
)
def test_continuations_follow_the_law(uno_law: Engine, models: Path, requests: int) -> None:
    # Many cycles a request: the counters leave out its last two, and those were not chosen blindly
    # (a short request of good cycles has no other).
    report = run_setting(uno_law, SETTINGS["t0.7"], models, requests=requests, tokens=48)
    assert report.tokens == 48 * requests
    assert report.impossible == 0
    assert report.p_value > ALPHA
    assert report.acceptance[0] == 1.0
    low, high = ACCEPTANCE
    assert all(low <= a <= high for a in report.acceptance[1:])


def test_torch_stand_in_follows_the_law(uno_law: Engine, models: Path) -> None:
    """Without a fault, what the sabotages are made of is as good as vLLM's."""
    report = run_setting(
        uno_law, SETTINGS["t0.7"], models, requests=16, tokens=48, sabotage=STAND_IN_NAME
    )
    assert report.p_value > ALPHA


# The fifth, noise shared with the verifier, is too faint for so few tokens: it is seen on the GPU.
@pytest.mark.parametrize(
    ("sabotage", "requests"),
    [
        ("draft-temperature-ignored", 20),
        pytest.param(BONUS_FROM_LAST_DRAFT_ROW, 40, marks=pytest.mark.slow),
        pytest.param(RESIDUAL_IS_P, 64, marks=pytest.mark.slow),
        pytest.param(RESIDUAL_OFF_BY_ONE, 112, marks=pytest.mark.slow),
    ],
)
def test_sabotage_is_seen(uno_law: Engine, models: Path, sabotage: str, requests: int) -> None:
    report = run_setting(uno_law, SETTINGS["t0.7"], models, requests=requests, sabotage=sabotage)
    assert report.p_value < SABOTAGE_P_VALUE


@pytest.mark.slow
class TestTrees:
    """Of 3 rows, 4 candidates and 6 nodes."""

    SETTING = SETTINGS["tree-6-t0.7"]

    @pytest.fixture(scope="class")
    def tree_law(self, models: Path) -> Iterator[Engine]:
        with law_engine(models, self.SETTING, max_num_seqs=NUM_SEQS) as running:
            yield running

    def test_continuations_follow_the_law(self, tree_law: Engine, models: Path) -> None:
        report = run_setting(tree_law, self.SETTING, models, requests=10, tokens=48)
        assert report.tokens == 48 * 10
        assert report.impossible == 0
        assert report.least_p > ALPHA
        assert report.acceptance[0] == 1.0
        low, high = TREE_ACCEPTANCE
        assert all(low <= a <= high for a in report.acceptance[1:])

    @pytest.mark.parametrize(("sabotage", "requests"), [*zip(TREE_SABOTAGES, (4, 20), strict=True)])
    def test_sabotage_is_seen(
        self, tree_law: Engine, models: Path, sabotage: str, requests: int
    ) -> None:
        report = run_setting(
            tree_law, self.SETTING, models, requests=requests, tokens=48, sabotage=sabotage
        )
        assert report.least_p < SABOTAGE_P_VALUE


# --- identities --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafted:
    """One request's draft rows, as `DraftSampler` saw and left them.

    Attributes:
        logits: [B, V], the draft view's.
        stored: [B, V], the request's rows of `draft_logits` afterwards.
        tokens: [B], what was proposed.
        positions: [B].
        slot: of the request's state.
        history: output tokens up to the seed.
    """

    logits: torch.Tensor
    stored: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slot: int
    history: torch.Tensor


def _record_drafts(running: Engine, prompt: list[int], params: SamplingParams) -> list[Drafted]:
    """Run one request and keep each of its draft passes."""
    sampler, model = running.speculator.draft_sampler, running.speculator.model
    original, compute_logits = sampler._sample, model.compute_logits
    states = running.runner.req_states
    logits = torch.empty(0)
    drafts: list[Drafted] = []

    def keep(hidden_states: torch.Tensor) -> torch.Tensor:
        nonlocal logits
        computed: torch.Tensor = compute_logits(hidden_states)
        logits = computed.clone()
        return computed

    def record(z: torch.Tensor, start: int, stop: int, out: torch.Tensor, filters: bool) -> None:
        original(z, start, stop, out, filters)
        rows = sampler.rows
        if bool(rows.drafting[0]):
            slot, seed_position = int(rows.request[0]), int(rows.positions[0])
            text = states.all_token_ids.gpu[slot, : seed_position + 1]
            drafts.append(
                Drafted(
                    logits=logits,
                    stored=sampler.draft_logits[slot].clone(),
                    tokens=out[0].clone(),
                    positions=rows.positions[:BLOCK_SIZE].clone(),
                    slot=slot,
                    history=text[len(prompt) :].long().clone(),
                )
            )

    with (
        mock.patch.object(sampler, "_sample", record),
        mock.patch.object(model, "compute_logits", keep),
    ):
        running.tokens([prompt], params)
    assert len(drafts) >= 3
    return drafts


IDENTITY_SETTINGS = ("t1", "t0.7", "top_k-top_p", "min_p", "joined", "joined-min_p")


@pytest.mark.parametrize("name", IDENTITY_SETTINGS)
def test_stored_law_is_the_sampled_one(uno_law: Engine, name: str) -> None:
    setting = SETTINGS[name]
    params = make_params(setting, tokens=14, seed=1234)
    params.output_kind = params.output_kind.FINAL_ONLY
    prompt = make_prompts(VOCAB_SIZE, 1, lengths=(6,), seed=3)[0]
    for draft in _record_drafts(uno_law, prompt, params):
        # The stored rows, with the keys of the draft's own noise, draw the very tokens.
        rows = len(draft.tokens)
        drawn = gumbel_sample(
            draft.stored,
            torch.zeros(rows, dtype=torch.int64),
            torch.tensor([params.temperature], dtype=torch.float32),
            torch.tensor([params.seed], dtype=torch.int64),
            draft.positions,
            apply_temperature=True,
            is_drafting=True,
        )
        assert drawn.tolist() == draft.tokens.tolist()
        noised = draft.stored / params.temperature + _draft_gumbel(params.seed, draft.positions)
        assert noised.argmax(-1).tolist() == draft.tokens.tolist()

        # And they are the recipe's law, kept set and all, for the history up to the seed.
        repeated = torch.cat([draft.history, draft.history.new_zeros(1)])
        for row in range(rows):
            logits = draft.logits[row].expand(len(repeated), -1)
            expected = processed_law(logits, params, prompt, repeated)[-1]
            stored = (draft.stored[row] / params.temperature).softmax(-1)
            assert torch.equal(stored > 0, expected > 0)
            torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-6)


def test_plain_stored_law_is_bitwise_the_logits(uno_law: Engine) -> None:
    """Nothing to process: the view's logits are stored as they are, temperature apart."""
    params = make_params(SETTINGS["t1"], tokens=14, seed=5)
    params.output_kind = params.output_kind.FINAL_ONLY
    prompt = make_prompts(VOCAB_SIZE, 1, lengths=(6,), seed=4)[0]
    for draft in _record_drafts(uno_law, prompt, params):
        assert torch.equal(draft.stored, draft.logits)


# --- noise keys --------------------------------------------------------------------------------

_MASK32 = 0xFFFFFFFF
# As vLLM's gumbel.py: the verifier's draws have domain 0 (and a second one for 64-bit noise); the
# draft's have it too, at positions that no request reaches.
VERIFIER_DOMAINS = (0, 0x9E3779B9)
DRAFT_SALT = 1 << 30


def _murmur3(domain: int, seed: int, position: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) over (seed, position, offset), started at `domain`."""

    def rotl(x: torch.Tensor, shift: int) -> torch.Tensor:
        return ((x << shift) | (x >> (32 - shift))) & _MASK32

    position, offset = torch.broadcast_tensors(position, offset)
    h = torch.full_like(position, domain)
    for key in (
        torch.full_like(position, seed & _MASK32),
        torch.full_like(position, (seed >> 32) & _MASK32),
        position & _MASK32,
        offset & _MASK32,
    ):
        key = (rotl((key * 0xCC9E2D51) & _MASK32, 15) * 0x1B873593) & _MASK32
        h = (rotl(h ^ key, 13) * 5 + 0xE6546B64) & _MASK32
    h ^= 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK32
    return h ^ (h >> 16)


def _draft_gumbel(seed: int, positions: torch.Tensor) -> torch.Tensor:
    """[rows, V] Gumbel noise of the draft sampler, in fp64."""
    token = torch.arange(VOCAB_SIZE)
    h = _murmur3(0, seed, positions[:, None] + DRAFT_SALT, token[None])
    u = (h.double() + 0.5) / 2**32
    return -(-torch.log1p(-u)).log()


def test_noise_keys_are_disjoint() -> None:
    """Every draw is a hash of (domain, seed, position, offset); no two kinds share a key.

    verifier: (0 or 0x9E3779B9, seed, position, token); draft: the same at position + 2^30;
    noise ids: (our domain, seed, position, noise seed). The acceptance uniforms are Philox's.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    assert gumbel._DRAFT_NOISE_SALT.value == DRAFT_SALT
    assert NOISE_DOMAIN not in VERIFIER_DOMAINS
    # The start value reaches the hash unchanged: other domain, other stream.
    position, offset = torch.arange(4096), torch.tensor(0)
    streams = [
        _murmur3(NOISE_DOMAIN, 7, position, offset),
        _murmur3(VERIFIER_DOMAINS[0], 7, position, offset),
        _murmur3(VERIFIER_DOMAINS[1], 7, position, offset),
        _murmur3(VERIFIER_DOMAINS[0], 7, position + DRAFT_SALT, offset),
    ]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert not torch.any(one == other)


@triton.jit
def _streams_kernel(
    seeds_ptr, positions_ptr, noise_ptr, verifier_ptr, draft_ptr, uniform_ptr, low, high, offset,
    N: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    seed = tl.load(seeds_ptr + i)
    position = tl.load(positions_ptr + i)
    token = offset + tl.zeros_like(position)
    tl.store(noise_ptr + i, noise_token_id(0, seed, position, low, high))
    tl.store(verifier_ptr + i, murmur3_hash32(seed, position, token).to(tl.int64))
    tl.store(draft_ptr + i, murmur3_hash32(seed, position + 1073741824, token).to(tl.int64))
    tl.store(uniform_ptr + i, tl.rand(seed, position))


def _independence(a: torch.Tensor, b: torch.Tensor, cells: int) -> float:
    """p-value of two columns of labels in [0, cells), each label as likely as any."""
    expected = len(a) / cells**2
    counts = torch.bincount(a * cells + b, minlength=cells**2).double()
    statistic = float((counts - expected).square().sum() / expected)
    return chi_square_tail(statistic, cells**2 - 1)


def test_noise_ids_are_uniform_and_unlike_the_verifiers_numbers() -> None:
    """The device functions themselves, over many requests and positions."""
    low, high = 1, 17  # 16 ids
    n = 1 << 16
    seeds = torch.arange(256).repeat_interleave(n // 256) * 1_000_003
    positions = torch.arange(n // 256).repeat(256)
    noise, verifier, draft = (torch.empty(n, dtype=torch.int64) for _ in range(3))
    uniform = torch.empty(n)
    _streams_kernel[(1,)](
        seeds, positions, noise, verifier, draft, uniform, low, high, offset=0, N=n
    )
    assert torch.equal(verifier[:256], _murmur3(0, 0, positions[:256], torch.tensor(0)))
    assert int(noise.min()) == low and int(noise.max()) == high - 1
    counts = torch.bincount(noise - low, minlength=16).double()
    statistic = float((counts - n / 16).square().sum() / (n / 16))
    assert chi_square_tail(statistic, 15) > ALPHA
    label = noise - low
    for other in (verifier >> 28, draft >> 28, (uniform * 16).long().clamp(max=15)):
        assert _independence(label, other, 16) > ALPHA
    assert _independence(verifier >> 28, draft >> 28, 16) > ALPHA
    # Neighbouring positions, whose ids stand in one draft block.
    assert _independence(label[:-1], label[1:], 16) > ALPHA
    # The statistic sees a stream compared with itself.
    assert _independence(label, label, 16) < 1e-8


# --- row 0 -------------------------------------------------------------------------------------

ROW_0_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature-1": {},
    "temperature-0.5": {"temperature": 0.5},
    "temperature-1.7": {"temperature": 1.7},
    "top_k": {"top_k": 10},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "presence": {"presence_penalty": 1.0},
    "logit_bias": {"logit_bias": {i: 4.0 for i in range(40, 60)}},
    "min_tokens": {"min_tokens": 17, "stop_token_ids": [2000], "logit_bias": {2000: 6.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 120))},
    "logprobs": {"logprobs": 5},
    "seed": {"seed": 42},
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "joined": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "logit_bias": {40: 3.0},
        "seed": 9,
    },
}


@pytest.fixture(scope="module")
def uno(model: Path, adapter: Path) -> Iterator[Engine]:
    """UNO on the tests' common model, which has a tokenizer."""
    with engine(
        model, {"uno_lora_path": str(adapter), "num_speculative_tokens": BLOCK_SIZE}
    ) as running:
        yield running


class TestRow0:
    """Row 0 is the base model's own next-token law: whatever is set, its draft is accepted."""

    def _accepted(self, uno: Engine, params: dict[str, Any]) -> float:
        uno.speculator.counters.reset()
        prompts = make_prompts(2048, 4, lengths=(5, 9, 17, 33))
        ends = {"max_tokens": 24, "ignore_eos": "stop_token_ids" not in params}
        uno.tokens(prompts, SamplingParams(**{"temperature": 1.0, **ends, **params}))
        stats = uno.speculator.counters.snapshot()
        assert stats.proposed[0] >= 10
        return stats.acceptance[0]

    @pytest.mark.parametrize("name", ROW_0_PARAMS)
    def test_is_accepted(self, uno: Engine, name: str) -> None:
        # Of so few drafts at 0.999 or more, all.
        assert self._accepted(uno, ROW_0_PARAMS[name]) == 1.0

    def test_bad_words(self, uno: Engine) -> None:
        """Few tokens allowed, so that two-token bad words get half way all the time."""
        allowed = list(range(200, 206))
        tokenizer = uno.llm.get_tokenizer()
        words = [tokenizer.decode([t]) for t in allowed]
        params = {
            "allowed_token_ids": allowed,
            "bad_words": [words[0], *(a + b for a in words[1:3] for b in words[3:5])],
        }
        assert self._accepted(uno, params) == 1.0
