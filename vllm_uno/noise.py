"""Noise token ids of the draft rows: stateless, the same on every rank.

A noise id depends on the run's seed, the request's seed and its position only:
never on a generator's state or the batch (with vocabulary-parallel embeddings
ranks that differ would add up shards of *different* tokens), so a request's
drafts do not change with its neighbours.

vLLM draws its sampling noise from the same hash with domains 0 and 0x9E3779B9
(`vllm/v1/worker/gpu/sample/gumbel.py`). Ours is its own domain, so no key is
shared with the verifier or the draft sampler.
"""

from __future__ import annotations

import torch

from vllm_uno.vllm_hooks.runner_api import murmur3_hash32, tl, triton

NOISE_DOMAIN = 0x554E4F01
_DOMAIN = tl.constexpr(NOISE_DOMAIN)
_MASK32 = 0xFFFFFFFF


@triton.jit
def noise_token_id(noise_seed, request_seed, position, low, high):
    """Token id in [low, high) for one position (Triton device function).

    Args:
        noise_seed: scalar int, `uno_noise_seed`.
        request_seed: scalar int64.
        position: int64 scalar or block.
        low, high: scalar ints.
    """
    request_seed = request_seed + tl.zeros_like(position)
    offset = (noise_seed + tl.zeros_like(position)).to(tl.uint32)
    h = murmur3_hash32(request_seed, position, offset, domain=_DOMAIN).to(tl.uint64)
    span = (high - low + tl.zeros_like(position)).to(tl.uint64)
    return low + ((h * span) >> 32).to(tl.int64)


def _rotl(x: torch.Tensor, shift: int) -> torch.Tensor:
    return ((x << shift) | (x >> (32 - shift))) & _MASK32


def _mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = (key * 0xCC9E2D51) & _MASK32
    key = (_rotl(key, 15) * 0x1B873593) & _MASK32
    return (_rotl(h ^ key, 13) * 5 + 0xE6546B64) & _MASK32


def noise_token_ids_reference(
    noise_seed: int, request_seeds: torch.Tensor, positions: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) over (request seed, position, noise seed), in PyTorch.

    Args:
        request_seeds: int64, broadcastable to `positions`.
        positions: int64.

    Returns:
        int64 ids in [low, high), shape of `positions`.
    """
    seeds = request_seeds.expand_as(positions)
    h = torch.full_like(positions, NOISE_DOMAIN)
    for word in (
        seeds & _MASK32,
        (seeds >> 32) & _MASK32,
        positions & _MASK32,
        torch.full_like(positions, noise_seed & _MASK32),
    ):
        h = _mix(h, word)
    h = h ^ 16
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK32
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK32
    h ^= h >> 16
    return low + ((h * (high - low)) >> 32)
