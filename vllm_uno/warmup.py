"""Compile before serving what the first request of each kind would compile.

vLLM warms its sampler up with one kind of request that uses every parameter. A
greedy request verifies unprocessed logits (another dtype), and top-k or top-p
alone are other variants of their kernels; each would cost the first such request
a second or more. Runs once attention is set up, on rows of nobody: ahead of
vLLM's own warm-up, which then finds its kernels compiled, and of the capture of
graphs. Triton compiles outside the interpreter lock, so variants are compiled at
the same time: some forty of them, one to ten seconds each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from vllm_uno.draft_law import LawRows, sample_draft_rows
from vllm_uno.vllm_hooks.runner_api import Sampler, apply_top_k_top_p, rejection_sample

# Up to 64 rows vLLM splits a row's top-p among programs, the more the fewer the rows: a
# variant for each power of two. Above, another kernel takes whole rows.
_ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96)


def run_at_once(jobs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run jobs that compile kernels and launch them on `device`, a GPU, each in a thread.

    Raises:
        What the first of the jobs to fail raised, once all have ended.
    """

    def run(job: Callable[[], object]) -> None:
        # A thread has its own current device and gradient mode.
        torch.accelerator.set_device_index(device)
        with torch.inference_mode():
            job()

    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        done = [pool.submit(run, job) for job in jobs]
    for future in done:
        future.result()


def sampling_jobs(
    sampler: Sampler,
    draft_logits: torch.Tensor | None,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Callable[[], object]]:
    """Verification, filters and inert drafts, once for each variant of their kernels.

    Args:
        sampler: the target's; its sampling state is read, not changed.
        draft_logits: the cache of draft laws, read only; None for greedy proposals.
        block_size: B.
        vocab_size: columns of the logits.
        dtype: of unprocessed logits.
        device: the GPU.
    """
    kinds = {dtype, torch.float32}
    return [
        *filter_jobs(vocab_size, device),
        *(
            partial(_verify, sampler, draft_logits, block_size, vocab_size, kind, device)
            for kind in kinds
        ),
        *(
            partial(_draft, sampler, draft_logits, block_size, vocab_size, kind, device, filters)
            for kind in kinds
            for filters in (False, True)
        ),
    ]


def _verify(
    sampler: Sampler,
    draft_logits: torch.Tensor | None,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rows = block_size + 1
    one = torch.zeros(1, dtype=torch.int64, device=device)
    states = sampler.sampling_states
    rejection_sample(
        torch.zeros(rows, vocab_size, dtype=dtype, device=device),
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


def _draft(
    sampler: Sampler,
    draft_logits: torch.Tensor | None,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    filters: bool,
) -> None:
    # Laws of nobody (slot -1): nothing is written.
    rows = LawRows.allocate(
        block_size,
        vocab_size,
        request=torch.full((block_size,), -1, dtype=torch.int64, device=device),
        positions=torch.arange(block_size, device=device),
        drafting=torch.zeros(1, dtype=torch.bool, device=device),
    )
    sample_draft_rows(
        torch.zeros(block_size, vocab_size, dtype=dtype, device=device),
        rows,
        draft_logits,
        torch.empty(block_size, dtype=torch.int64, device=device),
        filters=filters,
        use_fp64=sampler.use_fp64_gumbel,
    )


def filter_jobs(vocab_size: int, device: torch.device) -> list[Callable[[], object]]:
    """vLLM's top-k and top-p, once for each variant of their kernels."""
    return [
        partial(_filter, count, top_k, top_p, vocab_size, device)
        for top_k, top_p in ((True, True), (True, False), (False, True))
        for count in _ROW_COUNTS
    ]


def _filter(count: int, top_k: bool, top_p: bool, vocab_size: int, device: torch.device) -> None:
    k = torch.full((count,), 2, dtype=torch.int32, device=device) if top_k else None
    p = torch.full((count,), 0.5, device=device) if top_p else None
    apply_top_k_top_p(torch.randn(count, vocab_size, device=device), k, p)
