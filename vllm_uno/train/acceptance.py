"""Acceptance of an adapter without an engine: every cycle that decoding could go through.

Text that the model itself wrote at temperature T is law-wise the text UNO emits, so decoding can be
followed along it. A cycle with its seed at position c drafts tokens c+1 ... c+B. Row 0's law is
the model's own and its token always stands; given the text x, row i's token stands with
probability min(1, q_i(x) / p(x)), and the cycle ends at the first that does not, or with a bonus
token after all B. That moves the seed by n + 1 after n accepted tokens, so the expected number of
cycles that start at each position follows from the positions before it, and

    tau = emitted tokens / cycles,     acceptance of position k = share of cycles with n >= k

the same figures as the engine's counters (vllm_uno/metrics.py). At T = 0 a token stands where it
is the draft's best one. One doubled pass for each of the B block offsets gives the laws of blocks
at every seed. (Acceptance rule: arXiv 2211.17192, Theorem 1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_uno.train.blocks import UNUSED, block_seeds, draw_noise
from vllm_uno.train.data import PackedRows
from vllm_uno.train.losses import chunk_rows
from vllm_uno.train.model import NoisedModel


@dataclass(frozen=True)
class Acceptance:
    """Attributes:
    block_size: B.
    per_position: share of cycles in which at least the first k drafted tokens were accepted,
        k = 1 ... B (the first is always 1).
    cycles: expected number of cycles.
    """

    block_size: int
    per_position: tuple[float, ...]
    cycles: float

    @classmethod
    def of(cls, counts: torch.Tensor) -> Acceptance:
        """From what `count_cycles` returns."""
        cycles, *accepted = counts.tolist()
        # None where every text ends in its first cycle.
        shares = tuple(n / cycles if cycles else float("nan") for n in accepted)
        return cls(len(accepted), shares, cycles)

    @property
    def tau(self) -> float:
        """Tokens emitted per cycle, the bonus or replaced one included."""
        return 1.0 + sum(self.per_position)

    def line(self) -> str:
        shares = " ".join(f"{a:.3f}" for a in self.per_position)
        return f"B={self.block_size} tau={self.tau:.3f} acceptance: {shares}"


@torch.no_grad()
def stand_probabilities(
    model: NoisedModel,
    rows: PackedRows,
    block_size: int,
    noise_range: tuple[int, int],
    temperature: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Probability that a drafted token stands, for every seed and row.

    Args:
        model: with its adapter.
        rows: N rows of L tokens, on the model's device.
        block_size: B.
        noise_range: (low, high), of the noise ids.
        temperature: T >= 0 of the request that wrote the text.
        generator: on the CPU, of the noise.

    Returns:
        fp32 [N, L, B]: entry [n, c, i] is the probability that the token at c + 1 + i stands,
        when the cycle's seed is at c and all before it stood; 1 for i = 0, and 0 where that
        token is no trained one.

    """
    count, length = rows.ids.shape
    device = rows.ids.device
    stands = torch.zeros(count, length, block_size, device=device)
    stands[..., 0] = rows.trained.float()
    columns = torch.arange(length, device=device)
    for offset in range(block_size):
        offsets = torch.full_like(rows.positions, offset)
        seeds = block_seeds(rows.documents, rows.positions, offsets, block_size)
        noise = draw_noise((count, length), *noise_range, generator).to(device)
        clean, noised = model.hidden_states(rows, seeds, noise)
        used = (seeds != UNUSED) & rows.trained
        probability = _stands(
            noised[used],
            clean[used],
            model,
            rows.ids.roll(-1, dims=1)[used],
            temperature,
        )
        row = torch.arange(count, device=device).unsqueeze(1).expand(-1, length)[used]
        seed = seeds[used]
        stands[row, seed, columns.expand(count, -1)[used] - seed] = probability
    return stands


