"""The draft-law kernels against vLLM's own, one after the other, and the PyTorch oracle.

On the CPU the kernels run in Triton's interpreter, with a GPU they are compiled.
"""

import types
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample  # noqa: E402
from vllm.v1.worker.gpu.sample.min_p import apply_min_p  # noqa: E402

from vllm_uno import draft_law  # noqa: E402
from vllm_uno.draft_law import LawRows, draft_law_reference, sample_draft_rows  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import apply_top_k_top_p  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77
UNUSED = 12345.0  # in the cache, where no law may be written


def sampling_states(generator: torch.Generator, slots: int, vocab: int) -> types.SimpleNamespace:
    """vLLM's sampling state by slot: every parameter on or off, a third of the slots greedy."""

    def pick(values: list[float], dtype: torch.dtype) -> types.SimpleNamespace:
        chosen = torch.randint(0, len(values), (slots,), generator=generator)
        return types.SimpleNamespace(gpu=torch.tensor(values, dtype=dtype)[chosen].to(DEVICE))

    seeds = torch.randint(-(2**62), 2**62, (slots,), generator=generator)
    return types.SimpleNamespace(
        vocab_size=vocab,
        temperature=pick([0.0, 0.7, 1.0], torch.float32),
        min_p=pick([0.0, 0.0, 0.05, 0.3], torch.float32),
        top_k=pick([vocab, vocab, 1, min(5, vocab), min(40, vocab)], torch.int32),
        top_p=pick([1.0, 1.0, 0.5, 0.9], torch.float32),
        seeds=types.SimpleNamespace(gpu=seeds.to(DEVICE)),
    )


def poisoned_rows(generator: torch.Generator, idx: torch.Tensor, max_reqs: int, block: int) -> Any:
    """`LawRows` whose inputs are set for requests `idx`, padded to one fewer than `max_reqs`."""
    num_reqs = len(idx)
    request = torch.full((max_reqs * block,), -1)
    request[: num_reqs * block] = idx.repeat_interleave(block)
    rows = LawRows.allocate(
        block,
        1,
        request=request.to(DEVICE),
        positions=torch.randint(0, 4096, (max_reqs * block,), generator=generator).to(DEVICE),
        drafting=(torch.rand(max_reqs, generator=generator) < 0.8).to(DEVICE),
    )
    rows.one_hot.fill_(True)
    for buffer in (rows.temperature, rows.min_p, rows.seeds, rows.top_k, rows.top_p):
        buffer.fill_(POISON)
    return rows


def no_grammar(slots: int) -> torch.Tensor:
    return torch.zeros(slots, dtype=torch.bool, device=DEVICE)


