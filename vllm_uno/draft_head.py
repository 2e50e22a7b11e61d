"""The reduced draft head: the draft view scores some tokens only (`uno_draft_vocab`).

A draft law may be anything: the rejection test is exact for every q, so a law over
fewer tokens costs acceptance, never correctness. Reading the head's rows of 32k
instead of 152k tokens is most of what a draft pass does outside its layers.

The kept rows of lm_head are gathered into a buffer of the view (`D x hidden / ranks`
elements more than the weights). Its logits processor is a copy that multiplies by it,
so the model's own scaling and soft caps stay. Tensor-parallel ranks each take an
equal share of the *kept* rows: frequent tokens have low ids, and so would nearly all
be in the first rank's shard of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_uno.draft_view import shallow_copy
from vllm_uno.reloads import ReloadWatch


class ReducedHead:
    """Logits of the draft vocabulary, as the draft view's root model makes them.

    Args:
        view: the draft view; its logits processor is replaced.
        target: the model whose weight reloads make the gathered rows stale.
        ids: int64 [D], ascending, of the model's vocabulary.
        vocab_size: V, columns of the full-width logits.
        hidden_size: H.
        dtype: of hidden states.
        device: of the weights.

    Raises:
        ValueError: a model whose head cannot be reduced, with the reason.
    """

    def __init__(
        self,
        view: nn.Module,
        target: nn.Module,
        ids: np.ndarray,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.view = view
        self.vocab_size = vocab_size
        self.first_id = int(ids[0])
        self.rows = _RowsOfHead(torch.from_numpy(ids).to(device))
        self._processor = _replace_logits_processor(view, self.rows)
        # The head that the model hands its logits processor is known once it has.
        probe = torch.zeros(1, hidden_size, dtype=dtype, device=device)
        # Not inference mode: waking from sleep writes into the gathered rows outside it.
        with torch.no_grad():
            logits = self.reduced(probe)
        if logits is None or logits.shape != (1, len(ids)):
            shape = None if logits is None else list(logits.shape)
            raise ValueError(
                f"uno_draft_vocab: the head of {type(view).__name__} cannot be reduced (its "
                f"compute_logits gives {shape} instead of [1, {len(ids)}]). Leave it out."
            )
        self.watch = ReloadWatch(target, lambda: self.rows.head.weight)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds beside the model: this rank's gathered rows, and the ids."""
        return tuple(self.rows.buffers())

    @property
    def ids(self) -> torch.Tensor:
        """int64 [D]."""
        return self.rows.ids

    def refresh(self) -> None:
        """Gather the rows again, in place, if the weights were reloaded; the host knows.

        Under tensor parallelism a collective: reloads happen on all ranks alike.
        """
        if self.watch.reloaded():
            self.rows.gather()

    def reduced(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, D], column i being token `ids[i]`."""
        compute_logits: Any = self.view.compute_logits
        logits: torch.Tensor = compute_logits(hidden_states)
        return logits

    def whole(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, V] of the head as it was, for the memory profile."""
        processor: Any = self._processor
        logits: torch.Tensor = processor(self.rows.head, hidden_states, self.rows._head_bias)
        return logits

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> int64 [rows], the likeliest token, of equals the lowest."""
        return self.ids[self.reduced(hidden_states).argmax(dim=-1)]

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, V], -inf outside the draft vocabulary."""
        logits = self.reduced(hidden_states)
        full = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return full.index_copy_(1, self.ids, logits)

    def revive(self, z: torch.Tensor) -> None:
        """Make rows of nothing but -inf one-hot, in place: z is [rows, V].

        Where a request's allowed tokens are all outside the draft vocabulary there is
        no draft law; any certain proposal will do (it will be rejected).
        """
        dead = z.amax(dim=-1) == float("-inf")
        z[:, self.first_id].masked_fill_(dead, 0.0)


