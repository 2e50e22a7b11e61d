"""Ways to break the output law on purpose: the sampled-law test must see each of them.

`SABOTAGES[name]()` is a context manager that patches one place of this process. Those inside the
rejection test act on `TorchRejectionSampler`, a plain PyTorch stand-in for vLLM's kernels;
`torch` is the stand-in without a fault, which must pass. Those of trees act on the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from vllm_uno.draft_law import LawRows

RESIDUAL_OFF_BY_ONE = "residual-off-by-one"
RESIDUAL_IS_P = "residual-is-p"
BONUS_FROM_LAST_DRAFT_ROW = "bonus-from-last-draft-row"

_REJECTION_SAMPLE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample"
_DRAFT_ROWS = "vllm_uno.draft_sampling.sample_draft_rows"
_VERIFICATION = "vllm_uno.tree.verification"


class TorchRejectionSampler:
    """vLLM's `rejection_sample` (standard method, no watermark) over padded [requests, rows, V].

    Its random numbers come from a generator of its own, not from the requests' seeds: lossless as
    well, but no token equals vLLM's.
    """

    def __init__(self, seed: int = 0, sabotage: str | None = None) -> None:
        self.seed = seed
        self.sabotage = sabotage
        self._generator: torch.Generator | None = None

    def _exponential(self, like: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(like.device).manual_seed(self.seed)
        return torch.empty_like(like).exponential_(generator=self._generator)

    def __call__(
        self,
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: torch.Tensor | None = None,
        use_fp64: bool = False,
        use_block_verification: bool = False,
        **watermark: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's: target logits are processed, temperature and all; draft logits are not
        divided by it yet. Returns (sampled int64 [n, K + 1], num_sampled int32 [n])."""
        if synthetic_conditional_rates is not None or use_block_verification or watermark:
            raise NotImplementedError("only the standard method")
        device = target_logits.device
        steps = num_speculative_steps
        start = cu_num_logits[:-1].long()
        num_drafts = cu_num_logits[1:].long() - start - 1
        column = torch.arange(steps + 1, device=device)
        rows = start[:, None] + torch.minimum(column, num_drafts[:, None])
        request = idx_mapping.long()
        heat = temperature[request].double()[:, None, None]

        # [n, K + 1, V]; rows past a request's bonus row repeat it and are not used.
        logits = target_logits[rows].double()
        vocab_size = logits.shape[-1]
        greedy = torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).double()
        p = torch.where(heat == 0, greedy, logits.softmax(-1))

        drafts = torch.where(
            column[:steps] < num_drafts[:, None],
            draft_sampled[rows[:, 1:]].long(),
            torch.full_like(rows[:, 1:], -1),
        )
        valid = drafts >= 0  # vLLM marks placeholders -1: they are rejected, the token is p's
        one_hot = torch.nn.functional.one_hot(drafts.clamp(min=0), vocab_size).double()
        if draft_logits is None:
            q = one_hot
        else:
            stored = draft_logits[request, :, :vocab_size].double()
            # A slot's law is stale (or all -inf) where it did not draft; those rows are not valid.
            law = (stored / heat.clamp(min=1e-9)).softmax(-1).nan_to_num(0.0)
            q = torch.where(heat == 0, one_hot, law)

        chosen = drafts.clamp(min=0)[..., None]
        ratio = p[:, :steps].gather(-1, chosen)[..., 0] / q.gather(-1, chosen)[..., 0]
        # Exp(1) >= -log(ratio) has probability min(1, ratio).
        accept = valid & (self._exponential(ratio) >= -ratio.log())
        accepted = accept.long().cumprod(-1).sum(-1)

        # The rejected row's residual, or p itself at a placeholder and at the bonus row.
        picked = partial(_take_row, row=accepted)
        law = picked(p)
        q = torch.cat([q, q.new_zeros(len(q), 1, vocab_size)], dim=1)
        q = torch.where(torch.nn.functional.pad(valid, (0, 1))[..., None], q, 0.0)
        if self.sabotage == RESIDUAL_OFF_BY_ONE:
            below = _take_row(q, (accepted - 1).clamp(min=0))
            residual = (law - torch.where((accepted == num_drafts)[:, None], 0.0, below)).clamp(
                min=0
            )
        elif self.sabotage == RESIDUAL_IS_P:
            residual = law
        else:
            residual = (law - picked(q)).clamp(min=0)
        if self.sabotage == BONUS_FROM_LAST_DRAFT_ROW:
            last = _take_row(p, (num_drafts - 1).clamp(min=0))
            residual = torch.where((accepted == num_drafts)[:, None], last, residual)
        final = (residual / self._exponential(residual)).argmax(-1)

        sampled = torch.nn.functional.pad(drafts, (0, 1))
        sampled.scatter_(1, accepted[:, None], final[:, None])
        return sampled, (accepted + 1).int()


