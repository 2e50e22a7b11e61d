"""Is the sampled output distributed as plain vLLM's? The statistics of the sampled-law tests.

`processed_law` gives p, the law that plain vLLM samples from, by plain PyTorch code written from
the order of operations in vLLM 0.32.0 (`v1/worker/gpu/sample/`) and sharing none of it.
`law_test` compares emitted tokens with it. `holm` decides over many settings.

Why the statistic is valid
--------------------------
Let token n have prefix h_n, cycle offset j_n and plain law p_n = p(. | h_n), and let
d_n[v] = 1[x_n = v] - p_n[v]. A token is emitted at offset j of its cycle exactly if the drafts at
offsets below j were accepted, which past tokens and past random numbers decide; so j_n and p_n are
known before the random numbers of position n are used. Given that past, with proposal law q and
the accept-or-resample rule, P(x_n = v) = min(p, q)[v] + (1 - sum min(p, q)) * residual[v] = p[v],
and p[v] as well for the bonus token. (Drafts behind a rejected one are dropped unseen. So a
position's random numbers decide one token only, even where it is drafted again with the same
ones.) Hence E[d_n | past, j_n] = 0: for each offset, and for plain output at its one offset, the
sums of d are martingales. Terms of different tokens are uncorrelated, Cov(d_n | past) =
diag(p_n) - p_n p_n^T, and by the martingale central limit theorem the quadratic form in the summed
covariance tends to chi-square. Tokens need neither independent nor identical laws. Two conditions
are the caller's: no two requests may share random numbers (give each its own seed), and whether a
token is counted must not depend on its own value (end by length, with `ignore_eos`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Where the normal approximation is trusted: the least expected count of a category, as in
# Pearson's test, and the most that one token may move a direction, in its standard deviations.
MIN_EXPECTED = 5.0
MAX_JUMP = 0.7


class SamplingSettings(Protocol):
    """The part of vLLM's `SamplingParams` that `processed_law` understands."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None


@dataclass(frozen=True)
class LawResult:
    """`statistic` is chi-square with `dof` degrees of freedom under the plain law.

    `impossible` counts tokens to which p gives no mass at all. Rounding at the edge of top-k,
    top-p or min_p can make a few among a million; the statistic need not see them (with top_k=1 it
    has no degree of freedom), so bound this count beside the p-value.
    """

    statistic: float
    dof: int
    p_value: float
    tokens: int
    impossible: int


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(chi-square with `dof` degrees of freedom > statistic); 1 if there are none."""
    if dof == 0:
        return 1.0
    half = torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def _groups(expected: torch.Tensor) -> torch.Tensor:
    """[V] -> [V] group of each category, so that every group expects `MIN_EXPECTED` or more.

    The rare categories share group 0; if it is rare itself, the next larger ones join it.
    """
    order = expected.argsort()
    totals = expected[order].cumsum(0)
    rare = (expected < MIN_EXPECTED).sum()
    merged = torch.maximum(rare, (totals < MIN_EXPECTED).sum() + 1)
    ranks = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, (ranks - merged + 1).clamp(min=0))


def _quadratic_form(deviation: torch.Tensor, p: torch.Tensor) -> tuple[float, int]:
    """(S^T Cov^+ S, rank) for S = `deviation` [V] and the laws p [N, V] of one offset."""
    groups = _groups(p.sum(0))
    count = int(groups.max()) + 1
    s = deviation.new_zeros(count).index_add_(0, groups, deviation)
    p = p.new_zeros(p.shape[0], count).index_add_(1, groups, p)
    expected = p.sum(0)
    covariance = expected.diag() - p.T @ p
    # In units of each category's own Poisson deviation, so that one tolerance fits all.
    scale = expected.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * covariance * scale)
    # Null directions drop out: laws sum to 1, and where supports are disjoint more sums are fixed.
    # So do those so close to null that one token moves them by much of their deviation.
    jump = (vectors * scale[:, None]).abs().amax(0)
    usable = (values > 1e-9) & (jump <= MAX_JUMP * values.clamp(min=0).sqrt())
    projected = (vectors.T @ (scale * s))[usable]
    return (projected.square() / values[usable]).sum().item(), int(usable.sum())


def law_test(offsets: torch.Tensor, tokens: torch.Tensor, p: torch.Tensor) -> LawResult:
    """Chi-square over (j, v) of S[j, v] = sum over tokens at offset j of 1[x = v] - p(v).

    offsets: [N] int, the place of each token in its cycle (any labels; for plain output, and for
    tokens sampled by the prefill, a label of its own). tokens: [N] int, emitted ids. p: [N, V],
    the plain law at each token, teacher-forced on the emitted prefix. Any device; runs in fp64.
    """
    p = p.double()
    p = p / p.sum(-1, keepdim=True)
    index = tokens.long()[:, None]
    deviation = (-p).scatter_add(1, index, torch.ones_like(index, dtype=p.dtype))
    statistic, dof = 0.0, 0
    for offset in offsets.unique().tolist():
        chosen = offsets == offset
        value, rank = _quadratic_form(deviation[chosen].sum(0), p[chosen])
        statistic, dof = statistic + value, dof + rank
    impossible = int((p.gather(1, index) == 0).sum())
    return LawResult(statistic, dof, chi_square_tail(statistic, dof), len(p), impossible)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects; family-wise error at most `alpha`."""
    rejected = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for step, i in enumerate(order):
        if not p_values[i] <= alpha / (len(order) - step):
            break
        rejected[i] = True
    return rejected


