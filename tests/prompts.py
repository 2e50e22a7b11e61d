"""Seeded prompts of token ids, of mixed length."""

import random
from collections.abc import Sequence

# Shorter and longer than a KV block of 16, exactly one, two and four of them, one past, and long
# enough for chunked prefill with small token limits.
MIXED_LENGTHS = (1, 7, 16, 33, 48, 64, 100, 150)


def make_prompts(
    vocab_size: int,
    count: int = len(MIXED_LENGTHS),
    *,
    lengths: Sequence[int] = MIXED_LENGTHS,
    seed: int = 0,
) -> list[list[int]]:
    """`count` prompts of ids in [1, vocab_size), prompt i of lengths[i % len(lengths)] tokens.

    Id 0 is left out: it ends a sequence in the tiny model. No two prompts share a prefix longer
    than chance gives, so that prefix caching plays no part unless a test repeats a prompt.
    """
    rng = random.Random(seed)
    return [
        [rng.randrange(1, vocab_size) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def make_gpu_prompts(vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """The 64 prompts of the H200 run: 5 to 320 tokens, every length different."""
    return make_prompts(vocab_size, 64, lengths=range(5, 325, 5), seed=seed)