def _take_row(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """values[i, row[i]]: [n, rows, V] -> [n, V]."""
    return values[torch.arange(len(row), device=row.device), row]


@contextmanager
def _rejection_test(sabotage: str | None) -> Iterator[None]:
    with mock.patch(_REJECTION_SAMPLE, TorchRejectionSampler(seed=1, sabotage=sabotage)):
        yield


@contextmanager
def _draft_sampling(change: Callable[[LawRows], LawRows]) -> Iterator[None]:
    """Alter what our draft sampler draws by; a graph captured before does not see it."""
    from vllm_uno import draft_sampling

    original = draft_sampling.sample_draft_rows

    def altered(logits: torch.Tensor, rows: LawRows, *args: Any, **kwargs: Any) -> None:
        original(logits, change(rows), *args, **kwargs)

    with mock.patch(_DRAFT_ROWS, altered):
        yield


def _share_noise(rows: LawRows) -> LawRows:
    # vLLM adds 2^30 to a draft's position: the key of the verifier's own draw is left.
    return replace(rows, positions=rows.positions - 2**30)


def _ignore_temperature(rows: LawRows) -> LawRows:
    # What is cached stays: the test divides it by the temperature, the draw did not.
    return replace(rows, temperature=(rows.temperature > 0).float())


@contextmanager
def first_child_always_taken() -> Iterator[None]:
    """Trees: as if the token of each node's first child had been sampled there."""
    from vllm_uno.tree.walk import walk_trees

    def walk(*out: torch.Tensor, **given: Any) -> None:
        starts, slots = given["cu_num_logits"].long(), given["idx_mapping"].long()
        tokens, rows = given["target_tokens"].clone(), given["row_tokens"].long()
        parents = given["trees"].parents[slots].long()
        for node in reversed(range(parents.shape[1])):  # the first child comes last
            there = starts[1:] - starts[:-1] > node + 1
            first = starts[:-1][there]
            tokens[first + parents[there, node] + 1] = rows[first + node + 1]
        walk_trees(*out, **{**given, "target_tokens": tokens})

    with mock.patch(f"{_VERIFICATION}.walk_trees", walk):
        yield


@contextmanager
def _noise_positions(change: Callable[[Any], None]) -> Iterator[None]:
    """Trees: `change` alters the positions by which verify rows' noise is keyed."""
    from vllm_uno.tree.target_sampling import sample_target

    def sample(sampler: Any, logits: torch.Tensor, rows: Any) -> Any:
        change(rows)
        return sample_target(sampler, logits, rows)

    with mock.patch(f"{_VERIFICATION}.sample_target", sample):
        yield


def _depth_less_one(rows: Any) -> None:
    rows.positions.sub_((rows.local_pos > 0).long())


def _row(rows: Any) -> None:
    first = torch.arange(len(rows.local_pos), device=rows.local_pos.device) - rows.local_pos
    rows.positions.copy_(rows.positions[first] + rows.local_pos)


# Nodes' noise keyed by C + depth, not C + 1 + depth: the root's is the seed's row's.
noise_of_wrong_depth = partial(_noise_positions, _depth_less_one)
# Keyed by C + row; right in row 0 and first nodes. It changes tokens, but hardly their law given
# the tokens before: two that share noise are distant. (0.8 after 2,560 tokens, 16 nodes.)
noise_of_rows = partial(_noise_positions, _row)


LINEAR_SABOTAGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "noise-shared": partial(_draft_sampling, _share_noise),
    "draft-temperature-ignored": partial(_draft_sampling, _ignore_temperature),
    RESIDUAL_OFF_BY_ONE: partial(_rejection_test, RESIDUAL_OFF_BY_ONE),
    RESIDUAL_IS_P: partial(_rejection_test, RESIDUAL_IS_P),
    BONUS_FROM_LAST_DRAFT_ROW: partial(_rejection_test, BONUS_FROM_LAST_DRAFT_ROW),
}
TREE_SABOTAGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "first-child-always-taken": first_child_always_taken,
    "noise-of-wrong-depth": noise_of_wrong_depth,
}
SABOTAGES = LINEAR_SABOTAGES | TREE_SABOTAGES
# Not a fault: the stand-in itself.
STAND_IN: Callable[[], AbstractContextManager[None]] = partial(_rejection_test, None)
