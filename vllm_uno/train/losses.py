"""Distillation losses over the whole vocabulary, without a copy of all logits.

Between the law q of a noised row and the law p of the frozen model at the same position:

    TV = 1/2 sum_v |q_v - p_v|      one minus the probability that a drafted token is accepted
    KL = sum_v p_v log(p_v / q_v)
    CE = -log q_target

Rows go in chunks: a chunk's logits, laws and gradient live at a time, and what is kept is one
gradient the size of the hidden states. (TV as the loss: arXiv 2609.04010, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LossWeights:
    """Loss = tv * TV + ce * CE + kl * KL."""

    tv: float = 1.0
    ce: float = 0.0
    kl: float = 0.0


# 64 MiB of fp32 logits a chunk, of which some six are alive at once.
_CHUNK_ELEMENTS = 1 << 24


def chunk_rows(vocab_size: int) -> int:
    """Rows of one chunk."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: LossWeights,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = student.shape[0]
        gradient = torch.empty_like(student) if student.requires_grad else None
        sums = torch.zeros(3, dtype=torch.float32, device=student.device)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            log_q = F.linear(student[part], head, bias).float().log_softmax(-1)
            log_p = F.linear(teacher[part], head, bias).float().log_softmax(-1)
            q, p = log_q.exp(), log_p.exp()
            at = targets[part].unsqueeze(-1)
            sums[0] += (q - p).abs().sum() / 2
            sums[1] -= log_q.gather(-1, at).sum()
            sums[2] += (p * (log_p - log_q)).sum()
            if gradient is None:
                continue
            # By the logits: TV gives q (s - <s>_q) with s = sign(q - p) / 2; KL gives q - p;
            # CE gives q minus one at the target.
            sign = (q - p).sign() / 2
            by_logits = weights.tv * q * (sign - (sign * q).sum(-1, keepdim=True))
            if weights.kl:
                by_logits += weights.kl * (q - p)
            if weights.ce:
                by_logits += weights.ce * q
                by_logits.scatter_add_(-1, at, torch.full_like(at, -weights.ce, dtype=q.dtype))
            gradient[part] = by_logits.to(head.dtype) @ head
        means = sums / max(1, rows)
        loss = means @ torch.tensor(
            [weights.tv, weights.ce, weights.kl], dtype=torch.float32, device=student.device
        )
        if gradient is not None:
            gradient /= max(1, rows)
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(means)
        return loss, means

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * outputs[0].to(gradient.dtype), *(None,) * 6)


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    weights: LossWeights,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over rows, differentiable by `student` alone.

    Args:
        student: [R, H], hidden states of noised rows, after the final norm.
        teacher: [R, H], of the clean rows at the same positions.
        head: [V, H], weight of the output head.
        bias: [V] or None.
        targets: int64 [R], the tokens that follow.
        weights: of the three losses.
        chunk: rows at a time.

    Returns:
        The loss, fp32 []; means of TV, CE and KL for the log, fp32 [3], without gradient.

    """
    # Autocast would run the products in another dtype than the gradient's below.
    with torch.autocast(student.device.type, enabled=False):
        loss, means = _Distillation.apply(
            student.to(head.dtype),
            teacher.detach().to(head.dtype),
            head.detach(),
            bias,
            targets,
            weights,
            chunk or chunk_rows(head.shape[0]),
        )
    return loss, means
