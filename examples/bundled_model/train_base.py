"""Makes the bundled model's tokenizer and trains its target model from scratch, on one GPU.

    python examples/bundled_model/train_base.py --out MODEL_FOLDER

The text is drawn by vllm_uno/bundled/problems.py while the script starts, so nothing is downloaded.
A try on a CPU:

    python examples/bundled_model/train_base.py --out /tmp/model --steps 20 --problems 500 \
        --hidden 64 --layers 2 --intermediate 128 --heads 2 --batch 4 --eval-problems 8
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_uno.bundled.problems import Problem, extract_final, generate

VOCABULARY = 1024
PAD, USER, ASSISTANT, END, MASK = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"
PAD_ID, USER_ID, ASSISTANT_ID, END_ID, MASK_ID = 0, 1, 2, 3, VOCABULARY - 1
# System messages are left out: the model has seen none, and reads a question best as it knows it.
CHAT_TEMPLATE = (
    "{%- for message in messages if message.role != 'system' -%}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{{ message.content }}{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{{ '<|assistant|>' if add_generation_prompt else '' }}"
)
# The model asks its own questions when it samples from <|user|>, but its work is to answer.
QUESTION_WEIGHT = 0.1
PEAK_LR, WARM_UP = 2e-3, 0.03  # WARM_UP: part of the whole run


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 1024 entries that keeps digits apart and can express any text."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(texts, trainer)
    bare.add_special_tokens([MASK])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids([PAD, USER, ASSISTANT, END, MASK])
    if ids != [PAD_ID, USER_ID, ASSISTANT_ID, END_ID, MASK_ID]:
        raise ValueError(f"the text is too small for {VOCABULARY} entries: special ids are {ids}")
    return tokenizer


def render(problem: Problem) -> str:
    """What the chat template makes of a problem, much faster."""
    return f"{USER}{problem.question}{END}{ASSISTANT}{problem.answer}{END}"


def pack(documents: Iterable[list[int]], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of whole documents, first fit: (tokens, sizes of the documents in the row)."""
    open_rows: list[tuple[list[int], list[int]]] = []
    for ids in documents:
        if len(ids) > length:
            raise ValueError(f"a document has {len(ids)} tokens, a row {length}")
        for row in open_rows:
            if len(row[0]) + len(ids) <= length:
                break
        else:
            row = ([], [])
            open_rows.append(row)
        row[0].extend(ids)
        row[1].append(len(ids))
        if len(open_rows) > 64:
            fullest = max(range(len(open_rows)), key=lambda i: len(open_rows[i][0]))
            yield open_rows.pop(fullest)
    yield from open_rows


def make_rows(job: tuple[str, int, int, str, str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document numbers (1, 2, ...; 0 for padding) of rows, both [rows, length]."""
    split, count, seed, wording, tokenizer_json, length = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    tokenizer = Tokenizer.from_str(tokenizer_json)
    texts = [render(p) for p in generate(split, count, seed, wording)]  # type: ignore[arg-type]
    documents = (encoding.ids for encoding in tokenizer.encode_batch_fast(texts))
    rows = list(pack(documents, length))
    tokens = np.full((len(rows), length), PAD_ID, np.int16)
    numbers = np.zeros((len(rows), length), np.uint8)
    for i, (ids, sizes) in enumerate(rows):
        tokens[i, : len(ids)] = ids
        numbers[i, : len(ids)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return tokens, numbers


def make_data(
    split: str, count: int, wording: str, tokenizer: PreTrainedTokenizerFast, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`make_rows` on all cores, in the same chunks whatever their number."""
    chunk = 5000
    serialised = tokenizer.backend_tokenizer.to_str()
    jobs = [
        (split, min(chunk, count - start), start // chunk, wording, serialised, length)
        for start in range(0, count, chunk)
    ]
    # Forked before CUDA is touched.
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        parts = pool.map(make_rows, jobs, chunksize=1)
    tokens, numbers = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return torch.from_numpy(tokens), torch.from_numpy(numbers)


def make_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=args.intermediate,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    return model


def weighted_loss(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, numbers: torch.Tensor, question_weight: float
) -> torch.Tensor:
    """Mean loss in nats over the next tokens within each document.

    tokens, numbers: [rows, length] as of `make_rows`. Documents of one row do not see each other.
    """
    tokens, numbers = tokens.long(), numbers.long()
    length = tokens.shape[1]
    index = torch.arange(length, device=tokens.device).expand_as(tokens)
    # Where the last document began, and where the last answer did, up to each token.
    began = torch.where(tokens == USER_ID, index, 0).cummax(1).values
    answer_began = torch.where(tokens == ASSISTANT_ID, index, -1).cummax(1).values
    causal = index[:1, :, None] >= index[:1, None, :]
    mask = causal & (numbers[:, :, None] == numbers[:, None, :])  # [rows, query, key]
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=tokens,
            attention_mask=mask[:, None],
            position_ids=index - began,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :-1])
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(-1, length - 1)
    weight = torch.where(answer_began > began, 1.0, question_weight)[:, :-1]
    weight = weight * ((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] > 0))
    return (losses * weight).sum() / weight.sum()


