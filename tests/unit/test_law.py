"""The statistics of the sampled-law tests, on simulated speculative decoding."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from law import LawResult, chi_square_tail, holm, law_test, processed_law
from scipy import stats

VOCAB = 8
DRAFTS = 3


def settings(**changes: object) -> SimpleNamespace:
    """vLLM's defaults of the sampling settings, with `changes`."""
    plain: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": None,
    }
    return SimpleNamespace(**plain | changes)


# ---- simulated linear UNO over a model whose next token depends on the last one


@dataclass(frozen=True)
class Scheme:
    """Speculative sampling, right by default; each flag breaks it in one way."""

    temperature: float = 0.8
    top_k: int = 0
    shared_noise: bool = False
    residual_row_off_by_one: bool = False
    residual_is_target: bool = False
    bonus_row_off_by_one: bool = False
    draft_temperature_ignored: bool = False


@dataclass(frozen=True)
class Run:
    """Emitted tokens, in the arguments of `law_test`, sorted by the chain each comes from."""

    offsets: torch.Tensor
    tokens: torch.Tensor
    laws: torch.Tensor
    chains: torch.Tensor

    def test(self) -> LawResult:
        return law_test(self.offsets, self.tokens, self.laws)

    def test_parts(self, parts: int) -> list[LawResult]:
        """`law_test` of each of `parts` groups of chains."""
        size = (int(self.chains.max()) + 1) // parts
        ends = torch.searchsorted(self.chains, torch.arange(1, parts) * size).tolist()
        columns = (c.tensor_split(ends) for c in (self.offsets, self.tokens, self.laws))
        return [law_test(*part) for part in zip(*columns, strict=True)]


def gumbel(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp(min=1e-300)))


def law_of(z: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """[..., V] logits to probabilities at the scheme's temperature and top-k."""
    if scheme.top_k:
        z = z.masked_fill(z < z.topk(scheme.top_k).values[..., -1:], -torch.inf)
    return (z / scheme.temperature).softmax(-1)


def simulate(scheme: Scheme, chains: int, cycles: int, seed: int = 0) -> Run:
    """`chains` independent requests, `cycles` draft-and-verify cycles each.

    Row 0 proposes from the target's own law, as UNO's seed row does; rows 1 .. from laws that
    know the seed only and are wrong by noise of deviation 1.2 in the logits.
    """
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    draft = target + 1.2 * torch.randn(DRAFTS, VOCAB, VOCAB, generator=generator)
    draft[0] = target
    q_tables = law_of(draft, scheme)  # [row, seed, V]
    sampled_from = draft.softmax(-1) if scheme.draft_temperature_ignored else q_tables
    p_table = law_of(target, scheme)

    emitted: list[tuple[torch.Tensor, ...]] = []
    last = torch.zeros(chains, dtype=torch.long)
    chain = torch.arange(chains)

    def emit(offset: int, token: torch.Tensor, p: torch.Tensor, where: torch.Tensor) -> None:
        chosen = chain[where]
        emitted.append((torch.full_like(chosen, offset), token[where], p[where], chosen))

    for _ in range(cycles):
        seed_token = last
        before_last = last
        alive = torch.ones(chains, dtype=torch.bool)
        for row in range(DRAFTS):
            p, q = p_table[last], q_tables[row, seed_token]
            noise = gumbel(p.shape, generator)
            d = (sampled_from[row, seed_token].log() + noise).argmax(-1, keepdim=True)
            u = torch.rand(chains, generator=generator, dtype=torch.float64)
            accepted = u < (p.gather(1, d) / q.gather(1, d))[:, 0]
            if scheme.residual_row_off_by_one:
                q = q_tables[row + 1 if row + 1 < DRAFTS else row - 1, seed_token]
            residual = p if scheme.residual_is_target else (p - q).clamp(min=0)
            fresh = noise if scheme.shared_noise else gumbel(p.shape, generator)
            token = torch.where(accepted, d[:, 0], (residual.log() + fresh).argmax(-1))
            emit(row, token, p, alive)
            before_last = torch.where(alive, last, before_last)
            last = torch.where(alive, token, last)
            alive = alive & accepted
        p = p_table[last]
        bonus_p = p_table[before_last] if scheme.bonus_row_off_by_one else p
        bonus = (bonus_p.log() + gumbel(p.shape, generator)).argmax(-1)
        emit(DRAFTS, bonus, p, alive)
        last = torch.where(alive, bonus, last)
    columns = [torch.cat(column) for column in zip(*emitted, strict=True)]
    by_chain = columns[-1].argsort(stable=True)
    return Run(*(column[by_chain] for column in columns))


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(top_k=3), Scheme(temperature=0.15)])
def test_right_scheme_gives_uniform_p_values(scheme: Scheme) -> None:
    """200 runs of 40 requests: Kolmogorov-Smirnov against uniform, and the mean of chi-square."""
    runs, chains = 200, 40
    results = simulate(scheme, runs * chains, cycles=16).test_parts(runs)
    assert min(r.tokens for r in results) > 1000
    assert all(r.impossible == 0 and r.dof > 0 for r in results)
    assert stats.kstest([r.p_value for r in results], "uniform").pvalue > 0.01
    dof = sum(r.dof for r in results)
    assert chi_square_tail(sum(r.statistic for r in results), dof) > 0.01


