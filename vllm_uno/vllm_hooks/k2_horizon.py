"""K2-Horizon: the order in which vLLM keeps the rows of its q and k projections."""

from __future__ import annotations

import torch
from torch import nn


def folded_rope_rows(attention: nn.Module) -> tuple[int, torch.Tensor] | None:
    """The channel order that vLLM folds into q and k weights of this attention layer at load.

    Such a model's checkpoint interleaves rotary and other channels of each head; vLLM
    permutes the rows of the base weights so that its own partial RoPE applies. An
    adapter's B rows are in the checkpoint's order and need the same.

    Returns:
        (head_dim, int64 [head_dim] gather index), or None where nothing is permuted.

    """
    if not getattr(attention, "fold_rope_weights", False):
        return None
    head_dim = int(attention.head_dim)  # type: ignore[arg-type]
    rope_dim = int(attention.rope_head_dim)  # type: ignore[arg-type]
    if rope_dim == head_dim:
        return None
    from vllm.model_executor.models.k2_horizon import _rope_weight_perm

    return head_dim, _rope_weight_perm(head_dim, rope_dim)
