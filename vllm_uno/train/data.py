"""Text to packed rows: JSONL or a hub dataset -> token lists -> rows of whole documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_uno.train.blocks import PADDING


class DataError(ValueError):
    """Training data that cannot be used; says which sample and what to do."""


@dataclass(frozen=True)
class Sample:
    """One document.

    Attributes:
        ids: token ids.
        generated: for each token, whether a model would have generated it: all of a text but its
            first token, or the assistant's turns of a chat. Only such tokens are trained on.

    """

    ids: list[int]
    generated: list[bool]


@dataclass(frozen=True)
class PackedRows:
    """Whole documents side by side in rows of one length.

    Attributes:
        ids: int32 [N, L], 0 in padding.
        documents: int16 [N, L], number of the document within its row; PADDING for none.
        positions: int32 [N, L], position within the document.
        trained: bool [N, L], whether the token after this one is of the same document and
            `generated`: rows that have a law to learn.

    """

    ids: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    trained: torch.Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, which: torch.Tensor, device: torch.device) -> PackedRows:
        """Some rows, int64 but for `trained`, on a device."""
        return PackedRows(
            self.ids[which].long().to(device),
            self.documents[which].long().to(device),
            self.positions[which].long().to(device),
            self.trained[which].to(device),
        )


def read_records(source: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) for each line of a JSONL file, or each row of a datasets name.

    Raises:
        DataError: no such file and no such dataset, or a line that is no JSON object.

    """
    path = Path(source)
    if path.is_file():
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{source}, line {number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{place}: not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise DataError(f"{place}: not a JSON object")
                yield place, record
        return
    if source.endswith((".jsonl", ".json")) or source.startswith(("/", ".")):
        raise DataError(f"data file {source} does not exist")
    from datasets import load_dataset

    try:
        dataset = load_dataset(source, split=split)
    except Exception as error:
        raise DataError(
            f"{source!r} is no file here and could not be loaded as a dataset: {error}"
        ) from error
    for number, record in enumerate(dataset):
        yield f"{source}[{number}]", record


def encode(record: dict[str, Any], tokenizer: Any, place: str) -> Sample:
    """Token ids of a record.

    `text` gets the tokenizer's usual special tokens and, if it has one, the end token;
    `messages` go through the chat template, and the assistant's turns are `generated`.

    Raises:
        DataError: neither field, an empty one, or no chat template.

    """
    if isinstance(record.get("messages"), list):
        return _encode_chat(record["messages"], tokenizer, place)
    text = record.get("text")
    if not isinstance(text, str):
        raise DataError(f"{place}: neither `text` (a string) nor `messages` (a list)")
    ids = list(tokenizer(text)["input_ids"])
    if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    if not text or len(ids) < 2:
        raise DataError(f"{place}: the text is empty")
    return Sample(ids, [False] + [True] * (len(ids) - 1))


def _encode_chat(messages: list[Any], tokenizer: Any, place: str) -> Sample:
    if not tokenizer.chat_template:
        raise DataError(f"{place}: `messages` needs a chat template, and the tokenizer has none")

    def ids_of(some: list[Any], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ids = ids_of(messages, False)
    generated = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, end = ids_of(messages[:turn], True), ids_of(messages[: turn + 1], False)
        # Templates that rewrite earlier turns (dropped thoughts) leave only the last one whole.
        if ids[: len(start)] == start and ids[: len(end)] == end:
            generated[len(start) : len(end)] = [True] * (len(end) - len(start))
    if not any(generated):
        raise DataError(f"{place}: no assistant turn to train on")
    return Sample(ids, generated)


def load_samples(source: str, tokenizer: Any, context: int, split: str = "train") -> list[Sample]:
    """Every record of a source as tokens.

    Raises:
        DataError: nothing there, or a sample longer than `context`.

    """
    samples = []
    for place, record in read_records(source, split):
        sample = encode(record, tokenizer, place)
        if len(sample.ids) > context:
            raise DataError(
                f"{place}: {len(sample.ids)} tokens, longer than context={context}. Raise "
                f"context, or split or drop such samples."
            )
        samples.append(sample)
    if not samples:
        raise DataError(f"{source} holds no samples")
    return samples


def split_heldout(samples: list[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out) samples: the last `count`, but at most a fifth, are held out."""
    count = min(count, len(samples) // 5)
    if count < 1:
        raise DataError(f"{len(samples)} samples are too few to hold some out: give heldout")
    return samples[:-count], samples[-count:]


def pack(samples: Sequence[Sample], context: int) -> PackedRows:
    """Fill rows with whole documents, in order: no document is cut or crosses a row."""
    rows: list[list[Sample]] = []
    free = 0
    for sample in samples:
        if len(sample.ids) > free or not rows:
            rows.append([])
            free = context
        rows[-1].append(sample)
        free -= len(sample.ids)
    ids = torch.zeros(len(rows), context, dtype=torch.int32)
    documents = torch.full((len(rows), context), PADDING, dtype=torch.int16)
    positions = torch.zeros(len(rows), context, dtype=torch.int32)
    trained = torch.zeros(len(rows), context, dtype=torch.bool)
    for at, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row):
            length = len(sample.ids)
            span = slice(start, start + length)
            ids[at, span] = torch.tensor(sample.ids, dtype=torch.int32)
            documents[at, span] = number
            positions[at, span] = torch.arange(length, dtype=torch.int32)
            trained[at, start : start + length - 1] = torch.tensor(sample.generated[1:])
            start += length
    return PackedRows(ids, documents, positions, trained)


def row_order(count: int, seed: int, needed: Iterable[int]) -> torch.Tensor:
    """Rows for consecutive numbers of the training's endless stream: int64.

    The stream goes through all rows again and again, each time in another order that depends on
    `seed` and the epoch alone: a resumed run sees what it would have seen.
    """
    orders: dict[int, torch.Tensor] = {}
    picked = []
    for number in needed:
        epoch, at = divmod(number, count)
        if epoch not in orders:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            orders[epoch] = torch.randperm(count, generator=generator)
        picked.append(int(orders[epoch][at]))
    return torch.tensor(picked)
