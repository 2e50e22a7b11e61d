"""Candidates against a stable sort of whole rows in float64, outputs poisoned.

On the CPU the kernels run in Triton's interpreter, with a GPU they are compiled.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno.tree.candidates import (  # noqa: E402
    Candidates,
    candidates_reference,
    select_candidates,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(
    logits: torch.Tensor,
    idx: torch.Tensor,
    temperature: torch.Tensor,
    top_k: int,
    chunk: int | None = None,
) -> None:
    """The kernels' candidates of logits [n, B, vocab] are the oracle's; the rest stays poisoned."""
    n, block_size, vocab = logits.shape
    out = Candidates.allocate(n + 1, block_size, top_k, vocab, DEVICE, chunk)
    out.tokens.fill_(POISON)
    out.log_probs.fill_(POISON)
    out.group_best.fill_(2**62)
    out.split_max.fill_(1e9)
    out.split_sum.fill_(1e9)
    step = chunk or n
    for start in range(0, n, step):
        part = logits[start : start + step]
        select_candidates(
            out,
            part.reshape(-1, vocab).to(DEVICE),
            # A strided view, as row_request[::B] is.
            idx.repeat_interleave(2)[2 * start : 2 * (start + step)].to(DEVICE)[::2],
            temperature.to(DEVICE),
            start,
        )
    tokens, log_probs = out.tokens.cpu(), out.log_probs.cpu().double()
    want_tokens, want = candidates_reference(logits, temperature[idx.clamp(min=0)], top_k)
    live = idx >= 0
    assert torch.equal(tokens[:n][live].long(), want_tokens[live])
    # As rows: an exponential's relative error is 1e-6, a logit's distance from the best exact.
    torch.testing.assert_close(log_probs[:n][live], want[live], rtol=2e-6, atol=2e-5)
    for left_alone in (tokens[:n][~live], tokens[n:], log_probs[:n][~live], log_probs[n:]):
        assert (left_alone == POISON).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 3),
    block_size=st.integers(2, 4),
    vocab=st.one_of(st.integers(1, 300), st.integers(8000, 20_000)),
    top_k=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    levels=st.sampled_from([0, 1, 2, 40]),
    chunk=st.sampled_from([None, 1, 2]),
)
def test_kernels_equal_oracle(
    seed: int,
    num_reqs: int,
    block_size: int,
    vocab: int,
    top_k: int,
    dtype: torch.dtype,
    levels: int,
    chunk: int | None,
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_reqs, block_size, vocab, generator=g) * 5
    if levels:  # ties, of both zeros too
        logits = (logits / 20 * levels).round() / levels * 8
    for value, share in ((-math.inf, 0.2), (math.nan, 0.1)):
        logits[torch.rand(logits.shape, generator=g) < share * (seed % 3)] = value
    idx = torch.randperm(num_reqs + 2, generator=g)[:num_reqs]
    idx[torch.rand(num_reqs, generator=g) < 0.2] = -1
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.5, 0.01])[
        torch.randint(0, 5, (num_reqs + 2,), generator=g)
    ]
    check(logits.to(dtype), idx, temperature, min(top_k, vocab), chunk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_best_tokens_in_one_group_ties_across_groups_and_rows_of_nothing(
    dtype: torch.dtype,
) -> None:
    vocab, top_k = 20_000, 32
    logits = torch.zeros(1, 7, vocab)
    logits[0, 1, 9000 : 9000 + 32] = torch.arange(32).float() + 1  # a group or neighbours
    logits[0, 2] = -3.0  # all equal: the lowest ids
    logits[0, 3] = math.nan
    logits[0, 4] = -math.inf
    logits[0, 5] = math.inf
    logits[0, 6, ::2] = -0.0
    check(logits.to(dtype), torch.tensor([0]), torch.tensor([1.0]), top_k)


def test_whole_vocabulary_as_candidates_and_limits() -> None:
    logits = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0))
    check(logits, torch.tensor([0]), torch.tensor([0.7]), 128)
    for top_k, vocab in ((0, 1000), (129, 1000), (9, 8)):
        with pytest.raises(ValueError, match="candidates a position"):
            Candidates.allocate(1, 2, top_k, vocab, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 8, 32, 128])
def test_large_vocabulary(dtype: torch.dtype, top_k: int) -> None:
    g = torch.Generator().manual_seed(top_k)
    logits = (torch.randn(3, 16, 151_936, generator=g) * 4).to(dtype)
    check(logits, torch.tensor([1, -1, 0]), torch.tensor([0.8, 0.0]), top_k)


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.empty(2 * 16, 151_936, dtype=torch.bfloat16, device=DEVICE)
    idx = torch.tensor([0, 1], device=DEVICE)
    temperature = torch.tensor([1.0, 0.5], device=DEVICE)
    out = Candidates.allocate(2, 16, 32, 151_936, DEVICE)
    logits.zero_()
    select_candidates(out, logits, idx, temperature)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_candidates(out, logits, idx, temperature)
    fresh = (torch.randn(2, 16, 151_936, generator=g) * 4).bfloat16()
    logits.copy_(fresh.view(32, -1))
    graph.replay()
    want, _ = candidates_reference(fresh, temperature.cpu(), 32)
    assert torch.equal(out.tokens.cpu().long(), want)
