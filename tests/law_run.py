"""Sampled-law runs: many continuations by a tiny random model, tested against plain vLLM's law.

    python tests/law_run.py --campaign --out law.json                  # all of it, in parallel
    python tests/law_run.py --settings t1,top_k --tokens 250000 --out law.json
    python tests/law_run.py --settings t0.7 --plain                    # the floor
    python tests/law_run.py --settings t0.7 --sabotage residual-is-p   # must fail
    python tests/law_run.py --settings tree-16-t1 --sabotage noise-of-wrong-depth

One process holds one engine at a time, so settings are spread over processes. Requests have seeds
of their own, fixed once and for all: the same call gives the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from law import LawResult, holm, law_test, processed_law
from sabotage import LINEAR_SABOTAGES, SABOTAGES, STAND_IN, TREE_SABOTAGES
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from engines import Engine
    from vllm import SamplingParams

VOCAB_SIZE = 16
BLOCK_SIZE = 3  # B
WEIGHT_STD = 0.2
NOISE_HIGH = VOCAB_SIZE // 2  # noise ids: [1, NOISE_HIGH)
PROMPT_LENGTH = 6
TOKENS_PER_REQUEST = 64
MAX_MODEL_LEN = 128
# Of every noise row (trees: depth), given that the one before it was accepted: both branches of the
# test, and so every offset of a cycle, must be taken often.
ACCEPTANCE, TREE_ACCEPTANCE = (0.2, 0.9), (0.05, 0.9)
# The offset label of tokens sampled by the prefill, which no draft preceded.
PREFILL = -1

# Kind of a run in which PyTorch stands in for vLLM's rejection kernels, without a fault.
STAND_IN_NAME = "torch"
# Holm's family-wise error over all settings, and what a sabotage must come below.
ALPHA = 1e-4
SABOTAGE_P_VALUE = 1e-8


@dataclass(frozen=True)
class Setting:
    """Sampling parameters, and how drafts are made.

    Attributes:
        draft: "probabilistic" or "greedy" chains of B tokens, or "tree".
        tree: B, K and V of trees.
    """

    name: str
    params: dict[str, Any]
    draft: str = "probabilistic"
    tree: tuple[int, int, int] | None = None

    @property
    def has_penalties(self) -> bool:
        return any(name.endswith("_penalty") for name in self.params)

    @property
    def engine(self) -> tuple[Any, ...]:
        """Settings of which this is equal share an engine."""
        return self.draft, self.tree

    @property
    def block_size(self) -> int:
        """B, the most drafts accepted in a cycle."""
        return BLOCK_SIZE if self.tree is None else self.tree[0]

    @property
    def drafts(self) -> int:
        """Verified in a cycle."""
        return BLOCK_SIZE if self.tree is None else self.tree[2]


_BIAS = {2: 1.5, 7: -2.0, 11: 0.7}
_SMALL_TREE, _TREE = (3, 4, 6), (4, 8, 16)  # B, K, V
_ALL_SETTINGS = (
    Setting("t0.7", {"temperature": 0.7}),
    Setting("t1", {}),
    Setting("t1.5", {"temperature": 1.5}),
    Setting("top_k", {"top_k": 5}),
    Setting("top_p", {"top_p": 0.8}),
    Setting("top_k-top_p", {"top_k": 6, "top_p": 0.8}),
    Setting("min_p", {"min_p": 0.1}),
    Setting("repetition", {"repetition_penalty": 1.3}),
    Setting("frequency-presence", {"frequency_penalty": 0.3, "presence_penalty": 0.5}),
    Setting("bias", {"logit_bias": _BIAS}),
    Setting(
        "joined",
        {
            "temperature": 0.7,
            "top_k": 8,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.2,
            "presence_penalty": 0.3,
            "logit_bias": _BIAS,
        },
    ),
    Setting("joined-min_p", {"temperature": 1.3, "min_p": 0.1, "logit_bias": _BIAS}),
    Setting("greedy-draft", {}, draft="greedy"),
    # Parameters of settings above, where plain's floor is.
    Setting("tree-6-t0.7", {"temperature": 0.7}, "tree", _SMALL_TREE),
    Setting("tree-6-t1", {}, "tree", _SMALL_TREE),
    Setting("tree-16-t0.7", {"temperature": 0.7}, "tree", _TREE),
    Setting("tree-16-t1", {}, "tree", _TREE),
    Setting("tree-16-top_k-top_p", {"top_k": 6, "top_p": 0.8}, "tree", _TREE),
)
SETTINGS = {setting.name: setting for setting in _ALL_SETTINGS}
# Where the sabotages are tried: a temperature that is not 1.
SABOTAGE_SETTING, TREE_SABOTAGE_SETTING = "t0.7", "tree-16-t0.7"


@dataclass(frozen=True)
class Samples:
    """Continuations of `tokens` tokens each.

    Attributes:
        prompts: [N][PROMPT_LENGTH].
        outputs: int64 [N, tokens].
        offsets: int64 [N, tokens], each token's place in its cycle, or `PREFILL`.
    """

    prompts: list[list[int]]
    outputs: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class Report:
    """One setting's outcome.

    Attributes:
        kind: "uno", "plain", or the sabotage's name.
        acceptance: of each draft row, given that the row before it was accepted.
        tau: tokens per cycle.
        p_by_previous: p-value of the second statistic (`p_by_previous`).
        seconds: sampling, then the law and its test.
    """

    setting: str
    kind: str
    tokens: int
    requests: int
    statistic: float
    dof: int
    p_value: float
    impossible: int
    acceptance: list[float] = field(default_factory=list)
    tau: float | None = None
    p_by_previous: float = 1.0
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def least_p(self) -> float:
        return min(self.p_value, self.p_by_previous)

    def line(self) -> str:
        acceptance = " ".join(f"{a:.3f}" for a in self.acceptance) or "-"
        tau = "-" if self.tau is None else f"{self.tau:.3f}"
        return (
            f"{self.setting:20} {self.kind:26} tokens {self.tokens:7} chi2 {self.statistic:9.1f} "
            f"dof {self.dof:3} p {self.p_value:9.3g} {self.p_by_previous:9.3g} "
            f"impossible {self.impossible} acceptance {acceptance} tau {tau} "
            f"[{self.seconds[0]:.1f} s + {self.seconds[1]:.1f} s]"
        )


def prepare_environment() -> None:
    """Before vLLM is imported: as conftest.py, plus exact fp32 in Triton's attention."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if not torch.cuda.is_available():
        os.environ["UNO_CPU_INTERPRETER"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def _alternate(model: Path) -> None:
    """Make the two halves of the vocabulary follow each other more often than not.

    The statistic sums 1[x = v] - p(v) over contexts, so a fault shows only where its bias points
    the same way in many of them; laws of neighbouring positions, say, are alike on average. Here
    they are not: noise ids are of the first half, so a draft law is one for the second half, and
    is accepted more often where the second half is due. So the offset in a cycle tells which half
    that is, and a wrong row, a wrong residual or shared noise biases an offset systematically.
    """
    file = model / "model.safetensors"
    weights = load_file(file)
    hidden_size = weights["lm_head.weight"].shape[1]
    direction = torch.randn(hidden_size, generator=torch.Generator().manual_seed(5)) * WEIGHT_STD
    half = torch.ones(VOCAB_SIZE, 1)
    half[NOISE_HIGH:] = -1
    weights["model.embed_tokens.weight"] += 14 * half * direction
    weights["lm_head.weight"] -= 0.15 * half * direction
    save_file(weights, file, metadata={"format": "pt"})


def write_models(folder: Path) -> None:
    """`folder`/model and `folder`/adapter; safe when several processes share `folder`."""
    from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        draft = Path(temporary) / "models"
        # Largest p 0.4 on average.
        model = write_tiny_model(
            draft / "model",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            max_position_embeddings=512,
            std=WEIGHT_STD,
            seed=1,
        )
        _alternate(model)
        write_random_adapter(
            draft / "adapter", model, strength=0.4, seed=2, mask_token_id=NOISE_HIGH
        )
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise


@contextmanager
def law_engine(
    folder: Path,
    setting: Setting,
    *,
    plain: bool = False,
    max_num_seqs: int | None = None,
    eager: bool = False,
    draft_vocab: Path | None = None,
    **more: Any,
) -> Iterator[Engine]:
    """An engine for settings with `setting`'s way of drafting; models are kept in `folder`.

    `more`: of the speculative config.
    """
    from engines import engine

    write_models(folder)
    gpu = torch.cuda.is_available()
    max_num_seqs = max_num_seqs or (512 if gpu else 64)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        # Room for every request's verify rows beside new prompts.
        "max_num_batched_tokens": max(512, 2 * max_num_seqs * (setting.drafts + 1)),
        "enforce_eager": eager or not gpu,
    }
    if gpu:
        rows = (1, setting.block_size, setting.drafts + 1)
        counts = (1, 32, 128, 256, 384, 512)
        sizes = {n * row for n in counts if n <= max_num_seqs for row in rows}
        settings |= {
            "attention_backend": "TRITON_ATTN",  # the one that takes fp32
            "gpu_memory_utilization": 0.03,  # several processes share the GPU
            "kv_cache_memory_bytes": 2**28,
        }
        if not eager:
            settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(sizes)}
    uno: dict[str, Any] = {
        "uno_lora_path": str(folder / "adapter"),
        "num_speculative_tokens": setting.drafts,
        "uno_draft_vocab": None if draft_vocab is None else str(draft_vocab),
        **more,
    }
    if setting.tree is None:
        uno["draft_sample_method"] = setting.draft
    else:
        block_size, top_k, _ = setting.tree
        uno |= {"uno_mode": "tree", "uno_block_size": block_size, "uno_tree_top_k": top_k}
    with engine(folder / "model", None if plain else uno, **settings) as running:
        yield running