def random_logits(
    generator: torch.Generator, rows: int, vocab: int, dtype: torch.dtype
) -> torch.Tensor:
    """With ties: in bf16 there are many, and here in any dtype."""
    coarse = (torch.randn(rows, vocab, generator=generator) * 12).round() / 4
    logits = torch.where(torch.rand(rows, 1, generator=generator) < 0.5, coarse, coarse * 1.001)
    logits[torch.rand(rows, vocab, generator=generator) < 0.01] = float("-inf")
    logits[:, vocab // 2] = 9.0
    return logits.to(dtype).to(DEVICE)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 5),
    block=st.integers(1, 5),
    padding=st.integers(0, 2),
    vocab=st.sampled_from([3, 16, 1000, 2048, 2049, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    use_fp64=st.booleans(),
)
def test_laws_and_tokens_are_bitwise_those_of_vllms_kernels(
    seed: int,
    num_reqs: int,
    block: int,
    padding: int,
    vocab: int,
    dtype: torch.dtype,
    use_fp64: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    max_reqs = num_reqs + padding + 1
    states = sampling_states(g, max_reqs, vocab)
    idx = torch.randperm(max_reqs, generator=g)[:num_reqs]
    one_hot = (torch.rand(max_reqs, generator=g) < 0.3).to(DEVICE)
    rows = poisoned_rows(g, idx, max_reqs, block)
    idx = idx.to(DEVICE)
    padded = num_reqs + padding
    rows.gather(idx, states, one_hot, padded)
    assert (rows.temperature[padded:] == POISON).all() and (rows.top_p[padded * block :] < 0).all()

    # Greedy, one-hot and padding rows ask for no filter: vLLM's leaves such rows unread.
    quiet = (rows.temperature[:padded] == 0) | rows.one_hot[:padded]
    assert quiet[num_reqs:].all() and not rows.one_hot[num_reqs:padded].any()
    assert rows.one_hot[padded:].all()
    assert quiet[num_reqs:].all() and (rows.min_p[:padded][quiet] == 0).all()
    quiet = quiet.repeat_interleave(block)
    assert (rows.top_k[: padded * block][quiet] == vocab).all()
    assert (rows.top_p[: padded * block][quiet] == 1).all()

    logits = random_logits(g, padded * block, vocab, dtype)
    given_logits = logits.clone()
    cache = torch.full((max_reqs, block, vocab), UNUSED, device=DEVICE)
    out = torch.full((max_reqs * block,), POISON, device=DEVICE)
    sample_draft_rows(
        logits, rows.part(0, padded), cache, out[: padded * block], filters=True, use_fp64=use_fp64
    )
    assert torch.equal(logits, given_logits)

    # vLLM's kernels, with their copies. A one-hot row has the token of a greedy one.
    n = num_reqs * block
    slots, z = rows.request[:n], logits[:n].float()
    temperatures = torch.where(one_hot, 0.0, states.temperature.gpu)
    kept = z.clone()
    apply_temperature(kept, slots, temperatures)
    apply_min_p(kept, slots, states.min_p.gpu)
    kept = apply_top_k_top_p(kept, states.top_k.gpu[slots], states.top_p.gpu[slots])
    temperature = temperatures[slots]
    z = torch.where((kept == float("-inf")) & (temperature != 0)[:, None], float("-inf"), z)
    want_cache = torch.full_like(cache, UNUSED)
    want = gumbel_sample(
        z,
        slots,
        temperatures,
        states.seeds.gpu,
        rows.positions[:n],
        apply_temperature=True,
        is_drafting=True,
        logits_cache=want_cache,
        logits_cache_col=torch.arange(block, dtype=torch.int32, device=DEVICE).repeat(num_reqs),
        use_fp64=use_fp64,
    ).view(num_reqs, block)
    drafting = rows.drafting[:num_reqs]
    want_cache[idx[states.temperature.gpu[idx] == 0]] = UNUSED
    surely = (one_hot & (states.temperature.gpu != 0))[idx]
    laws = torch.full((num_reqs, block, vocab), float("-inf"), device=DEVICE)
    laws.scatter_(2, torch.where(drafting[:, None], want, 0)[:, :, None], 0.0)
    certain = surely | ~drafting
    want_cache[idx[certain]] = laws[certain]
    assert torch.equal(out[:n].view(num_reqs, block), torch.where(drafting[:, None], want, 0))
    assert torch.equal(cache, want_cache)
    # padding, and past it
    assert (out[n : padded * block] == 0).all() and (out[padded * block :] == POISON).all()

    sampled = (temperature != 0) & drafting.repeat_interleave(block)
    reference = draft_law_reference(
        logits[:n][sampled],
        temperature[sampled],
        states.min_p.gpu[slots[sampled]],
        states.top_k.gpu[slots[sampled]],
        states.top_p.gpu[slots[sampled]],
    )
    stored = cache[idx].flatten(0, 1)[sampled]
    if DEVICE.type == "cpu":  # compiled division and logarithm are not PyTorch's to the last bit
        assert torch.equal(stored, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_filters_change_nothing(dtype: torch.dtype) -> None:
    """A graph launches them always; the eager path leaves them out where it can."""
    g = torch.Generator().manual_seed(3)
    block, num_reqs, vocab = 3, 4, 3000
    states = sampling_states(g, num_reqs, vocab)
    states.temperature.gpu.copy_(torch.tensor([0.0, 0.7, 1.0, 1.3]))
    states.min_p.gpu.zero_()
    states.top_k.gpu.fill_(vocab)
    states.top_p.gpu.fill_(1.0)
    rows = poisoned_rows(g, torch.arange(num_reqs), num_reqs, block)
    rows.drafting.fill_(True)
    rows.gather(torch.arange(num_reqs, device=DEVICE), states, no_grammar(num_reqs), num_reqs)
    logits = random_logits(g, num_reqs * block, vocab, dtype)
    made = []
    for filters in (False, True):
        cache = torch.full((num_reqs, block, vocab), UNUSED, device=DEVICE)
        out = torch.full((num_reqs * block,), POISON, device=DEVICE)
        sample_draft_rows(logits, rows, cache, out, filters=filters)
        made.append((cache, out))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    assert torch.equal(made[0][0][1:].flatten(0, 1), logits[block:].float())
    assert (made[0][0][0] == UNUSED).all()


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(4)
    block, num_reqs, vocab = 3, 7, 500
    states = sampling_states(g, num_reqs, vocab)
    rows = poisoned_rows(g, torch.arange(num_reqs), num_reqs, block)
    rows.gather(torch.arange(num_reqs, device=DEVICE), states, no_grammar(num_reqs), num_reqs)
    logits = random_logits(g, num_reqs * block, vocab, torch.bfloat16)
    made = []
    for limit in (128, 7, 2):
        monkeypatch.setattr(draft_law, "FILTER_ROWS", limit)
        cache = torch.full((num_reqs, block, vocab), UNUSED, device=DEVICE)
        out = torch.full((num_reqs * block,), POISON, device=DEVICE)
        sample_draft_rows(logits, rows, cache, out, filters=True)
        made.append((cache, out))
    for cache, out in made[1:]:
        assert torch.equal(cache, made[0][0]) and torch.equal(out, made[0][1])


def test_without_a_cache_every_row_is_an_argmax() -> None:
    g = torch.Generator().manual_seed(5)
    block, num_reqs, vocab = 2, 3, 4100
    states = sampling_states(g, num_reqs, vocab)
    states.temperature.gpu.fill_(0.7)
    rows = poisoned_rows(g, torch.arange(num_reqs), num_reqs, block)
    rows.drafting.copy_(torch.tensor([True, False, True]))
    rows.gather(torch.arange(num_reqs, device=DEVICE), states, no_grammar(num_reqs), num_reqs)
    logits = random_logits(g, num_reqs * block, vocab, torch.bfloat16)
    # Ties, across blocks of tokens too: the first wins, as in vLLM's verification.
    logits[0, [4090, 70, 3000]] = 50.0
    logits[1, [4099, 2047]] = 50.0
    # A NaN is no token.
    logits[4, 4000] = float("nan")
    out = torch.full((num_reqs * block,), POISON, device=DEVICE)
    sample_draft_rows(logits, rows, None, out, filters=True)
    best = logits.nan_to_num(nan=float("-inf"), neginf=float("-inf")).float().argmax(-1)
    best[2:4] = 0  # does not draft
    assert best[0] == 70 and best[1] == 2047
    assert out.tolist() == best.tolist()
