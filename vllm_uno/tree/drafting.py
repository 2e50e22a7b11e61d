"""From the draft pass's logits to the trees that will be verified.

Row 0 gives the root: the *clean* token, sampled from the base model's own law with all of the
request's parameters and the very noise that verification will sample row 0 with, so the two agree
whatever the temperature. Rows 1 ... B-1 give candidates; their laws know the temperature only.

Some requests need to know the path to a row before they can process its logits: penalties,
forbidden words, grammars, a thinking budget, a user's own processors. vLLM hands their state a
chain of draft tokens, so such a request gets a chain in the tree's place: in each row the token
that this row's law and the noise of its position give. (Which tokens are proposed never matters to
the output: the target's own samples are what is emitted.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_uno.draft_sampling import HEAD_ROWS, DraftBatch
from vllm_uno.tree.builder import TreeBuffers, build_trees
from vllm_uno.tree.candidates import Candidates, select_candidates
from vllm_uno.tree.target_sampling import LogitsRows, sample_target
from vllm_uno.vllm_hooks.runner_api import (
    BadWordsState,
    LogitBiasState,
    PenaltiesState,
    Sampler,
    async_tensor_h2d,
    get_max_chunk_logits,
    use_penalty,
)

_BUILT_IN = (LogitBiasState, PenaltiesState, BadWordsState)


def needs_path(params: Any, sampler: Sampler) -> bool:
    """Whether a row's law of such a request depends on the tokens between seed and row.

    Args:
        params: SamplingParams, None for a request that samples nothing.
        sampler: the target's, for its logits processors.
    """
    if params is None:
        return False
    return (
        params.structured_outputs is not None
        or use_penalty(params)
        or bool(params.bad_words_token_ids)
        or params.thinking_token_budget is not None
        # Nothing is known of a user's own, not even that it declined the request.
        or any(not isinstance(p, _BUILT_IN) for p in sampler.logits_processors)
    )


class TreeDrafter:
    """Builds the trees of a draft pass.

    Args:
        sampler: the target's sampler, for the requests' sampling state.
        trees: written by request-state slot.
        needs_path: bool [max_num_reqs] on the host, by request-state slot.
        block_size: B.
        top_k: K.
    """

    def __init__(
        self,
        sampler: Sampler,
        trees: TreeBuffers,
        needs_path: np.ndarray,
        block_size: int,
        top_k: int,
    ) -> None:
        self.sampler = sampler
        self.trees = trees
        self.needs_path = needs_path
        self.block_size = block_size
        vocab_size = sampler.sampling_states.vocab_size
        max_num_reqs, device = trees.tokens.shape[0], trees.tokens.device
        rows = min(HEAD_ROWS, get_max_chunk_logits(vocab_size))
        self.chunk = min(max_num_reqs, max(1, rows // block_size))
        self.candidates = Candidates.allocate(
            max_num_reqs, block_size, top_k, vocab_size, device, max_chunk_reqs=self.chunk
        )
        self.roots = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.chains = torch.zeros(max_num_reqs, block_size, dtype=torch.int64, device=device)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        batch: DraftBatch,
        drafting: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the trees of n requests, and their node tokens. No host sync.

        Args:
            hidden_states: [n * B, H].
            compute_logits: hidden states -> logits [rows, vocab].
            batch: the rows.
            drafting: bool [n]; the others get a chain of token 0.
            out: int64 [n, V], written.
        """
        num_reqs, block = len(batch.idx_mapping_np), self.block_size
        chained = np.flatnonzero(self.needs_path[batch.idx_mapping_np])
        chains = self.chains[:num_reqs]
        chains.zero_()
        for start in range(0, num_reqs, self.chunk):
            stop = min(start + self.chunk, num_reqs)
            logits = compute_logits(hidden_states[start * block : stop * block])
            part = np.arange(start, stop)
            rows = logits.view(stop - start, block, -1)
            self.roots[start:stop] = self._sample(rows[:, :1], batch, part, None)[:, 0]
            inside = chained[(chained >= start) & (chained < stop)]
            if len(inside) > 0:
                index = async_tensor_h2d(inside, device=logits.device, dtype=torch.int64)
                chains[index] = self._sample(rows[index - start], batch, inside, index)
            if len(inside) < stop - start:
                select_candidates(
                    self.candidates,
                    logits,
                    batch.idx_mapping[start:stop],
                    self.sampler.sampling_states.temperature.gpu,
                    first_request=start,
                )
        if len(chained) == 0:
            is_chain = ~drafting
        else:
            chains.masked_fill_(~drafting[:, None], 0)
            wants = self.needs_path[batch.idx_mapping_np]
            is_chain = ~drafting | async_tensor_h2d(wants, device=drafting.device)
        build_trees(
            self.trees,
            out,
            self.candidates,
            idx_mapping=batch.idx_mapping,
            roots=self.roots[:num_reqs],
            is_chain=is_chain,
            chain_tokens=chains,
        )

    def _sample(
        self,
        logits: torch.Tensor,
        batch: DraftBatch,
        requests: np.ndarray,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Tokens int64 [m, rows] of the first rows of m requests, from logits [m, rows, vocab].

        `requests` are their batch rows; `index` the same on the device, None for a range.
        """
        num_reqs, num_rows, vocab_size = logits.shape
        where: Any = slice(requests[0], requests[-1] + 1) if index is None else index
        slots = batch.idx_mapping[where]

        def rows_of(x: torch.Tensor) -> torch.Tensor:
            # vLLM's kernels take them to be contiguous.
            return x.view(-1, self.block_size)[where, :num_rows].reshape(-1).contiguous()

        tokens, _ = sample_target(
            self.sampler,
            # A view of rows a block apart where only row 0 of each request is sampled.
            logits[:, 0] if num_rows == 1 else logits.reshape(-1, vocab_size),
            LogitsRows(
                slots=slots.repeat_interleave(num_rows, output_size=num_reqs * num_rows),
                # 0: no row looks back over draft tokens.
                local_pos=torch.zeros(num_reqs * num_rows, dtype=torch.int32, device=logits.device),
                tokens=rows_of(batch.input_ids),
                positions=rows_of(batch.positions),
                idx_mapping=slots,
                idx_mapping_np=batch.idx_mapping_np[requests],
                seq_lens_upper_bound_np=batch.seq_lens_upper_bound_np[requests],
            ),
        )
        return tokens.view(num_reqs, num_rows)