class _RowsOfHead(nn.Module):
    """Stands in for lm_head in front of the view's logits processor.

    Attributes:
        ids: int64 [D], the kept rows. A buffer, as the rows are: sleep level 2 keeps buffers of
            the draft model and nothing else.
        weight: [ceil(D / ranks), H], this rank's share of the kept rows (the last
            rank's padded with zeros).
        bias: [ceil(D / ranks)], where the head has one.
        head: what the model itself hands its logits processor (not a child).
    """

    ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    head: Any
    _head_bias: Any

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)
        # Not registered: a view's parameters are the target's.
        self.__dict__["head"] = None
        self.__dict__["_head_bias"] = None

    def adopt(self, head: Any, bias: torch.Tensor | None) -> None:
        """Take over from `head` and gather its rows."""
        method = head.quant_method
        if not isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
            raise ValueError(
                f"uno_draft_vocab: this model's lm_head is quantised ({type(method).__name__}), "
                "and only the rows of a plain one can be gathered. Leave it out."
            )
        self.__dict__["head"] = head
        self.__dict__["_head_bias"] = bias
        self.__dict__["quant_method"] = method
        self.__dict__["tp_size"] = head.tp_size
        # vLLM's CPU method asks the layer for it (there: weights packed once and for all).
        self.__dict__["cpu_linear"] = F.linear
        share = -(-len(self.ids) // head.tp_size)
        # Where the allocator of weights is in use: sleep level 1 keeps them, level 2
        # saves buffers of the draft model.
        self.weight = head.weight.new_empty(share, head.weight.shape[1], requires_grad=False)
        self.bias = None if bias is None else bias.new_empty(share)
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the kept rows of the head as they are now."""
        self._share_out(self.head.weight, self.weight)
        if self.bias is not None:
            self._share_out(self._head_bias, self.bias)

    def _share_out(self, of_head: torch.Tensor, out: torch.Tensor) -> None:
        head = self.head
        if head.tp_size == 1:
            torch.index_select(of_head, 0, self.ids, out=out)
            return
        shard = head.shard_indices
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        share = out.shape[0]
        for rank in range(head.tp_size):
            ids = self.ids[rank * share : (rank + 1) * share]
            here = (ids >= start) & (ids < end)
            rows = out.new_zeros(out.shape)
            found = of_head[(ids - start).clamp(0, end - start - 1)]
            # Not a product: a weight beside it may be infinite.
            rows[: len(ids)] = torch.where(here.view(-1, *[1] * (found.dim() - 1)), found, 0)
            rows = tensor_model_parallel_all_reduce(rows)  # one rank's, the others' are 0
            if rank == head.tp_rank:
                out.copy_(rows)


class _ReducedLogits(nn.Module):
    """A logits processor that multiplies by the kept rows, whatever head it is handed."""

    def __init__(self, processor: LogitsProcessor, rows: _RowsOfHead) -> None:
        super().__init__()
        self.processor = processor
        self.rows = rows

    def forward(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if self.rows.head is None:
            self.rows.adopt(lm_head, embedding_bias)
        # The copy's `org_vocab_size` is D: it gathers the ranks' shares and cuts padding.
        logits: torch.Tensor | None = self.processor(self.rows, hidden_states, self.rows.bias)
        return logits


def _replace_logits_processor(view: nn.Module, rows: _RowsOfHead) -> LogitsProcessor:
    """Put the reduced processor into `view`; returns the one that was there."""
    found = [
        (parent, key, child)
        for parent in view.modules()
        for key, child in parent._modules.items()
        if isinstance(child, LogitsProcessor)
    ]
    if len(found) != 1 or not getattr(found[0][0], "_uno_copy", False):
        raise ValueError(
            f"uno_draft_vocab: {type(view).__name__} has {len(found)} logits processors that UNO "
            "can replace, where one is needed. Leave it out."
        )
    parent, key, processor = found[0]
    copied = shallow_copy(processor)
    copied.__dict__["org_vocab_size"] = len(rows.ids)
    parent._modules[key] = _ReducedLogits(copied, rows)
    return processor
