"""Blocks of noise over packed documents, and who may see whom.

A row of L tokens is presented twice, as 2 L rows of attention: the clean half (row t holds token t)
and the noised half (row L + t stands at the same position, but holds noise). Every document is cut
into blocks of B positions from a random offset on; the first position of a block is its *seed*,
read from the clean half, as the draft pass of vllm-uno reads the last emitted token. Who sees whom:

    clean row t        clean rows of its document up to t
    noised row t       clean rows of its document up to its block's seed, and the noised rows of
                       its own block up to itself
    unused noised row  itself: it stands on a seed, in padding, or before the first seed

(arXiv 2609.04010, §3.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PADDING = -1
UNUSED = -1


def block_seeds(
    documents: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Index of the seed of each noised row.

    Args:
        documents: int64 [N, L], which document of its row a token belongs to; PADDING for none.
        positions: int64 [N, L], position within the document.
        offsets: int64 [N, L], a number in [0, B) for the token's document: position p starts a
            block where (p + offset) % B == 0.
        block_size: B.

    Returns:
        int64 [N, L]: the column of the seed of the block around column t; UNUSED on seeds, in
        padding and before the first seed.

    """
    into = (positions + offsets) % block_size  # 0 at a seed
    columns = torch.arange(documents.shape[1], device=documents.device)
    used = (documents != PADDING) & (into > 0) & (positions >= into)
    return torch.where(used, columns - into, UNUSED)


def draw_offsets(
    documents: torch.Tensor, block_size: int, generator: torch.Generator
) -> torch.Tensor:
    """A random block offset for every document: int64 [N, L], equal within a document."""
    rows, length = documents.shape
    drawn = torch.randint(block_size, (rows, length), generator=generator).to(documents.device)
    return drawn.gather(1, documents.clamp(min=0))


def mask_mod(documents: torch.Tensor, seeds: torch.Tensor) -> MaskMod:
    """The rule above as a function (row, head, query, key) -> bool, for flex_attention.

    Args:
        documents: int64 [N, L].
        seeds: int64 [N, L], of `block_seeds`.

    """
    length = documents.shape[1]

    def allowed(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        q, k = query % length, key % length
        q_noised, k_noised = query >= length, key >= length
        document = documents[row, q]
        same = (document == documents[row, k]) & (document != PADDING)
        seed = seeds[row, q]
        clean = same & (k <= q)
        to_clean = same & (k <= seed)  # never where seed is UNUSED
        in_block = (seed != UNUSED) & (seed == seeds[row, k]) & (k <= q)
        noised = torch.where(k_noised, in_block, to_clean)
        return torch.where(q_noised, noised, clean & ~k_noised) | (query == key)

    return allowed


def dense_mask(documents: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The rule as a tensor for SDPA: bool [N, 1, 2 L, 2 L], True where a key may be seen."""
    rows, length = documents.shape
    every = torch.arange(2 * length, device=documents.device)
    row = torch.arange(rows, device=documents.device).view(-1, 1, 1, 1)
    head = torch.zeros(1, dtype=torch.int64, device=documents.device).view(1, 1, 1, 1)
    return mask_mod(documents, seeds)(row, head, every.view(1, 1, -1, 1), every.view(1, 1, 1, -1))


def flex_mask(documents: torch.Tensor, seeds: torch.Tensor) -> BlockMask:
    """The rule as a block mask for flex_attention over 2 L rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = documents.shape
    return create_block_mask(
        mask_mod(documents, seeds),
        B=rows,
        H=None,
        Q_LEN=2 * length,
        KV_LEN=2 * length,
        device=str(documents.device),
        _compile=True,
    )


def draw_noise(
    shape: tuple[int, int], low: int, high: int, generator: torch.Generator
) -> torch.Tensor:
    """Uniform token ids in [low, high): int64 `shape`, on the generator's device."""
    return torch.randint(low, high, shape, generator=generator)


def doubled(
    ids: torch.Tensor, noise: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and position ids of both halves: two int64 [N, 2 L]."""
    return torch.cat([ids, noise], dim=1), torch.cat([positions, positions], dim=1)