def make_params(setting: Setting, tokens: int, seed: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **{"temperature": 1.0, **setting.params},
        seed=seed,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def collect(
    running: Engine, setting: Setting, requests: int, tokens: int = TOKENS_PER_REQUEST
) -> Samples:
    """Run `requests` continuations; one step's tokens of a request are one cycle's."""
    llm_engine: Any = running.llm.llm_engine
    # Streams that no other setting uses.
    first_seed = (1 + list(SETTINGS).index(setting.name)) * 10_000_000
    generator = torch.Generator().manual_seed(first_seed)
    prompts = torch.randint(1, VOCAB_SIZE, (requests, PROMPT_LENGTH), generator=generator).tolist()
    for i, prompt in enumerate(prompts):
        params = make_params(setting, tokens, first_seed + i)
        llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    outputs: list[list[int]] = [[] for _ in prompts]
    offsets: list[list[int]] = [[] for _ in prompts]
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            i = int(output.request_id.split("-")[0])
            emitted = output.outputs[0].token_ids
            if not emitted:
                continue
            if not outputs[i]:
                assert len(emitted) == 1, "a prefill samples one token"
                offsets[i].append(PREFILL)
            else:
                assert len(emitted) <= setting.block_size + 1
                offsets[i] += range(len(emitted))
            outputs[i] += emitted
    return Samples(prompts, torch.tensor(outputs), torch.tensor(offsets))


@torch.inference_mode()
def plain_laws(
    samples: Samples, setting: Setting, folder: Path, *, batch: int = 512
) -> torch.Tensor:
    """[N, tokens, V]: plain vLLM's law at each token, from transformers' logits."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = AutoModelForCausalLM.from_pretrained(
        str(folder / "model"), dtype=torch.float32, attn_implementation="eager"
    )
    reference.to(device).eval()
    ids = torch.cat([torch.tensor(samples.prompts), samples.outputs], dim=1)
    logits = torch.cat(
        [
            # Row i of the model is the law of token i + 1.
            reference(input_ids=part.to(device), use_cache=False).logits[:, PROMPT_LENGTH - 1 : -1]
            for part in ids.split(batch)
        ]
    ).cpu()
    params = make_params(setting, samples.outputs.shape[1], seed=0)
    if not setting.has_penalties:  # no row's law depends on the tokens before it: all at once
        flat = processed_law(logits.flatten(0, 1), params, [], samples.outputs.flatten())
        return flat.view_as(logits)
    return torch.stack(
        [
            processed_law(rows, params, prompt, output)
            for rows, prompt, output in zip(logits, samples.prompts, samples.outputs, strict=True)
        ]
    )


def test_samples(samples: Samples, laws: torch.Tensor) -> LawResult:
    return law_test(samples.offsets.flatten(), samples.outputs.flatten(), laws.flatten(0, 1))


def p_by_previous(samples: Samples, laws: torch.Tensor) -> float:
    """The same test with a token's label being (offset, token before it).

    Both are fixed before the token is drawn, so it is as valid. It sees what the first one
    averages away: a token drawn from its neighbour's law is right on average, as laws of
    neighbouring positions are alike on average.
    """
    before = torch.tensor([prompt[-1] for prompt in samples.prompts])[:, None]
    previous = torch.cat([before, samples.outputs[:, :-1]], dim=1)
    labels = torch.where(
        samples.offsets == PREFILL, PREFILL, samples.offsets * VOCAB_SIZE + previous
    )
    result = law_test(labels.flatten(), samples.outputs.flatten(), laws.flatten(0, 1))
    return result.p_value


test_samples.__test__ = False  # type: ignore[attr-defined]  # no test for pytest


def conditional_acceptance(running: Engine) -> list[float]:
    """Of each draft row, given that the rows before it were accepted."""
    stats = running.speculator.counters.snapshot()
    reached = (stats.proposed[0], *stats.accepted[:-1])
    return [a / max(r, 1) for a, r in zip(stats.accepted, reached, strict=True)]


def sabotages_of(setting: Setting) -> tuple[str, ...]:
    """Those that change anything, and the stand-in without a fault."""
    return (STAND_IN_NAME, *LINEAR_SABOTAGES) if setting.tree is None else tuple(TREE_SABOTAGES)


def sabotaged(name: str | None) -> Callable[[], AbstractContextManager[None]]:
    if name is None:
        return nullcontext
    return STAND_IN if name == STAND_IN_NAME else SABOTAGES[name]


def run_setting(
    running: Engine,
    setting: Setting,
    folder: Path,
    *,
    requests: int,
    tokens: int = TOKENS_PER_REQUEST,
    sabotage: str | None = None,
) -> Report:
    """Sample and test."""
    speculates = running.speculator is not None
    if speculates:
        running.speculator.counters.reset()
    begin = time.perf_counter()
    # A sabotage of the draft's sampling does not reach into captured graphs.
    eager = (
        mock.patch.object(running.speculator, "sampling_graphs", None)
        if sabotage in SABOTAGES
        else nullcontext()
    )
    with sabotaged(sabotage)(), eager:
        samples = collect(running, setting, requests, tokens)
    middle = time.perf_counter()
    acceptance = conditional_acceptance(running) if speculates else []
    tau = running.speculator.counters.snapshot().tokens_per_cycle if speculates else None
    laws = plain_laws(samples, setting, folder)
    result = test_samples(samples, laws)
    report = Report(
        setting=setting.name,
        kind=sabotage or ("uno" if speculates else "plain"),
        requests=requests,
        acceptance=acceptance,
        tau=tau,
        p_by_previous=p_by_previous(samples, laws),
        seconds=(middle - begin, time.perf_counter() - middle),
        **asdict(result),
    )
    print(report.line(), flush=True)
    return report


def _write(reports: Sequence[Report], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")


def run(
    settings: Sequence[Setting],
    folder: Path,
    *,
    tokens: int,
    sabotages: Sequence[str | None] = (None,),
    plain: bool = False,
    eager: bool = False,
    max_num_seqs: int | None = None,
    out: Path | None = None,
) -> list[Report]:
    """Every setting under every sabotage.

    `out` is written anew after each.

    Raises:
        ValueError: a sabotage of one mode with a setting of the other: nothing would be broken.
    """
    for setting in settings:
        for name in sabotages:
            if name is not None and name not in sabotages_of(setting):
                raise ValueError(f"sabotage {name} does nothing to setting {setting.name}")
    reports: list[Report] = []
    requests = -(-tokens // TOKENS_PER_REQUEST)
    for key in dict.fromkeys(setting.engine for setting in settings):
        group = [setting for setting in settings if setting.engine == key]
        begin = time.perf_counter()
        with law_engine(
            folder, group[0], plain=plain, eager=eager, max_num_seqs=max_num_seqs
        ) as running:
            print(f"engine started in {time.perf_counter() - begin:.1f} s", flush=True)
            for setting in group:
                for name in sabotages:
                    reports.append(
                        run_setting(running, setting, folder, requests=requests, sabotage=name)
                    )
                    _write(reports, out)
    return reports


# --- all of it, in parallel processes ----------------------------------------------------------


def _campaign_jobs() -> list[list[str]]:
    """Command lines of about equal length: every setting with UNO and plain, every sabotage."""
    drafted = [s.name for s in _ALL_SETTINGS if s.draft == "probabilistic"]
    greedy = [s.name for s in _ALL_SETTINGS if s.draft == "greedy"]
    trees = [[s.name for s in _ALL_SETTINGS if s.tree == tree] for tree in (_SMALL_TREE, _TREE)]
    sabotages = sabotages_of(SETTINGS[SABOTAGE_SETTING])
    return [
        *(["--settings", ",".join(drafted[i::2])] for i in range(2)),
        ["--settings", ",".join(greedy)],
        *(["--settings", ",".join(names)] for names in trees),
        ["--settings", TREE_SABOTAGE_SETTING, "--sabotage", ",".join(TREE_SABOTAGES)],
        # Plain vLLM knows no drafts: a setting for greedy ones, or trees, has its floor in another.
        *(["--settings", ",".join(drafted[i::3]), "--plain"] for i in range(3)),
        *(
            ["--settings", SABOTAGE_SETTING, "--sabotage", ",".join(sabotages[i::2])]
            for i in range(2)
        ),
    ]


def campaign(
    folder: Path, *, tokens: int, eager: bool = False, jobs: int = 11
) -> tuple[list[Report], list[str]]:
    """Run everything, at most `jobs` processes at a time.

    Args:
        folder: for the models, logs, results and compile caches.

    Returns:
        The reports, and the ends of the logs of processes that failed.
    """
    write_models(folder / "models")
    reports: list[Report] = []
    failed: list[str] = []
    waiting = list(enumerate(_campaign_jobs()))
    while waiting:
        batch, waiting = waiting[:jobs], waiting[jobs:]
        running = []
        for i, command in batch:
            out = folder / f"job-{i}.json"
            out.unlink(missing_ok=True)
            log = (folder / f"job-{i}.log").open("w")
            # Caches of their own: processes that start cold would write the same files at once.
            environment = os.environ | {
                "VLLM_CACHE_ROOT": str(folder / f"cache-{i}"),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            }
            process = subprocess.Popen(
                [
                    *(sys.executable, __file__, *command, "--tokens", str(tokens)),
                    *("--models", str(folder / "models"), "--out", str(out)),
                    *(["--eager"] if eager else []),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            running.append((command, process, out, log))
        for command, process, out, log in running:
            code = process.wait()
            log.close()
            if code != 0:
                text = Path(log.name).read_text()
                failed.append(f"{' '.join(command)} exited {code}:\n{text[-4000:]}")
            for entry in json.loads(out.read_text()) if out.exists() else ():
                reports.append(Report(**entry))
                print(reports[-1].line(), flush=True)
    return reports, failed


def faults(reports: Sequence[Report]) -> list[str]:
    """What is wrong with these reports: nothing, if UNO samples plain vLLM's law."""
    wrong = []
    for kind in ("uno", "plain"):
        family = [r for r in reports if r.kind == kind]
        p_values = [p for r in family for p in (r.p_value, r.p_by_previous)]
        decided = holm(p_values, ALPHA)
        rejected = [one or other for one, other in zip(decided[::2], decided[1::2], strict=True)]
        wrong += [f"rejected: {r.line()}" for r, no in zip(family, rejected, strict=True) if no]
        wrong += [f"impossible tokens: {r.line()}" for r in family if _too_many_impossible(r)]
    for r in reports:
        low, high = ACCEPTANCE if SETTINGS[r.setting].tree is None else TREE_ACCEPTANCE
        if r.kind in ("uno", STAND_IN_NAME) and not all(low <= a <= high for a in r.acceptance[1:]):
            wrong.append(f"acceptance outside {low} .. {high}: {r.line()}")
    for r in reports:
        if r.kind == STAND_IN_NAME and r.least_p < ALPHA / 2:
            wrong.append(f"the stand-in without a fault was rejected: {r.line()}")
        if r.kind in SABOTAGES and not r.p_value < SABOTAGE_P_VALUE:
            wrong.append(f"not seen: {r.line()}")
    return wrong


def _too_many_impossible(report: Report) -> bool:
    """Rounding at the edge of a filter explains a few."""
    return report.impossible > max(3, 2e-5 * report.tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, comma-separated")
    parser.add_argument("--tokens", type=int, default=250_000, help="at least, per setting")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument(
        "--sabotage",
        help=f"out of {', '.join([*SABOTAGES, STAND_IN_NAME])} (no fault), or 'all' of a mode",
    )
    parser.add_argument("--plain", action="store_true", help="plain vLLM: the floor")
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument(
        "--campaign",
        type=Path,
        nargs="?",
        const=Path(tempfile.gettempdir()) / "uno-law",
        help="every setting, plain beside it, every sabotage, in processes; logs go to this folder",
    )
    parser.add_argument("--jobs", type=int, default=11, help="processes of --campaign at a time")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "uno-law-models",
        help="folder of the tiny model, shared by processes (and so their compile caches)",
    )
    options = parser.parse_args(arguments)
    if options.campaign is not None:
        reports, failed = campaign(
            options.campaign, tokens=options.tokens, eager=options.eager, jobs=options.jobs
        )
        _write(reports, options.out)
        wrong = failed + faults(reports)
        print("\n".join(wrong) or "all as it should be")
        raise SystemExit(bool(wrong))
    settings = [SETTINGS[name] for name in options.settings.split(",")]
    names: Sequence[str | None] = [None]
    if options.sabotage:
        every = options.sabotage == "all"
        names = sabotages_of(settings[0]) if every else options.sabotage.split(",")
    reports = run(
        settings,
        options.models,
        tokens=options.tokens,
        sabotages=names,
        plain=options.plain,
        eager=options.eager,
        max_num_seqs=options.max_num_seqs,
        out=options.out,
    )


if __name__ == "__main__":
    # tests/ is sys.path[0] here.
    prepare_environment()
    main(sys.argv[1:])
