"""`vllm-uno draft-vocab`: the most frequent tokens of a text, for `uno_draft_vocab`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_uno.train.data import Sample, load_samples
from vllm_uno.train.model import load_tokenizer
from vllm_uno.train.settings import option


@dataclass
class DraftVocabSettings:
    """Lists the most frequent tokens of a text, and every special token.

    Give text like that which the model will write: of chats only the assistant's turns count.
    """

    model: str = field(metadata={"help": "local folder or hub id, for its tokenizer"})
    data: str = field(
        metadata={"help": "JSONL with `text` or chat `messages`, or a dataset: name[:config]"}
    )
    output: str = field(metadata={"help": "file to write, .json"})
    size: int = option(32768, "tokens in the list")
    revision: str | None = option(None, "revision of the model on the hub")
    data_split: str = option("train", "split of a datasets name")
    samples: int | None = option(None, "samples of the data to take; none: all")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, not {self.size}")
        if Path(self.output).suffix != ".json":
            raise ValueError(f"output must end in .json, not {self.output!r}")


@dataclass(frozen=True)
class DraftVocab:
    """A list and how it fits the text it was made from.

    Attributes:
        ids: ascending.
        coverage: share of the text's tokens that are in the list.
        tokens: of the text.
        unseen: ids that do not occur in the text (special ones, and the fill).
    """

    ids: list[int]
    coverage: float
    tokens: int
    unseen: int

    def line(self) -> str:
        return (
            f"{len(self.ids)} tokens cover {100 * self.coverage:.2f} % of {self.tokens} "
            f"({self.unseen} of them do not occur there)"
        )


def make_draft_vocab(settings: DraftVocabSettings) -> DraftVocab:
    """Write the list and return it.

    Raises:
        DataError, ModelError, ValueError: with the setting and the way out.

    """
    tokenizer = load_tokenizer(settings.model, settings.revision)
    samples = load_samples(settings.data, tokenizer, 1 << 30, settings.data_split, settings.samples)
    ends = end_tokens(settings.model, settings.revision)
    found = most_frequent(
        count_tokens(samples, len(tokenizer)), special_tokens(tokenizer) | ends, settings.size
    )
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found.ids) + "\n")
    return found


def count_tokens(samples: list[Sample], vocab_size: int) -> np.ndarray:
    """int64 [vocab_size], how often each token was generated."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        ids = np.asarray(sample.ids)[np.asarray(sample.generated, np.bool_)]
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def most_frequent(counts: np.ndarray, always: set[int], size: int) -> DraftVocab:
    """`always` and the most frequent others, `size` in all; of equals the lowest.

    Where the text has too few tokens low ids fill the list: in vocabularies made by
    merging they are the more frequent ones.

    Raises:
        ValueError: `size` does not hold `always`, or is more than there are tokens.

    """
    if not len(always) < size <= len(counts):
        raise ValueError(
            f"size={size} must be more than the {len(always)} special tokens and at most the "
            f"{len(counts)} tokens of the tokenizer"
        )
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, sorted(always))][: size - len(always)]
    ids = np.sort(np.concatenate([others, np.array(sorted(always), np.int64)]))
    total = int(counts.sum())
    return DraftVocab(
        ids=ids.tolist(),
        coverage=float(counts[ids].sum()) / max(total, 1),
        tokens=total,
        unseen=int((counts[ids] == 0).sum()),
    )


def special_tokens(tokenizer: Any) -> set[int]:
    """Ids of special and added tokens: turn ends, tool calls, thinking marks."""
    ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return {i for i in ids if i < len(tokenizer)}


def end_tokens(model: str, revision: str | None) -> set[int]:
    """End tokens of the model's generation config, if it has one."""
    from transformers import GenerationConfig

    try:
        end = GenerationConfig.from_pretrained(model, revision=revision).eos_token_id
    except (OSError, ValueError):
        return set()
    if end is None:
        return set()
    return set(end) if isinstance(end, list) else {end}