def _refuse_unknown(params: SamplingSettings) -> None:
    """A setting that this module does not model must not pass unnoticed."""
    for name in ("bad_words", "allowed_token_ids", "min_tokens", "structured_outputs"):
        if getattr(params, name, None):
            raise NotImplementedError(f"processed_law does not model {name}")


def _histories(
    vocab_size: int, prompt_ids: Sequence[int], output_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt mask [V] bool, and [N, V] counts of each token among the outputs before row n."""
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=output_ids.device)
    in_prompt[list(prompt_ids)] = True
    once = torch.nn.functional.one_hot(output_ids.long(), vocab_size)
    return in_prompt, once.cumsum(0) - once


def processed_law(
    logits: torch.Tensor,
    params: SamplingSettings,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """[N, V] laws that plain vLLM samples one request's output tokens from, as fp32.

    logits: [N, V], the model's logits teacher-forced on this request; row n is the one from which
    output token n was sampled. output_ids: [N], the whole output; row n sees output_ids[:n].

    The order is vLLM's: logit bias, repetition, frequency and presence penalties, temperature,
    min_p, top-k, then top-p on what is left, renormalised. Temperature 0 puts all mass on the
    first largest processed logit.
    """
    _refuse_unknown(params)
    z = logits.float().clone()
    vocab_size = z.shape[-1]
    outputs = torch.as_tensor(output_ids, device=z.device)
    if outputs.shape != z.shape[:1]:
        raise ValueError(f"{len(outputs)} output tokens for {len(z)} rows of logits")

    for token, bias in (params.logit_bias or {}).items():
        z[:, int(token)] += bias

    in_prompt, counts = _histories(vocab_size, prompt_ids, outputs)
    seen = counts > 0
    # Repetition counts the prompt, the other two do not.
    repeated = in_prompt | seen
    penalised = torch.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty)
    z = torch.where(repeated, penalised, z)
    z = z - params.frequency_penalty * counts - params.presence_penalty * seen

    if params.temperature == 0:
        return torch.nn.functional.one_hot(z.argmax(-1), vocab_size).float()
    z = z / params.temperature

    if params.min_p > 0:
        # p(v) >= min_p * max p, which only compares logits.
        floor = z.amax(-1, keepdim=True) + torch.log(torch.tensor(params.min_p, device=z.device))
        z = z.masked_fill(z < floor, -torch.inf)

    if 0 < params.top_k < vocab_size:
        kth = z.topk(params.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < kth, -torch.inf)

    p = z.softmax(-1)
    if params.top_p < 1:
        # A token stays if the tokens above it hold less than top_p: the smallest set whose mass
        # reaches it, and always the largest token.
        sorted_p, order = p.sort(-1, descending=True)
        above = sorted_p.cumsum(-1) - sorted_p
        kept = above < params.top_p
        kept[:, 0] = True
        p = p * torch.zeros_like(kept).scatter_(-1, order, kept)
        p = p / p.sum(-1, keepdim=True)
    return p
