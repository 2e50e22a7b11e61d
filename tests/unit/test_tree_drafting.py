"""From logits to trees: roots, chains, inert requests, chunks, against the parts' references."""

import types
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.draft_sampling import DraftBatch  # noqa: E402
from vllm_uno.tree import drafting as module  # noqa: E402
from vllm_uno.tree.builder import TreeBuffers, tree_reference  # noqa: E402
from vllm_uno.tree.candidates import candidates_reference  # noqa: E402
from vllm_uno.tree.drafting import TreeDrafter, needs_path  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import (  # noqa: E402
    BadWordsState,
    LogitBiasState,
    PenaltiesState,
    gumbel_sample,
)

SLOTS, B, K, V, VOCAB = 7, 4, 3, 9, 50
REQUESTS = 5


class Case:
    """A draft of 5 requests: slot 3 needs its path, batch row 1 does not draft."""

    def __init__(self, temperature: float) -> None:
        g = torch.Generator().manual_seed(3)
        self.slots = torch.tensor([4, 0, 3, 6, 1])
        self.logits = torch.randn(REQUESTS * B, VOCAB, generator=g) * 2
        self.positions = torch.randint(0, 90, (REQUESTS, 1), generator=g) + torch.arange(B)
        self.temperature = torch.full((SLOTS,), temperature)
        self.seeds = torch.randint(0, 2**40, (SLOTS,), generator=g)
        self.drafting = torch.tensor([True, False, True, True, True])
        self.processed: list[Any] = []

        def apply(logits: torch.Tensor, *rows: Any) -> torch.Tensor:
            assert all(x.is_contiguous() for x in rows if isinstance(x, torch.Tensor))
            self.processed.append(rows)
            return logits.float() / (temperature or 1.0)

        def buffer(x: torch.Tensor) -> Any:
            return types.SimpleNamespace(gpu=x)

        self.sampler: Any = types.SimpleNamespace(
            sampling_states=types.SimpleNamespace(
                vocab_size=VOCAB, temperature=buffer(self.temperature), seeds=buffer(self.seeds)
            ),
            apply_sampling_params=apply,
            use_fp64_gumbel=False,
        )
        self.trees = TreeBuffers.allocate(SLOTS, V, torch.device("cpu"))
        needs = np.zeros(SLOTS, dtype=bool)
        needs[3] = True
        self.drafter = TreeDrafter(self.sampler, self.trees, needs, B, K)

    def draft(self) -> torch.Tensor:
        out = torch.full((REQUESTS, V), -7)
        self.drafter(
            self.logits,
            lambda hidden: hidden,
            DraftBatch(
                idx_mapping=self.slots,
                idx_mapping_np=self.slots.numpy(),
                seq_lens_upper_bound_np=np.full(REQUESTS, 100),
                input_ids=torch.zeros(REQUESTS * B, dtype=torch.int32),
                positions=self.positions.view(-1),
            ),
            self.drafting,
            out,
        )
        return out

    def sampled(self) -> list[list[int]]:
        """What verification's own noise samples of every row."""
        t = float(self.temperature[0])
        tokens = gumbel_sample(
            self.logits / (t or 1.0),
            self.slots.repeat_interleave(B),
            self.temperature,
            self.seeds,
            self.positions.view(-1),
            apply_temperature=False,
            is_drafting=False,
        )
        return tokens.view(REQUESTS, B).tolist()


@pytest.mark.parametrize("head_rows", [512, 2 * B, B], ids=["whole", "chunks of 2", "one by one"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_and_chains(
    monkeypatch: pytest.MonkeyPatch, temperature: float, head_rows: int
) -> None:
    monkeypatch.setattr(module, "HEAD_ROWS", head_rows)
    case = Case(temperature)
    drafted = case.draft().tolist()
    rows = case.sampled()
    tokens, log_probs = candidates_reference(
        case.logits.view(REQUESTS, B, VOCAB), case.temperature[case.slots], K
    )
    chain = list(range(-1, V - 1))
    for request, slot in enumerate(case.slots.tolist()):
        parents = case.trees.parents[slot].tolist()
        if request == 1:
            assert (drafted[request], parents) == ([0] * V, chain)
        elif slot == 3:
            assert (drafted[request], parents) == (rows[request] + [0] * (V - B), chain)
        else:
            want = tree_reference(
                rows[request][0],
                tokens[request].numpy(),
                log_probs[request].float().numpy(),
                V,
            )
            assert (drafted[request], parents) == want[:2]
            assert case.trees.depths[slot].tolist() == want[2]
        assert drafted[request] == case.trees.tokens[slot].tolist()


def test_rows_are_processed_as_of_their_requests() -> None:
    case = Case(0.7)
    case.draft()
    (slots, idx, idx_np, positions, _, local, bounds), chained = case.processed
    assert slots.tolist() == idx.tolist() == idx_np.tolist() == case.slots.tolist()
    assert positions.tolist() == case.positions[:, 0].tolist()
    assert local.tolist() == [0] * REQUESTS and len(bounds) == REQUESTS
    assert chained[0].tolist() == [3] * B and chained[1].tolist() == [3]
    assert chained[3].tolist() == case.positions[2].tolist()


def test_who_needs_a_path() -> None:
    built_in = [object.__new__(kind) for kind in (LogitBiasState, PenaltiesState, BadWordsState)]
    sampler: Any = types.SimpleNamespace(logits_processors=built_in)
    plain = SamplingParams(temperature=0.7, top_k=5, min_p=0.1, logit_bias={1: 2.0}, min_tokens=3)
    assert not needs_path(plain, sampler)
    assert not needs_path(None, sampler)
    bad_words = SamplingParams(bad_words=["x"])
    bad_words._bad_words_token_ids = [[5]]
    for params in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
        SamplingParams(thinking_token_budget=5),
        bad_words,
    ):
        assert needs_path(params, sampler)
    sampler.logits_processors.append(object())
    assert needs_path(plain, sampler)