def _stands(
    draft: torch.Tensor,
    base: torch.Tensor,
    model: NoisedModel,
    tokens: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """min(1, q/p) of each row's token, or whether it is q's best one: fp32 [R]."""
    head = model.head
    step = chunk_rows(head.weight.shape[0])
    parts = []
    for start in range(0, tokens.shape[0], step):
        part = slice(start, start + step)
        q, p = (head(h[part].to(head.weight.dtype)).float() for h in (draft, base))
        if temperature == 0.0:
            parts.append((q.argmax(-1) == tokens[part]).float())
            continue
        at = tokens[part].unsqueeze(-1)
        log_q, log_p = ((x / temperature).log_softmax(-1).gather(-1, at) for x in (q, p))
        parts.append((log_q - log_p).clamp(max=0.0).exp().squeeze(-1))
    return torch.cat(parts) if parts else torch.zeros(0, device=draft.device)


def follow_cycles(
    stands: torch.Tensor, trained: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected cycles, and accepted tokens by position, along each row.

    Args:
        stands: [N, L, B], of `stand_probabilities`.
        trained: bool [N, L].
        starts: bool [N, L], where decoding begins: the first token that the model wrote in each
            document, which the prefill emitted.

    Returns:
        cycles [] and accepted [B], fp64; without the cycle in which a text ends, which the engine
        does not count either: what it drafts past the end says nothing.

    """
    stands, trained, starts = stands.double().cpu(), trained.cpu(), starts.cpu()
    count, length, block = stands.shape
    reach = stands.cumprod(-1)  # P(at least k accepted), k = 1 ... B
    exactly = reach.clone()
    exactly[..., :-1] -= reach[..., 1:]
    visits = torch.zeros(count, length + block + 1, dtype=torch.float64)
    visits[:, :length] = starts.double()
    # A cycle that runs past the end of one text starts nothing in the next.
    stretch = torch.zeros(count, length + block + 1, dtype=torch.int64)
    stretch[:, :length] = starts.cumsum(1)
    for column in range(length):
        here = visits[:, column] * trained[:, column]
        after = slice(column + 2, column + block + 2)
        inside = stretch[:, after] == stretch[:, column, None]
        visits[:, after] += here[:, None] * exactly[:, column] * inside
    left = torch.zeros(count, length + 1, dtype=torch.int64)  # tokens after each, of its text
    for column in reversed(range(length)):
        left[:, column] = torch.where(trained[:, column], left[:, column + 1] + 1, 0)
    # k accepted tokens and one more are written, and some are left.
    goes_on = left[:, :length, None] - 1 > torch.arange(1, block + 1)
    exactly = exactly * goes_on
    reach = exactly.flip(-1).cumsum(-1).flip(-1)
    visited = visits[:, :length, None]
    return (visited * exactly).sum(), (visited * reach).sum(dim=(0, 1))


def writing_starts(rows: PackedRows) -> torch.Tensor:
    """bool [N, L]: the first token of each stretch that the model wrote."""
    written = torch.zeros_like(rows.trained)
    written[:, 1:] = rows.trained[:, :-1]
    before = torch.zeros_like(written)
    before[:, 1:] = written[:, :-1]
    return written & ~before


def longest_block(rows: PackedRows) -> int:
    """The largest B of which some block lies wholly within what a model wrote."""
    longest, run = 0, torch.zeros(len(rows), dtype=torch.int64)
    for column in range(rows.trained.shape[1]):
        run = torch.where(rows.trained[:, column], run, -1) + 1
        longest = max(longest, int(run.max()))
    # The first token written is the prefill's, and the seed of the first block.
    return longest - 1


def count_cycles(
    model: NoisedModel,
    rows: PackedRows,
    block_size: int,
    noise_range: tuple[int, int],
    temperature: float,
    *,
    micro_batch: int,
    device: torch.device,
    seed: int = 0,
) -> torch.Tensor:
    """Expected cycles, and accepted tokens by position, along packed text: fp64 [1 + B].

    Args:
        model: with its adapter.
        rows: the text, written by the model at `temperature` (other text gives an approximation).
        block_size: B.
        noise_range: (low, high) of noise ids.
        temperature: T.
        micro_batch: rows of one pass.
        device: of the model.
        seed: of the noise.

    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(1 + block_size, dtype=torch.float64)
    for start in range(0, len(rows), micro_batch):
        part = rows.rows(torch.arange(start, min(start + micro_batch, len(rows))), device)
        stands = stand_probabilities(model, part, block_size, noise_range, temperature, generator)
        cycles, accepted = follow_cycles(stands, part.trained, writing_starts(part))
        total += torch.cat([cycles.view(1), accepted])
    return total


def measure(
    model: NoisedModel, rows: PackedRows, block_size: int, *args: Any, **kwargs: Any
) -> Acceptance:
    """Acceptance along packed text; arguments as of `count_cycles`.

    Raises:
        ValueError: no block fits into any of the text.

    """
    if longest_block(rows) < block_size:
        raise ValueError(
            f"no text is long enough for a block of {block_size}: its tokens must follow a seed"
        )
    return Acceptance.of(count_cycles(model, rows, block_size, *args, **kwargs))
