"""`uno_draft_vocab`: the file of token ids that the draft head scores.

Two formats, by the file's name: `.json`, a list of ids (what `vllm-uno draft-vocab`
writes), and `.pt`, a list or a tensor saved by torch (what SGLang's
`--speculative-token-map` takes; FR-Spec, arXiv 2502.14856, publishes such lists).
Order means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_SHOWN = 5


def fewest_ids(vocab_size: int) -> int:
    """Below this a list is taken for a mistake: drafts would hardly ever be accepted."""
    return min(256, vocab_size // 8)


def read_draft_vocab(path: str | Path, vocab_size: int) -> np.ndarray:
    """Read and check a draft vocabulary.

    Args:
        path: the file.
        vocab_size: of the model; ids are in [0, vocab_size).

    Returns:
        int64 [D], ascending.

    Raises:
        ValueError: names `uno_draft_vocab`, the file, the reason and the way out.

    """
    path = Path(path)
    way_out = (
        "Make one with `vllm-uno draft-vocab`, or leave uno_draft_vocab out to draft with the "
        "whole vocabulary."
    )

    def refuse(reason: str) -> ValueError:
        return ValueError(f"uno_draft_vocab: {path} {reason}. {way_out}")

    if not path.is_file():
        raise refuse("does not exist" if not path.exists() else "is no file")
    try:
        listed = _load(path)
        ids = np.asarray(listed)
    except (ValueError, OSError, RuntimeError, EOFError) as error:
        raise refuse(f"could not be read: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise refuse("holds no list of token ids (whole numbers)")
    if not ids.size:
        raise refuse("is empty")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise refuse(
            f"holds {outside.size} ids outside the model's vocabulary [0, {vocab_size}) "
            f"({_show(outside)}); is it for another model?"
        )
    ids = ids.astype(np.int64)
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size != ids.size:
        twice = unique[counts > 1]
        raise refuse(f"holds {twice.size} ids more than once ({_show(twice)})")
    fewest = fewest_ids(vocab_size)
    if ids.size < fewest:
        raise refuse(
            f"holds {ids.size} ids, fewer than {fewest}, the least for a vocabulary of "
            f"{vocab_size}: drafts would hardly ever be accepted"
        )
    return unique


def _load(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".pt":
        import pickle

        import torch

        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"no list or tensor saved by torch.save ({error})") from error
    raise ValueError("its name must end in .json (a list) or .pt (saved by torch)")


def _show(ids: np.ndarray) -> str:
    shown = ", ".join(str(i) for i in ids[:_SHOWN])
    return shown if ids.size <= _SHOWN else f"{shown}, ..."
