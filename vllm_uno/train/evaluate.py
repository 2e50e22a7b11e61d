"""`vllm-uno eval-adapter`: acceptance and tau of an adapter without an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_uno.train.acceptance import measure
from vllm_uno.train.data import DataError, Sample, load_samples, pack
from vllm_uno.train.model import NoisedModel, load_model, load_tokenizer, noise_high
from vllm_uno.train.settings import option


@dataclass
class EvalSettings:
    """Measures an adapter on text that the base model itself writes to the data's prompts.

    A prompt is what comes before a chat's last answer, or the first tokens of a text. The model
    answers once at each temperature; the acceptance of every cycle that decoding could go through
    is computed along the answers.
    """

    model: str = field(metadata={"help": "base model: local folder or hub id"})
    data: str = field(metadata={"help": "JSONL with `text` or chat `messages`, or a datasets name"})
    adapter: str | None = option(None, "adapter folder; none: `adapter/` in the model's folder")
    revision: str | None = option(None, "revision of the base model on the hub")
    data_split: str = option("train", "split of a datasets name")
    block_sizes: list[int] = option([8], "block sizes to measure")
    temperatures: list[float] = option([0.0, 1.0], "temperatures to measure")
    samples: int = option(64, "samples of the data to take")
    prompt_tokens: int = option(32, "of a `text`: tokens before the model goes on")
    max_new_tokens: int = option(256, "longest answer")
    batch_size: int = option(32, "answers at a time")
    dtype: str = option("bfloat16", "bfloat16 or float32")
    attention: str = option("sdpa", "flex or sdpa")
    seed: int = option(0, "of the answers and the noise")
    output: str | None = option(None, "folder for acceptance.json and acceptance.png")

    def __post_init__(self) -> None:
        problems = []
        for name in ("samples", "prompt_tokens", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.block_sizes or min(self.block_sizes) < 1:
            problems.append(f"block_sizes must be numbers of at least 1, not {self.block_sizes}")
        if not self.temperatures or min(self.temperatures) < 0:
            problems.append(f"temperatures must not be negative, not {self.temperatures}")
        if self.attention not in ("flex", "sdpa"):
            problems.append(f"attention must be flex or sdpa, not {self.attention!r}")
        if self.dtype not in ("bfloat16", "float32"):
            problems.append(f"dtype must be bfloat16 or float32, not {self.dtype!r}")
        if problems:
            raise ValueError("; ".join(problems))


def evaluate(settings: EvalSettings) -> list[dict[str, Any]]:
    """Print the table; returns its rows (block_size, temperature, tau, acceptance, tokens).

    Raises:
        DataError, ModelError: with the setting and the way out.

    """
    from peft import PeftModel

    from vllm_uno.adapter_source import fetch_adapter, find_adapter, noise_range

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = find_adapter(settings.model, settings.revision, settings.adapter, None)
    adapter = fetch_adapter(source)
    tokenizer = load_tokenizer(settings.model, settings.revision)
    samples = load_samples(settings.data, tokenizer, 1 << 30, settings.data_split, settings.samples)
    prompts = [_prompt(s, settings.prompt_tokens) for s in samples]
    base = load_model(
        settings.model,
        revision=settings.revision,
        dtype=getattr(torch, settings.dtype),
        attention=settings.attention,
        device=device,
    )
    vocab_size = base.config.vocab_size
    # The tokenizer's size stands where neither the adapter nor the table says it.
    usual = noise_high(tokenizer, vocab_size, None)
    noise = noise_range(adapter, settings.model, usual, 1, vocab_size, source)
    answers = {
        temperature: write_answers(base, tokenizer, prompts, temperature, settings)
        for temperature in settings.temperatures
    }
    model = NoisedModel(PeftModel.from_pretrained(base, str(adapter)), settings.attention)
    table = []
    print(f"{'B':>3} {'T':>5} {'tau':>6}  acceptance by position")
    for temperature, texts in answers.items():
        rows = pack(texts, max(len(t.ids) for t in texts))
        for block_size in settings.block_sizes:
            found = measure(
                model,
                rows,
                block_size,
                noise,
                temperature,
                micro_batch=settings.batch_size,
                device=device,
                seed=settings.seed,
            )
            shares = " ".join(f"{a:.3f}" for a in found.per_position)
            print(f"{block_size:>3} {temperature:>5g} {found.tau:>6.3f}  {shares}", flush=True)
            table.append(
                {
                    "block_size": block_size,
                    "temperature": temperature,
                    "tau": found.tau,
                    "acceptance": list(found.per_position),
                    "cycles": found.cycles,
                    "tokens": sum(sum(t.generated) for t in texts),
                }
            )
    if settings.output is not None:
        from vllm_uno.train.plots import plot_acceptance

        folder = Path(settings.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "acceptance.json").write_text(json.dumps(table, indent=1) + "\n")
        plot_acceptance(table, folder / "acceptance.png")
    return table


def _prompt(sample: Sample, prompt_tokens: int) -> list[int]:
    """What comes before the last stretch that the model wrote, or the text's first tokens."""
    generated = [bool(g) for g in sample.generated]
    if all(generated[1:]):  # a plain text, of which the model must have something left to write
        return list(sample.ids[: min(prompt_tokens, len(generated) // 2)])
    last = len(generated)
    while last and not generated[last - 1]:
        last -= 1
    while last and generated[last - 1]:
        last -= 1
    return [int(i) for i in sample.ids[:last]]


@torch.no_grad()
def write_answers(
    base: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    temperature: float,
    settings: EvalSettings,
) -> list[Sample]:
    """The base model's own continuations, greedy at T = 0."""
    from transformers import GenerationConfig

    device = base.get_output_embeddings().weight.device
    end = base.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(settings.seed)
    answers = []
    for start in range(0, len(prompts), settings.batch_size):
        part = prompts[start : start + settings.batch_size]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in part], device=device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=device)
        out = base.generate(
            input_ids=ids,
            attention_mask=seen,
            # Not the model's own, which may hold penalties: the text must follow the bare law.
            generation_config=GenerationConfig(
                max_new_tokens=settings.max_new_tokens,
                eos_token_id=end,
                pad_token_id=pad,
                **sampling,
            ),
        )
        for prompt, row in zip(part, out[:, width:].tolist(), strict=True):
            stop = next((i + 1 for i, t in enumerate(row) if t in ends), len(row))
            written = row[:stop]
            answers.append(Sample(prompt + written, [False] * len(prompt) + [True] * len(written)))
    if not any(len(a.ids) > 1 for a in answers):
        raise DataError("the model wrote nothing to these prompts")
    return answers
