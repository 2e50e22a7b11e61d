"""`vllm-uno eval-adapter`: acceptance and tau of an adapter without an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_uno.train.acceptance import measure
from vllm_uno.train.data import DataError, Sample, load_samples, pack
from vllm_uno.train.model import ModelError, NoisedModel, load_model, load_tokenizer, noise_high
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


def evaluate(settings: EvalSettings) -> list[dict[str, Any]]:
    """Print the table; returns its rows (block_size, temperature, tau, acceptance, tokens).

    Raises:
        DataError, ModelError: with the setting and the way out.

    """
    from peft import PeftModel

    from vllm_uno.adapter_source import METADATA_FILE

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = Path(settings.adapter or Path(settings.model, "adapter"))
    if not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"{adapter} is no adapter folder (no adapter_config.json): give adapter")
    tokenizer = load_tokenizer(settings.model, settings.revision)
    samples = load_samples(settings.data, tokenizer, 1 << 30, settings.data_split)
    prompts = [_prompt(s, settings.prompt_tokens) for s in samples[: settings.samples]]
    base = load_model(
        settings.model,
        revision=settings.revision,
        dtype=getattr(torch, settings.dtype),
        attention=settings.attention,
        device=device,
    )
    path = adapter / METADATA_FILE
    metadata = json.loads(path.read_text()) if path.is_file() else {}
    noise = (
        metadata.get("noise_low", 1),
        noise_high(tokenizer, base.config.vocab_size, metadata.get("mask_token_id")),
    )
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
    first = sample.generated.index(True)
    if first == 1 and all(sample.generated[1:]):
        return sample.ids[:prompt_tokens]
    last = len(sample.ids)
    while last and not sample.generated[last - 1]:
        last -= 1
    while last and sample.generated[last - 1]:
        last -= 1
    return sample.ids[:last]


@torch.no_grad()
def write_answers(
    base: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    temperature: float,
    settings: EvalSettings,
) -> list[Sample]:
    """The base model's own continuations, greedy at T = 0."""
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
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=pad,
            **sampling,
        )
        for prompt, row in zip(part, out[:, width:].tolist(), strict=True):
            stop = next((i + 1 for i, t in enumerate(row) if t in ends), len(row))
            written = row[:stop]
            answers.append(Sample(prompt + written, [False] * len(prompt) + [True] * len(written)))
    if not any(len(a.ids) > 1 for a in answers):
        raise DataError("the model wrote nothing to these prompts")
    return answers
