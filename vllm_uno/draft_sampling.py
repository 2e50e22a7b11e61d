"""Draft laws and draft tokens: what verification tests must be what was sampled.

For each draft row, with logits in fp32:

    z     = logits after bias, penalties, bad words, custom processors, thinking
            budget: all of the request's processing *before* temperature
    kept  = tokens that min_p, top-k and top-p keep of z / T
    z     = -inf outside `kept`; this z is cached AND sampled at temperature T

so the cached law, which the rejection test divides by T again, is bitwise the
sampled one, and row 0, the base model's own next-token law, is processed as the
target's: q = p there. Noise rows take the same processing with the request's
state at the seed (their left neighbours are not known yet).

vLLM's own kernels do all of it: what its sampler is, ours is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_uno.draft_head import ReducedHead
from vllm_uno.vllm_hooks.runner_api import (
    LogitsContext,
    Sampler,
    get_max_chunk_logits,
    gumbel_sample,
    tl,
    triton,
)


@dataclass(frozen=True)
class DraftBatch:
    """The rows of one draft pass, request by request (layout: draft_inputs.py).

    Attributes:
        idx_mapping: int64 [n], batch row -> request-state slot.
        idx_mapping_np: the same on the host.
        seq_lens_upper_bound_np: int [n], host bound on tokens up to the seed row.
        row_request: int64 [n * B], slot of each row; -1 writes nothing.
        input_ids: int32 [n * B].
        positions: int64 [n * B].
        drafting: bool [n]; a request that does not draft proposes token 0 surely.
        some_inert: host-known: whether `drafting` may hold a False that verification
            will look at.
    """

    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    seq_lens_upper_bound_np: np.ndarray
    row_request: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    drafting: torch.Tensor
    some_inert: bool


class DraftSampler:
    """Samples every row of a draft pass from its own marginal.

    Args:
        sampler: the target's sampler, for the requests' sampling state.
        block_size: B.
        draft_logits: fp32 [max_num_reqs, B, V] cache of the draft laws, read by
            vLLM's rejection sampler; None for greedy proposals (`draft_sample_method`).
        reduced: the reduced draft head, which is then also `compute_logits` below.
    """

    def __init__(
        self,
        sampler: Sampler,
        block_size: int,
        draft_logits: torch.Tensor | None,
        reduced: ReducedHead | None = None,
    ) -> None:
        self.sampler = sampler
        self.block_size = block_size
        self.draft_logits = draft_logits
        self.reduced = reduced

    def __call__(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        batch: DraftBatch,
        out: torch.Tensor,
    ) -> None:
        """Write one token per row.

        Args:
            hidden_states: [n * B, H].
            compute_logits: hidden states -> logits [rows, V].
            batch: the rows.
            out: int64 [n, B].
        """
        block = self.block_size
        num_reqs = len(batch.idx_mapping_np)
        vocab_size = self.sampler.sampling_states.vocab_size
        # As vLLM's verification: at most 1 GiB of fp32 logits at a time.
        step = max(1, get_max_chunk_logits(vocab_size) // block)
        for start in range(0, num_reqs, step):
            stop = min(start + step, num_reqs)
            rows = slice(start * block, stop * block)
            if self.reduced is not None and self._bare_argmax(batch.idx_mapping_np[start:stop]):
                out[start:stop] = self.reduced.argmax(hidden_states[rows]).view(-1, block)
                continue
            logits = compute_logits(hidden_states[rows])
            out[start:stop] = self._sample(logits, batch, start, stop).view(stop - start, block)

    def _bare_argmax(self, slots_np: np.ndarray) -> bool:
        """Whether these requests' drafts are the argmax of unprocessed logits."""
        temperature = self.sampler.sampling_states.temperature.np[slots_np]
        certain = self.draft_logits is None or bool(np.all(temperature == 0.0))
        return certain and not np.any(self.sampler.needs_logits_processing[slots_np])

    def _sample(
        self, logits: torch.Tensor, batch: DraftBatch, start: int, stop: int
    ) -> torch.Tensor:
        block = self.block_size
        rows = slice(start * block, stop * block)
        slots_np = batch.idx_mapping_np[start:stop]
        states = self.sampler.sampling_states
        z = self._draft_law(logits, batch, start, stop)
        # Verification tests a greedy request by argmax and never reads its law.
        all_greedy = bool(np.all(states.temperature.np[slots_np] == 0.0))
        if self.draft_logits is None or all_greedy:
            # A certain proposal: its law is one-hot at whatever it proposes.
            return z.argmax(dim=-1)
        if z.dtype != torch.float32:
            z = z.float()
        if batch.some_inert:
            propose_token_zero(z, batch.drafting[start:stop], block)
        column = torch.arange(block, dtype=torch.int32, device=z.device).repeat(stop - start)
        return gumbel_sample(
            z,
            batch.row_request[rows],
            states.temperature.gpu,
            states.seeds.gpu,
            batch.positions[rows],
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=column,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _draft_law(
        self, logits: torch.Tensor, batch: DraftBatch, start: int, stop: int
    ) -> torch.Tensor:
        """z of the module's docstring for requests start ... stop-1: [(stop - start) * B, V]."""
        sampler = self.sampler
        block = self.block_size
        slots_np = batch.idx_mapping_np[start:stop]
        if not np.any(sampler.needs_logits_processing[slots_np]):
            return logits
        rows = slice(start * block, stop * block)
        # Real slots also for inert rows: kernels load parameters by it.
        row_slot = batch.idx_mapping[start:stop].repeat_interleave(
            block, output_size=(stop - start) * block
        )
        context = LogitsContext(
            expanded_idx_mapping=row_slot,
            idx_mapping=batch.idx_mapping[start:stop],
            idx_mapping_np=slots_np,
            # 0: no row looks back over draft tokens.
            expanded_local_pos=torch.zeros(
                logits.shape[0], dtype=torch.int32, device=logits.device
            ),
            input_ids=batch.input_ids[rows],
            pos=batch.positions[rows],
            seq_lens_upper_bound_np=batch.seq_lens_upper_bound_np[start:stop],
        )
        z = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        for processor in sampler.logits_processors:
            z = processor.apply(z, context)
        sampler.thinking_budget_state.apply(z, context)
        if self.reduced is not None:
            self.reduced.revive(z)

        states = sampler.sampling_states
        filters = (
            np.any(states.top_k.np[slots_np] != states.vocab_size)
            or np.any(states.top_p.np[slots_np] != 1.0)
            or np.any(states.min_p.np[slots_np] != 0.0)
        )
        if not filters:
            return z
        kept = z.clone()
        states.apply_temperature(kept, row_slot, slots_np)
        states.apply_min_p(kept, row_slot, slots_np)
        kept = states.apply_top_k_top_p(kept, row_slot, slots_np)
        return z.masked_fill_(kept == float("-inf"), float("-inf"))


@triton.jit
def _token_zero_kernel(z_ptr, z_stride, drafting_ptr, vocab_size, B: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(drafting_ptr + row // B) != 0:
        return
    token = tl.program_id(1) * N + tl.arange(0, N)
    law = tl.where(token == 0, 0.0, float("-inf"))
    tl.store(z_ptr + row * z_stride + token, law, mask=token < vocab_size)


def propose_token_zero(z: torch.Tensor, drafting: torch.Tensor, block_size: int) -> None:
    """Make the law of rows that do not draft one-hot at token 0.

    Such a request still has draft tokens scheduled. Testing token 0 against
    another law (a stale one) would bias its output.
    """
    num_rows, vocab_size = z.shape
    width = 4096
    _token_zero_kernel[(num_rows, triton.cdiv(vocab_size, width))](
        z, z.stride(0), drafting, vocab_size, B=block_size, N=width
    )
