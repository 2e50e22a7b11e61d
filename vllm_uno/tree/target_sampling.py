"""Tokens sampled from the target's processed laws: the clean token, and every verify row's.

Both must be what plain vLLM samples there: its sampler's processing, its noise, keyed by the
request's seed and the row's position, without the salt that drafts get elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_uno.vllm_hooks.runner_api import Sampler, gumbel_sample


@dataclass(frozen=True)
class LogitsRows:
    """What processing needs to know of rows of logits.

    Attributes:
        slots: int64 [rows], request-state slot of each.
        local_pos: int32 [rows], rows of the same request before it whose tokens count as output.
        tokens: int [rows], the token each was computed on.
        positions: int64 [rows], of those tokens.
        idx_mapping: int64 [n], slots of the requests.
        idx_mapping_np: the same on the host.
        seq_lens_upper_bound_np: int [n], host bound on the requests' tokens.
    """

    slots: torch.Tensor
    local_pos: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    seq_lens_upper_bound_np: np.ndarray


def sample_target(
    sampler: Sampler, logits: torch.Tensor, rows: LogitsRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row as plain vLLM would; no host sync.

    Args:
        sampler: the target's.
        logits: [rows, vocab], any float dtype, contiguous within a row; not changed.

    Returns:
        tokens int64 [rows], and the processed logits: fp32, or `logits` itself where no request
        has anything processed.
    """
    processed = sampler.apply_sampling_params(
        logits,
        rows.slots,
        rows.idx_mapping,
        rows.idx_mapping_np,
        rows.positions,
        rows.tokens,
        rows.local_pos,
        rows.seq_lens_upper_bound_np,
    )
    states = sampler.sampling_states
    tokens = gumbel_sample(
        processed,
        rows.slots,
        states.temperature.gpu,
        states.seeds.gpu,
        rows.positions,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )
    return tokens, processed