class Schedule:
    """How far the run is, 0 to 1: by steps, or else by the clock with all that came before it."""

    def __init__(self, steps: int | None, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds
        self.start = self.first = time.perf_counter()

    def compiled(self) -> None:
        """The first step is over: its time counts, but is no part of the learning rate's curve."""
        self.first = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def progress(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        whole = max(self.seconds - (self.first - self.start), 1.0)
        return (time.perf_counter() - self.first) / whole


def learning_rate(peak: float, progress: float) -> float:
    if progress < WARM_UP:
        return peak * max(progress / WARM_UP, 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def compiled_loss(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, numbers: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training loss, compiled if that works here: tried forward and back on one batch."""

    def loss(tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return weighted_loss(model, tokens, numbers, QUESTION_WEIGHT)

    if tokens.device.type != "cuda":
        return loss
    compiled = torch.compile(loss, dynamic=False)
    try:
        compiled(tokens, numbers).backward()
    except Exception as error:
        print(f"torch.compile failed, so eager: {type(error).__name__}: {error}")
        compiled = loss
    model.zero_grad(set_to_none=True)
    return compiled


def train(
    model: Qwen3ForCausalLM,
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    args: argparse.Namespace,
    log: Callable[..., None],
) -> None:
    """tokens, numbers: [rows, length] on the model's device."""
    schedule = Schedule(args.steps, args.seconds)
    loss_of = compiled_loss(model, tokens[: args.batch], numbers[: args.batch])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    schedule.compiled()
    step, reported, reported_step = 0, 0.0, 0
    order = torch.empty(0, dtype=torch.long, device=tokens.device)
    while (progress := schedule.progress(step)) < 1:
        if len(order) < args.batch:
            order = torch.randperm(len(tokens), device=tokens.device)
        rows, order = order[: args.batch], order[args.batch :]
        loss = loss_of(tokens[rows], numbers[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        # .item() waits for the GPU, which also keeps the clock of the schedule honest.
        if step % 10 == 0:
            value = loss.item()
            elapsed = schedule.elapsed()
            if elapsed - reported >= 5:
                seen = (step - reported_step) * args.batch * tokens.shape[1]
                speed = seen / (elapsed - reported)
                log(
                    step=step,
                    seconds=round(elapsed, 1),
                    progress=round(progress, 3),
                    loss=round(value, 4),
                    tokens_per_second=round(speed),
                    lr=round(learning_rate(args.lr, progress), 6),
                )
                reported, reported_step = elapsed, step
    log(step=step, seconds=round(schedule.elapsed(), 1), loss=round(loss.item(), 4))


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, numbers: torch.Tensor) -> float:
    """Mean loss per token of the answers, in nats."""
    losses = [
        weighted_loss(model, *batch, question_weight=0.0).item()
        for batch in zip(tokens.split(32), numbers.split(32), strict=True)
    ]
    return sum(losses) / len(losses)


@torch.inference_mode()
def exact_match(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> float:
    """Share of problems whose greedy answer states the right number."""
    right = 0
    for start in range(0, len(problems), 256):
        batch = problems[start : start + 256]
        prompts = [f"{USER}{problem.question}{END}{ASSISTANT}" for problem in batch]
        inputs = tokenizer(
            prompts, return_tensors="pt", padding=True, return_token_type_ids=False
        ).to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=256)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        right += sum(
            extract_final(text) == problem.final for text, problem in zip(texts, batch, strict=True)
        )
    return right / len(problems)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the bundled model's target from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model to write")
    parser.add_argument("--wording", choices=("varied", "fixed"), default="varied")
    parser.add_argument("--seconds", type=float, default=170, help="of training, compilation too")
    parser.add_argument("--steps", type=int, help="train so many steps, whatever the clock says")
    parser.add_argument("--problems", type=int, default=600_000, help="to train on")
    parser.add_argument("--eval-problems", type=int, default=512, help="held out")
    parser.add_argument("--batch", type=int, default=64, help="rows a step")
    parser.add_argument("--row", type=int, default=512, help="tokens a row")
    parser.add_argument("--lr", type=float, default=PEAK_LR, help="peak learning rate")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--heads", type=int, default=4, help="of 64 each; half as many for keys")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    log_file = (args.out / "train_base.jsonl").open("w", encoding="utf-8")

    def log(**entry: object) -> None:
        print("  ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
        log_file.write(json.dumps(entry) + "\n")
        log_file.flush()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    # Both wordings share a tokenizer: that of the larger vocabulary.
    tokenizer = make_tokenizer(render_plain(20_000))
    tokenizer.save_pretrained(args.out)
    tokens, numbers = make_data("train", args.problems, args.wording, tokenizer, args.row)
    test_data = make_data("test", args.eval_problems, args.wording, tokenizer, args.row)
    filled = (numbers > 0).float().mean().item()
    log(rows=len(tokens), filled=round(filled, 3), seconds=round(time.perf_counter() - began, 1))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(args).to(device)
    train(model, tokens.to(device), numbers.to(device), args, log)

    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    test_loss = held_out_loss(model, *(t.to(device) for t in test_data))
    log(parameters=sum(p.numel() for p in model.parameters()), held_out_loss=round(test_loss, 4))
    problems = list(generate("test", args.eval_problems, 0, args.wording))
    log(greedy_exact_match=round(exact_match(model, tokenizer, problems), 4))


def render_plain(count: int) -> Iterator[str]:
    for problem in generate("train", count):
        yield problem.question
        yield problem.answer


if __name__ == "__main__":
    main()
