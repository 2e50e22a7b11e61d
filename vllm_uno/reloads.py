"""Whether the target's weights were reloaded, told on the host, for what is derived from them.

Reloads write in place (`reload_weights` after a sleep of level 2, weight updates of a trainer):
what the draft view made of the weights, FP8 copies or gathered rows of lm_head, is then stale.
Output stays lossless; acceptance would fall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ReloadWatch:
    """Tells that weights were reloaded since it was last asked.

    Counted are calls of the model's `load_weights` (which may write through `.data`, as no version
    counter sees) and of `note`, by which vLLM's runner tells of every update that it knows of. A
    program that writes into weights by itself is seen where it writes into `weight`.

    Args:
        target: the model.
        weight: gives the weight to look at.
    """

    def __init__(self, target: nn.Module, weight: Callable[[], torch.Tensor]) -> None:
        self._weight = weight
        self._loads = 0
        load_weights: Any = getattr(target, "load_weights", None)
        if load_weights is not None:

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.note()
                return load_weights(*args, **kwargs)

            target.load_weights = counted  # type: ignore[assignment]
        self._seen = self._state()

    def note(self) -> None:
        """There was a reload."""
        self._loads += 1

    def reloaded(self) -> bool:
        """Whether there was a reload since the last call, or since this was made."""
        state = self._state()
        changed = state != self._seen
        self._seen = state
        return changed

    def _state(self) -> tuple[object, ...]:
        weight = self._weight()
        version = 0 if weight.is_inference() else weight._version
        return self._loads, id(weight), weight.data_ptr(), version
