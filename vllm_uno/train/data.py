"""Text to packed rows: JSONL or a hub dataset -> token lists -> rows of whole documents."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Document:
    """A record as text.

    Attributes:
        text: all of it.
        spans: (start, end) in characters of what a model would have generated; None for a plain
            text, of which the first token alone is given.
        place: where it stood, for messages.

    """

    text: str
    spans: tuple[tuple[int, int], ...] | None
    place: str


def render(record: dict[str, Any], tokenizer: Any, place: str) -> Document:
    """The text of a record: `text` as it is, `messages` through the chat template.

    Raises:
        DataError: neither field, an empty one, no chat template, or no assistant turn.

    """
    if not isinstance(record.get("messages"), list):
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(f"{place}: neither `text` (a string) nor `messages` (a list)")
        if not text:
            raise DataError(f"{place}: the text is empty")
        return Document(text, None, place)
    if not tokenizer.chat_template:
        raise DataError(f"{place}: `messages` needs a chat template, and the tokenizer has none")
    messages = record["messages"]

    def written(some: list[Any], prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
        )

    text = written(messages, False)
    spans = []
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = written(messages[:turn], True)
        end = text if turn + 1 == len(messages) else written(messages[: turn + 1], False)
        # Templates that rewrite earlier turns (dropped thoughts) leave only the last one whole.
        if text.startswith(start) and text.startswith(end):
            spans.append((len(start), len(end)))
    if not spans:
        raise DataError(f"{place}: no assistant turn to train on")
    return Document(text, tuple(spans), place)


def tokenize(documents: Sequence[Document], tokenizer: Any) -> list[Sample]:
    """Token ids of documents; a plain text gets the usual special tokens and the end token.

    Raises:
        DataError: a tokenizer without character offsets, or a text of one token.

    """
    if not tokenizer.is_fast:
        raise DataError(f"{type(tokenizer).__name__} gives no character offsets: use a fast one")
    found: dict[int, Sample] = {}
    for plain in (True, False):  # special tokens are added to plain texts only
        chosen = [i for i, d in enumerate(documents) if (d.spans is None) == plain]
        if not chosen:
            continue
        encoded = tokenizer(
            [documents[i].text for i in chosen],
            add_special_tokens=plain,
            return_offsets_mapping=True,
        )
        for i, ids, offsets in zip(
            chosen, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            found[i] = _sample(documents[i], list(ids), offsets, tokenizer.eos_token_id)
    return [found[i] for i in range(len(documents))]


def _sample(document: Document, ids: list[int], offsets: Any, end_id: int | None) -> Sample:
    if document.spans is None:
        if end_id is not None and ids and ids[-1] != end_id:
            ids.append(end_id)
        if len(ids) < 2:
            raise DataError(f"{document.place}: a text of one token")
        return Sample(ids, [False] + [True] * (len(ids) - 1))
    firsts = [first for first, _ in offsets]
    generated = [False] * len(ids)
    for start, end in document.spans:
        span = slice(bisect_left(firsts, start), bisect_left(firsts, end))
        generated[span] = [True] * (span.stop - span.start)
    return Sample(ids, generated)


_TOKENIZED_AT_ONCE = 4096


def load_samples(source: str, tokenizer: Any, context: int, split: str = "train") -> list[Sample]:
    """Every record of a source as tokens.

    Raises:
        DataError: nothing there, or a sample longer than `context`.

    """
    samples: list[Sample] = []
    records = read_records(source, split)
    while chunk := list(itertools.islice(records, _TOKENIZED_AT_ONCE)):
        documents = [render(record, tokenizer, place) for place, record in chunk]
        tokenized = tokenize(documents, tokenizer)
        for document, sample in zip(documents, tokenized, strict=True):
            if len(sample.ids) > context:
                raise DataError(
                    f"{document.place}: {len(sample.ids)} tokens, longer than context={context}. "
                    f"Raise context, or split or drop such samples."
                )
        samples += tokenized
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
    shape = (len(rows), context)
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    documents = np.full(shape, PADDING, np.int16)
    trained = np.zeros(shape, np.bool_)
    for at, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row):
            end = start + len(sample.ids)
            ids[at, start:end] = sample.ids
            documents[at, start:end] = number
            positions[at, start:end] = np.arange(end - start)
            trained[at, start : end - 1] = sample.generated[1:]
            start = end
    return PackedRows(*map(torch.from_numpy, (ids, documents, positions, trained)))


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
