"""Text to packed rows: JSONL or a hub dataset -> token lists -> rows of whole documents."""

from __future__ import annotations

import hashlib
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
            first token, or the assistant's turns of a chat up to the end token. Only such tokens
            are trained on.

    """

    ids: Sequence[int] | np.ndarray
    generated: Sequence[bool] | np.ndarray


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

    def only(self, which: torch.Tensor) -> PackedRows:
        """Some rows, as they are kept."""
        kept = (t[which] for t in (self.ids, self.documents, self.positions, self.trained))
        return PackedRows(*kept)

    def rows(self, which: torch.Tensor, device: torch.device) -> PackedRows:
        """Some rows, int64 but for `trained`, on a device."""
        return PackedRows(
            self.ids[which].long().to(device),
            self.documents[which].long().to(device),
            self.positions[which].long().to(device),
            self.trained[which].to(device),
        )


def read_records(source: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) for each line of a JSONL file, or each row of a dataset, "name[:config]".

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
        name, _, config = source.partition(":")
        dataset = load_dataset(name, config or None, split=split)
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
    if not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError(f"{place}: `messages` must hold objects with `role` and `content`")

    def written(some: list[Any], prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
        )

    spans = []
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise DataError(f"{place}: no assistant turn that answers something")
    try:
        text = written(messages, False)
        for turn in turns:
            start = written(messages[:turn], True)
            end = text if turn + 1 == len(messages) else written(messages[: turn + 1], False)
            # Templates that rewrite earlier turns (dropped thoughts) leave only the last one whole.
            if text.startswith(start) and text.startswith(end):
                spans.append((len(start), len(end)))
    except Exception as error:  # templates raise what they like
        raise DataError(f"{place}: the chat template refuses it: {error}") from error
    if not spans:
        raise DataError(
            f"{place}: the chat template writes no assistant turn as it would be generated (it "
            f"changes the prompt or the answer afterwards); give `text` instead"
        )
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
        generated = np.ones(len(ids), np.bool_)
        generated[0] = False
        return Sample(np.array(ids, np.int32), generated)
    firsts = [first for first, _ in offsets]
    generated = np.zeros(len(ids), np.bool_)
    for start, end in document.spans:
        first, last = bisect_left(firsts, start), bisect_left(firsts, end)
        # What templates write behind the end token (a line break) no model generates.
        ends = [i for i in range(first, last) if ids[i] == end_id]
        generated[first : ends[-1] + 1 if ends else last] = True
    return Sample(np.array(ids, np.int32), generated)


_TOKENIZED_AT_ONCE = 4096


def load_samples(
    source: str, tokenizer: Any, context: int, split: str = "train", limit: int | None = None
) -> list[Sample]:
    """The records of a source as tokens, or the first `limit` of them.

    Raises:
        DataError: nothing there, or a sample longer than `context`.

    """
    samples: list[Sample] = []
    records = itertools.islice(read_records(source, split), limit)
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


# Rows that may still take a document.
_OPEN_ROWS = 64


def pack(samples: Sequence[Sample], context: int) -> PackedRows:
    """Fill rows with whole documents, the first that has room: none is cut or crosses a row."""
    rows: list[list[Sample]] = []
    open_rows: list[tuple[int, list[Sample]]] = []  # (free tokens, row)
    for sample in samples:
        length = len(sample.ids)
        at = next((i for i, (free, _) in enumerate(open_rows) if free >= length), None)
        if at is None:
            if len(open_rows) == _OPEN_ROWS:
                open_rows.remove(min(open_rows, key=lambda found: found[0]))
            rows.append([])
            open_rows.append((context, rows[-1]))
            at = len(open_rows) - 1
        free, row = open_rows[at]
        row.append(sample)
        open_rows[at] = (free - length, row)
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


def fingerprint(*parts: PackedRows) -> str:
    """Tells whether a resumed run has the data of the first one."""
    found = hashlib.sha256()
    for rows in parts:
        for tensor in (rows.ids, rows.documents, rows.trained):
            found.update(repr(tuple(tensor.shape)).encode())
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


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