def test_right_scheme_passes_with_many_tokens() -> None:
    result = simulate(Scheme(), chains=8000, cycles=16).test()
    # 4 offsets of 8 categories, each with one sum fixed.
    assert result.dof == (DRAFTS + 1) * (VOCAB - 1)
    assert result.tokens > 250_000
    assert result.p_value > 0.01


@pytest.mark.parametrize(
    "sabotage",
    [
        "shared_noise",
        "residual_row_off_by_one",
        "residual_is_target",
        "bonus_row_off_by_one",
        "draft_temperature_ignored",
    ],
)
def test_each_sabotage_is_found(sabotage: str) -> None:
    """Shared noise is the faintest by far: it takes the 250,000 tokens that the issue asks for."""
    result = simulate(replace(Scheme(), **{sabotage: True}), chains=8000, cycles=16).test()
    print(f"{sabotage}: {result}")
    assert result.tokens > 250_000
    assert result.p_value < 1e-8


# ---- the parts of the statistic


def test_constant_law_is_pearsons_chi_square() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    tokens = torch.multinomial(p, 2000, replacement=True, generator=generator)
    result = law_test(torch.zeros(2000, dtype=torch.long), tokens, p.expand(2000, 4))
    pearson = stats.chisquare(torch.bincount(tokens, minlength=4).numpy(), 2000 * p.numpy())
    assert result.dof == 3
    assert result.statistic == pytest.approx(pearson.statistic)
    assert result.p_value == pytest.approx(pearson.pvalue)


def test_rare_categories_are_merged() -> None:
    """Expected counts 985, 10, 2, 2, 1, 0: the last four share a category, of 5."""
    p = torch.tensor([0.985, 0.01, 0.002, 0.002, 0.001, 0.0], dtype=torch.float64)
    tokens = torch.tensor([0] * 985 + [1] * 10 + [2] * 2 + [3] * 2 + [4])
    offsets = torch.zeros(1000, dtype=torch.long)
    result = law_test(offsets, tokens, p.expand(1000, 6))
    assert result.dof == 2
    assert result.statistic == pytest.approx(0, abs=1e-9)
    tokens[:3] = 5
    assert law_test(offsets, tokens, p.expand(1000, 6)).impossible == 3


def test_sums_fixed_by_disjoint_supports_count_no_degree_of_freedom() -> None:
    half = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75]], dtype=torch.float64)
    p = half.repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(p, 1, generator=generator)[:, 0]
    assert law_test(torch.zeros(400, dtype=torch.long), tokens, p).dof == 2


def test_greedy_law_leaves_only_the_impossible_count() -> None:
    p = torch.eye(4).repeat(50, 1)
    tokens = torch.arange(4).repeat(50)
    offsets = torch.zeros(200, dtype=torch.long)
    assert law_test(offsets, tokens, p) == LawResult(0.0, 0, 1.0, 200, 0)
    tokens[0] = 1
    assert law_test(offsets, tokens, p).impossible == 1


@pytest.mark.parametrize("dof", [1, 7, 45, 400])
def test_chi_square_tail(dof: int) -> None:
    for times in (0.5, 1.0, 1.5, 4.0):
        expected = stats.chi2.sf(times * dof, dof)
        assert chi_square_tail(times * dof, dof) == pytest.approx(expected, rel=1e-6, abs=1e-30)
    assert chi_square_tail(1e4 * dof, dof) < 1e-100


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    # The step-down rule stops at the first that stands, even if a later one is below its level.
    assert holm([0.03, 0.03, 0.03], 0.05) == [False, False, False]
    assert holm([0.0, 0.02, 0.04], 0.05) == [True, True, True]
    assert holm([math.nan, 0.5], 0.05) == [False, False]
    assert holm([], 0.05) == []


# ---- the plain law


