"""Trees that hold the right continuation: a random model's own drafts are hardly ever accepted.

Only the candidates are put right, and the tokens of chains: what happens to them (builder,
attention, walk, KV compaction) is the engine's own. The right token stands at a random rank and
now and then is missing; the nodes accepted are seldom the first ones, and what is emitted still
has to be sampled from verification's own rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from vllm_uno.tree import drafting
from vllm_uno.tree.builder import TreeBuffers, build_trees
from vllm_uno.tree.candidates import Candidates

RANKS = 3  # of the right token
DECAY = 0.9  # nat from rank to rank
MISSING = 0.15  # share of positions without it


@contextmanager
def oracle_trees(
    engine: Any, texts: Mapping[Sequence[int], Sequence[int]], seed: int = 0
) -> Iterator[None]:
    """While open, candidates (and the tokens of chains) hold the next tokens of these texts.

    Args:
        engine: `engines.Engine` in tree mode, or whatever has its `runner` and `speculator`.
        texts: prompt -> its continuation, of a model with 2,048 tokens.
    """
    rng = random.Random(seed)
    full = {tuple(prompt): [*prompt, *texts[prompt]] for prompt in texts}
    states, needs_path = engine.runner.req_states, engine.speculator.memory.needs_path

    def put_right(
        out: TreeBuffers,
        draft_tokens: torch.Tensor,
        candidates: Candidates,
        *,
        idx_mapping: torch.Tensor,
        chain_tokens: torch.Tensor,
        **given: Any,
    ) -> None:
        _, rows, top_k = candidates.tokens.shape
        contexts = states.num_computed_tokens.gpu.tolist()
        chains = chain_tokens.cpu()
        slots = idx_mapping.tolist()
        found = torch.empty(len(slots), rows, top_k, dtype=torch.int32)
        for request, slot in enumerate(slots):
            prompt_len = int(states.prompt_len.np[slot])
            text = full[tuple(states.all_token_ids.gpu[slot, :prompt_len].tolist())]
            for row in range(rows):
                tokens = rng.sample(range(1, 2048), top_k)
                at = contexts[slot] + 2 + row
                if at < len(text) and rng.random() > MISSING:
                    right, rank = text[at], rng.randrange(min(RANKS, top_k))
                    if right in tokens:
                        tokens[tokens.index(right)] = tokens[rank]
                    tokens[rank] = right
                    if needs_path[slot]:
                        chains[request, row + 1] = right
                found[request, row] = torch.tensor(tokens)
        # One copy each: on a GPU, every one waits.
        candidates.tokens[: len(slots)] = found.to(candidates.tokens.device)
        candidates.log_probs[: len(slots)] = -DECAY * torch.arange(
            1, top_k + 1, device=candidates.log_probs.device
        )
        chain_tokens.copy_(chains)
        build_trees(
            out,
            draft_tokens,
            candidates,
            idx_mapping=idx_mapping,
            chain_tokens=chain_tokens,
            **given,
        )

    with (
        mock.patch.object(drafting, "build_trees", put_right),
        # Slow in the interpreter; what it selects is written over.
        mock.patch.object(drafting, "select_candidates"),
    ):
        yield


@dataclass(frozen=True)
class DraftedTree:
    """One request's draft.

    Attributes:
        context: C.
        ids: tokens of the B draft rows.
        tokens, depths: of the V nodes.
    """

    context: int
    ids: list[int]
    tokens: list[int]
    depths: list[int]


@contextmanager
def drafted_trees(speculator: Any) -> Iterator[list[DraftedTree]]:
    """Records every tree that an in-process `TreeProposer` drafts while it is open."""
    trees, records = speculator.memory.trees, []
    sample, block = speculator._sample, speculator.block_size

    def record(hidden_states: torch.Tensor, batch: Any, out: torch.Tensor) -> None:
        sample(hidden_states, batch, out)
        for request, slot in enumerate(batch.idx_mapping_np.tolist()):
            if speculator.rows.drafting[request]:
                records.append(
                    DraftedTree(
                        context=int(batch.positions[request * block]),
                        ids=batch.input_ids[request * block : (request + 1) * block].tolist(),
                        tokens=trees.tokens[slot].tolist(),
                        depths=trees.depths[slot].tolist(),
                    )
                )

    with mock.patch.object(speculator, "_sample", record):
        yield records
