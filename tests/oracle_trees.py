"""Trees that hold the right continuation: a random model's own drafts are hardly ever accepted.

Only the candidates are put right, so that what happens to them (builder, attention, walk, KV
compaction) is the engine's own. The right token stands at a random rank and now and then is
missing; the nodes accepted are seldom the first ones, and what is emitted still has to be sampled
from verification's own rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm_uno.tree import drafting
from vllm_uno.tree.candidates import Candidates

RANKS = 3  # of the right token
DECAY = 0.9  # nat from rank to rank
MISSING = 0.15  # share of positions without it


@contextmanager
def oracle_candidates(
    engine: Any, texts: Mapping[Sequence[int], Sequence[int]], seed: int = 0
) -> Iterator[None]:
    """While open, candidates hold the next tokens of these texts.

    Args:
        engine: `engines.Engine` in tree mode.
        texts: prompt -> its continuation.
    """
    rng = random.Random(seed)
    full = {tuple(prompt): [*prompt, *texts[prompt]] for prompt in texts}
    states = engine.runner.req_states

    def put_right(
        out: Candidates, logits: Any, idx_mapping: Any, temperature: Any, first_request: int = 0
    ) -> None:
        _, rows, top_k = out.tokens.shape
        for request, slot in enumerate(idx_mapping.tolist(), first_request):
            prompt_len = int(states.prompt_len.np[slot])
            prompt = tuple(states.all_token_ids.gpu[slot, :prompt_len].tolist())
            context = int(states.num_computed_tokens.gpu[slot])
            for row in range(rows):
                tokens = rng.sample(range(1, 2048), top_k)
                at = context + 2 + row
                if at < len(full[prompt]) and rng.random() > MISSING:
                    right, rank = full[prompt][at], rng.randrange(min(RANKS, top_k))
                    if right in tokens:
                        tokens[tokens.index(right)] = tokens[rank]
                    tokens[rank] = right
                for rank, token in enumerate(tokens):
                    out.tokens[request, row, rank] = token
                    out.log_probs[request, row, rank] = -DECAY * (rank + 1)

    with mock.patch.object(drafting, "select_candidates", put_right):
        yield