def test_law_of_one_row_by_hand() -> None:
    """Bias, then penalties (the prompt counts for repetition only), then temperature."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]]).repeat(3, 1)
    params = settings(
        temperature=0.5,
        repetition_penalty=2.0,
        frequency_penalty=0.1,
        presence_penalty=0.3,
        logit_bias={3: 1.5},
    )
    p = processed_law(logits, params, prompt_ids=[1], output_ids=[0, 0, 2])
    rows = [
        [2.0, -2.0, 0.5, 1.5],
        [1.0 - 0.1 - 0.3, -2.0, 0.5, 1.5],
        [1.0 - 0.2 - 0.3, -2.0, 0.5, 1.5],
    ]
    torch.testing.assert_close(p, (torch.tensor(rows) / 0.5).softmax(-1))


def test_filters_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()

    def law(**changes: object) -> list[float]:
        p = processed_law(logits, settings(**changes), [], [0])[0]
        return [round(v, 6) for v in p.tolist()]

    assert law() == [0.1, 0.4, 0.2, 0.3]
    assert law(top_k=2) == [0, round(4 / 7, 6), 0, round(3 / 7, 6)]
    assert law(min_p=0.6) == [0, round(4 / 7, 6), 0, round(3 / 7, 6)]
    assert law(top_p=0.65) == [0, round(4 / 7, 6), 0, round(3 / 7, 6)]
    assert law(top_p=0.75) == [0, round(4 / 9, 6), round(2 / 9, 6), round(3 / 9, 6)]
    assert law(top_p=1e-6) == [0, 1, 0, 0]
    # On the renormalised rest: 4/7 of two tokens reaches 0.55, 0.4 of all four does not.
    assert law(top_k=2, top_p=0.55) == [0, 1, 0, 0]
    assert law(top_p=0.55) == [0, round(4 / 7, 6), 0, round(3 / 7, 6)]
    assert law(temperature=0, top_k=2) == [0, 1, 0, 0]
    assert law(top_k=4) == law(top_k=-1) == law(top_k=99) == law()


def test_settings_outside_the_model_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="min_tokens"):
        processed_law(torch.zeros(1, 4), settings(min_tokens=3), [], [0])
    with pytest.raises(ValueError, match="2 output tokens for 1 rows"):
        processed_law(torch.zeros(1, 4), settings(), [], [0, 1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6, "top_k": 9, "top_p": 0.7},
        {"min_p": 0.2, "repetition_penalty": 1.7},
        {
            "temperature": 1.4,
            "top_k": 12,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": -0.6,
            "logit_bias": {3: 2.5, 7: -1.0},
        },
    ],
)
def test_agrees_with_vllms_kernels(changes: dict[str, object]) -> None:
    """20 output tokens of one request, as 20 verify rows of vLLM's own sampling kernels."""
    import vllm_uno

    vllm_uno.register()  # on the CPU: the interpreter's mends
    from vllm.v1.worker.gpu.sample import gumbel as temperature_kernel
    from vllm.v1.worker.gpu.sample import logit_bias, min_p, penalties, states

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params, vocab, rows = settings(**changes), 24, 20
    generator = torch.Generator().manual_seed(5)
    logits = (2 * torch.randn(rows, vocab, generator=generator)).to(device)
    prompt = torch.randint(0, vocab, (6,), generator=generator).tolist()
    output = torch.randint(0, vocab, (rows,), generator=generator)
    ours = processed_law(logits, params, prompt, output.to(device))

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    z = logits.clone()
    request = torch.zeros(rows, dtype=torch.int32, device=device)
    row = torch.arange(rows, dtype=torch.int32, device=device)
    bias = params.logit_bias or {}
    none, no_ids = ints(0), ints(0)[None]
    logit_bias.apply_logit_bias(
        z,
        request,
        row,
        none,
        no_ids,
        ints(len(bias)),
        ints(*(bias or {0: 0.0}))[None],
        floats(*(bias or {0: 0.0}).values())[None],
        none,
        none,
        none,
        no_ids,
    )
    # Row n of a request's verify pass holds output token n-1; row 0 holds the last prompt token.
    fed = torch.tensor([prompt[-1], *output[:-1].tolist()], dtype=torch.int32, device=device)
    penalties.apply_penalties(
        z,
        request,
        fed,
        row,
        floats(params.repetition_penalty),
        floats(params.frequency_penalty),
        floats(params.presence_penalty),
        ints(sum(1 << t for t in set(prompt)))[None],
        torch.zeros(1, vocab, dtype=torch.int32, device=device),
    )
    temperature_kernel.apply_temperature(z, request, floats(params.temperature))
    min_p.apply_min_p(z, request, floats(params.min_p))
    top_k = ints(params.top_k or vocab).repeat(rows)
    z = states.apply_top_k_top_p(z, top_k, floats(params.top_p).repeat(rows))
    torch.testing.assert_close(ours, z.softmax(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(ours > 0, z > -torch.inf)
