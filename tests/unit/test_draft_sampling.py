"""`DraftSampler` in parts: the same laws and tokens, and no more memory than the profile held."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno import draft_law, draft_sampling  # noqa: E402
from vllm_uno.draft_law import LawRows  # noqa: E402
from vllm_uno.draft_sampling import DraftBatch, DraftSampler  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import LogitBiasState  # noqa: E402

BLOCK, REQUESTS, VOCAB = 3, 5, 400


class Bias(LogitBiasState):
    """A processor whose result depends on the row: parts mixed up would show."""

    def __init__(self) -> None:
        self.use_logit_bias = np.ones(REQUESTS, dtype=bool)

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        assert len(context.pos) == len(logits) == len(context.expanded_idx_mapping)
        return logits + torch.sin(context.pos[:, None] * torch.arange(VOCAB))


def sample(processed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = LawRows.allocate(
        BLOCK,
        VOCAB,
        request=torch.arange(REQUESTS).repeat_interleave(BLOCK),
        positions=torch.randint(0, 900, (REQUESTS * BLOCK,), generator=generator),
        drafting=torch.tensor([True, True, False, True, True]),
    )

    def state(values: list[float], dtype: torch.dtype) -> SimpleNamespace:
        tensor = torch.tensor(values, dtype=dtype)
        return SimpleNamespace(gpu=tensor, np=tensor.numpy())

    states = SimpleNamespace(
        vocab_size=VOCAB,
        temperature=state([1.0, 0.0, 0.7, 0.7, 1.0], torch.float32),
        min_p=state([0.0, 0.0, 0.0, 0.1, 0.0], torch.float32),
        top_k=state([VOCAB, VOCAB, 9, VOCAB, 20], torch.int32),
        top_p=state([1.0, 1.0, 1.0, 1.0, 0.8], torch.float32),
        seeds=state([1, 2, 3, 4, 5], torch.int64),
    )
    sampler: Any = SimpleNamespace(
        sampling_states=states,
        use_fp64_gumbel=False,
        needs_logits_processing=np.full(REQUESTS, True),
        logits_processors=[Bias()] if processed else [],
        thinking_budget_state=SimpleNamespace(enabled=False, apply=lambda z, context: None),
    )
    slots = torch.arange(REQUESTS)
    rows.gather(slots, states, torch.zeros(REQUESTS, dtype=torch.bool), REQUESTS)
    laws = torch.full((REQUESTS, BLOCK, VOCAB), 7.0)
    # A head that looks up: a product's last bit may depend on the number of rows.
    hidden = torch.arange(REQUESTS * BLOCK)[:, None]
    logits = 3 * torch.randn(REQUESTS * BLOCK, VOCAB, generator=generator)
    out = torch.full((REQUESTS, BLOCK), -5)
    batch = DraftBatch(
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        seq_lens_upper_bound_np=np.full(REQUESTS, 1000),
        input_ids=torch.zeros(REQUESTS * BLOCK, dtype=torch.int32),
        positions=rows.positions,
    )
    DraftSampler(sampler, rows, laws)(hidden, lambda h: logits[h[:, 0]], batch, out)
    return laws, out


@pytest.mark.parametrize("processed", [False, True])
def test_parts_are_the_whole(processed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_law, "FILTER_ROWS", 1000)
    whole = sample(processed)
    assert whole[1].min() >= 0 and whole[1][2].eq(0).all()  # one does not draft
    for limit in (6, 2):
        monkeypatch.setattr(draft_sampling, "HEAD_ROWS", limit)
        parts = sample(processed)
        assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
