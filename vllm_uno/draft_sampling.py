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

vLLM's own processors make z; `draft_law` does the rest, and nothing but the rest
where no request of the batch has a processor: such a *plain* batch depends on
device state only, so its sampling can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_uno.draft_head import ReducedHead
from vllm_uno.draft_law import LawRows, sample_draft_rows
from vllm_uno.vllm_hooks.runner_api import (
    BadWordsState,
    LogitBiasState,
    LogitsContext,
    PenaltiesState,
    Sampler,
    get_max_chunk_logits,
)

# The head reads its weights once a part, which at so many rows is hidden behind its arithmetic;
# more rows at a time would only hold more logits (156 MB in bf16 at 152k tokens).
HEAD_ROWS = 512


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one draft pass, for processors (row layout: draft_inputs.py).

    Attributes:
        idx_mapping: int64 [n], batch row -> request-state slot.
        idx_mapping_np: the same on the host.
        seq_lens_upper_bound_np: int [n], host bound on tokens up to the seed row.
        input_ids: int32 [n * B].
        positions: int64 [n * B].
    """

    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    seq_lens_upper_bound_np: np.ndarray
    input_ids: torch.Tensor
    positions: torch.Tensor


class DraftSampler:
    """Samples every row of a draft pass from its own marginal.

    Args:
        sampler: the target's sampler, for the requests' sampling state.
        rows: B, and what each row's law depends on.
        draft_logits: fp32 [max_num_reqs, B, V] cache of the draft laws, read by
            vLLM's rejection sampler; None for greedy proposals (`draft_sample_method`).
        reduced: the reduced draft head, which is then also `compute_logits` below.
    """

    def __init__(
        self,
        sampler: Sampler,
        rows: LawRows,
        draft_logits: torch.Tensor | None,
        reduced: ReducedHead | None = None,
    ) -> None:
        self.sampler = sampler
        self.rows = rows
        self.block_size = rows.block_size
        self.draft_logits = draft_logits
        self.reduced = reduced

    def is_plain(self, slots_np: np.ndarray) -> bool:
        """Host-known: no processor acts on the logits of these requests before temperature."""
        sampler = self.sampler
        if not np.any(sampler.needs_logits_processing[slots_np]):
            return True
        for processor in sampler.logits_processors:
            if isinstance(processor, LogitBiasState):
                acts = processor.use_logit_bias
            elif isinstance(processor, PenaltiesState):
                acts = processor.use_penalty
            elif isinstance(processor, BadWordsState):
                acts = processor.num_bad_words.np
            else:  # a user's own: nothing is known of it
                return False
            if np.any(acts[slots_np]):
                return False
        budget = sampler.thinking_budget_state
        return not (budget.enabled and np.any(budget.use_thinking_budget[slots_np]))

    def sample_plain(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        out: torch.Tensor,
        filters: bool = True,
    ) -> None:
        """Write one token per row of a plain batch. May be captured.

        Args:
            hidden_states: [n * B, H].
            compute_logits: hidden states -> logits [rows, V].
            out: int64 [n, B].
            filters: False where the host knows that no request uses min_p, top-k or top-p.
        """
        block = self.block_size
        step = max(1, HEAD_ROWS // block)
        for start in range(0, len(out), step):
            stop = min(start + step, len(out))
            rows = hidden_states[start * block : stop * block]
            if self.reduced is not None and self.draft_logits is None:
                # The likeliest token is all that is asked: no logits of full width.
                out[start:stop] = self.reduced.argmax(rows).view(-1, block)
                continue
            self._sample(compute_logits(rows), start, stop, out, filters)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        batch: DraftBatch,
        out: torch.Tensor,
    ) -> None:
        """Write one token per row of any batch; arguments as `sample_plain`'s."""
        block = self.block_size
        slots_np = batch.idx_mapping_np
        states = self.sampler.sampling_states
        filters = bool(
            np.any(states.top_k.np[slots_np] != states.vocab_size)
            or np.any(states.top_p.np[slots_np] != 1.0)
            or np.any(states.min_p.np[slots_np] != 0.0)
        )
        if self.is_plain(slots_np):
            self.sample_plain(hidden_states, compute_logits, out, filters)
            return
        # As vLLM's verification: at most 1 GiB of fp32 logits at a time.
        step = max(1, min(HEAD_ROWS, get_max_chunk_logits(states.vocab_size)) // block)
        for start in range(0, len(out), step):
            stop = min(start + step, len(out))
            logits = compute_logits(hidden_states[start * block : stop * block])
            z = self._process(logits, batch, start, stop)
            self._sample(z, start, stop, out, filters)

    def _sample(
        self, logits: torch.Tensor, start: int, stop: int, out: torch.Tensor, filters: bool
    ) -> None:
        """Laws and tokens of requests start ... stop-1 from their z, [(stop - start) * B, V]."""
        sample_draft_rows(
            logits,
            self.rows.part(start, stop),
            self.draft_logits,
            out[start:stop].view(-1),
            filters=filters,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _process(
        self, logits: torch.Tensor, batch: DraftBatch, start: int, stop: int
    ) -> torch.Tensor:
        """z of the module's docstring, before filters: fp32 [(stop - start) * B, V]."""
        sampler = self.sampler
        block = self.block_size
        rows = slice(start * block, stop * block)
        # Real slots also for inert rows: kernels load parameters by it.
        row_slot = batch.idx_mapping[start:stop].repeat_interleave(
            block, output_size=(stop - start) * block
        )
        context = LogitsContext(
            expanded_idx_mapping=row_slot,
            idx_mapping=batch.idx_mapping[start:stop],
            idx_mapping_np=batch.idx_mapping_np[start:stop],
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
        return z
