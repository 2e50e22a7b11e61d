"""Where vLLM's CPU attention keeps the KV of a slot: asked of its own writing kernel.

Inside a block and head the CPU cache is no [block_size, 2 * head_dim] array: keys are transposed or
packed for the instruction set at hand (vec, AMX, ...). Which way is private to vLLM's kernels and
may change; that it is a permutation is all that reading and moving slots need.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm import _custom_ops as ops

_BASE = 256
"""The largest base whose digits bf16 holds exactly."""


@functools.cache
def slot_elements(
    isa: str, dtype: torch.dtype, block_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of every slot's key and value in a block of one head.

    Args:
        isa: the attention layer's `isa`.
        dtype: of the KV cache.
        block_size: tokens a block.
        head_dim: of keys and values.

    Returns:
        int64 [block_size, head_dim] each: indices into the block's 2 * block_size * head_dim
        elements of one head, `kv_cache.view(blocks, kv_heads, -1)`.

    Raises:
        NotImplementedError: the kernel does not merely permute the elements.
    """
    size = block_size * head_dim
    found = torch.zeros(2 * size, dtype=torch.long)
    # Every element's number plus one, digit by digit; the rest of the block stays 0.
    keys = torch.arange(1, size + 1)
    digit = 1
    while digit <= 2 * size:
        found += digit * _written(isa, dtype, keys, keys + size, digit, block_size)
        digit *= _BASE
    where = torch.full((2 * size + 1,), -1)
    where[found.clamp(0, 2 * size)] = torch.arange(2 * size)
    where = where[1:]
    if not torch.equal(found[where.clamp(min=0)], torch.arange(1, 2 * size + 1)):
        raise NotImplementedError(
            f"tree mode cannot read vLLM's CPU KV cache: {isa}, {dtype}, blocks of {block_size}, "
            f"heads of {head_dim} are not a permutation of keys and values"
        )
    return where[:size].view(block_size, head_dim), where[size:].view(block_size, head_dim)


def _written(
    isa: str,
    dtype: torch.dtype,
    keys: torch.Tensor,
    values: torch.Tensor,
    digit: int,
    block_size: int,
) -> torch.Tensor:
    """int64 [2 * size]: a block after one digit of `keys` and `values` [size] was written."""
    key, value = (
        (numbers // digit % _BASE).to(dtype).view(block_size, 1, -1) for numbers in (keys, values)
    )
    cache = torch.zeros(1, 1, 2 * block_size, key.shape[-1], dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(block_size)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    return cache.flatten().round().long()


def compact_kv_cpu(
    layers: Sequence[Any],
    groups: Sequence[int],
    *,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    cu_num_logits: torch.Tensor,
    block_tables: Any,
) -> None:
    """`compaction.compact_kv` for vLLM's CPU caches.

    Args:
        layers: attention layers with their `kv_cache` [blocks, heads, block size, content].
        groups: of each layer, the index of its KV cache group.
    """
    moves = []
    for request, accepted in enumerate((num_sampled - 1).tolist()):
        rows = path[idx_mapping[request], 1 : accepted + 1].tolist() if accepted > 0 else []
        context = int(positions[cu_num_logits[request]])
        moves += [(request, context + row, context + i) for i, row in enumerate(rows, 1) if row > i]
    for layer, group in zip(layers, groups, strict=True):
        cache = layer.kv_cache
        blocks, heads, block_size, content = cache.shape
        keys, values = slot_elements(str(layer.isa), cache.dtype, block_size, content // 2)
        elements = torch.cat([keys, values], dim=1)
        flat = cache.view(blocks, heads, -1)
        table = block_tables.input_block_tables[group]
        for request, source, target in moves:
            from_block, to_block = (int(table[request, p // block_size]) for p in (source, target))
            moved = flat[from_block][:, elements[source % block_size]]
            flat[to_block][:, elements[target % block_size]] = moved
