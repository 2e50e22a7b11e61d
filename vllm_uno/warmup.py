"""Compile before serving what the first request of each kind would compile.

vLLM warms its sampler up with one kind of request that uses every parameter. A
greedy request verifies unprocessed logits (another dtype), and top-k or top-p
alone are other variants of their kernels; each would cost the first such request
a second or more. Runs while CUDA graphs are captured, on rows of nobody.
"""

from __future__ import annotations

import torch

from vllm_uno.draft_law import LawRows, sample_draft_rows
from vllm_uno.vllm_hooks.runner_api import Sampler, apply_top_k_top_p, rejection_sample

# Up to 64 rows vLLM splits a row's top-p among programs, the more the fewer the rows: a
# variant for each power of two. Above, another kernel takes whole rows.
_ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96)


def warm_up_sampling(
    sampler: Sampler,
    draft_logits: torch.Tensor | None,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run verification, filters and inert drafts once for each variant of their kernels.

    Args:
        sampler: the target's; its sampling state is read, not changed.
        draft_logits: the cache of draft laws, read only; None for greedy proposals.
        block_size: B.
        vocab_size: columns of the logits.
        dtype: of unprocessed logits.
        device: the GPU.
    """
    rows = block_size + 1
    one = torch.zeros(1, dtype=torch.int64, device=device)
    states = sampler.sampling_states
    for logits_dtype in {dtype, torch.float32}:
        rejection_sample(
            torch.zeros(rows, vocab_size, dtype=logits_dtype, device=device),
            draft_logits,
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.tensor([0, rows], dtype=torch.int32, device=device),
            torch.arange(rows, device=device),
            one,
            one.expand(rows).contiguous(),
            torch.arange(rows, dtype=torch.int32, device=device),
            states.temperature.gpu,
            states.seeds.gpu,
            block_size,
            use_fp64=sampler.use_fp64_gumbel,
        )
    warm_up_filters(vocab_size, device)
    # Laws of nobody (slot -1): nothing is written.
    law_rows = LawRows.allocate(
        block_size,
        vocab_size,
        request=torch.full((block_size,), -1, dtype=torch.int64, device=device),
        positions=torch.arange(block_size, device=device),
        drafting=torch.zeros(1, dtype=torch.bool, device=device),
    )
    out = torch.empty(block_size, dtype=torch.int64, device=device)
    for logits_dtype in {dtype, torch.float32}:
        logits = torch.zeros(block_size, vocab_size, dtype=logits_dtype, device=device)
        for filters in (False, True):
            sample_draft_rows(
                logits,
                law_rows,
                draft_logits,
                out,
                filters=filters,
                use_fp64=sampler.use_fp64_gumbel,
            )


def warm_up_filters(vocab_size: int, device: torch.device) -> None:
    """Run vLLM's top-k and top-p once for each variant of their kernels."""
    for count in _ROW_COUNTS:
        k = torch.full((count,), 2, dtype=torch.int32, device=device)
        p = torch.full((count,), 0.5, device=device)
        for top_k, top_p in ((k, None), (None, p), (k, p)):
            logits = torch.randn(count, vocab_size, device=device)
            apply_top_k_top_p(logits, top_k, top_p)
