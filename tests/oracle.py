"""What the draft pass must compute, by transformers and PEFT: the reference for draft logits.

Row 0 of a draft block is the seed (the last emitted token), rows 1 .. B-1 are noise tokens. The
LoRA acts on the noise rows only, in every layer; context and seed rows are base rows, so noise
rows attend to base keys and values there and to adapted ones among themselves.

    logits = draft_logits_reference(model_folder, adapter_folder, context_ids, [seed, *noise])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM


class DraftOracle:
    """One loaded model with, if `adapter_folder` is given, its LoRA; any number of blocks.

    With `fp8` the LoRA's layers multiply draft rows by weights and inputs in FP8, a scale a row:
    what `uno_draft_quantization` stands for.
    """

    def __init__(
        self,
        model_folder: str | Path,
        adapter_folder: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            str(model_folder), dtype=dtype, attn_implementation="eager"
        )
        self._model: Any = base
        # [1, T, 1] bool, true where the LoRA acts; set anew for each forward.
        self._adapted = torch.zeros(1, 0, 1, dtype=torch.bool)
        if adapter_folder is not None:
            self._model = PeftModel.from_pretrained(base, str(adapter_folder))
            layers = [m for m in self._model.modules() if isinstance(m, LoraLayer)]
            if not layers:
                raise ValueError(f"{adapter_folder} put no LoRA on any layer of {model_folder}")
            for layer in layers:
                layer.register_forward_hook(self._gate)  # type: ignore[attr-defined]
        # As `_adapted`, where FP8 products stand for the base layer's.
        self._quantised = torch.zeros(1, 0, 1, dtype=torch.bool)
        self._fp8 = fp8
        self._model.eval()

    def _gate(
        self, layer: LoraLayer, args: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> torch.Tensor:
        """Keeps PEFT's own output (its scale, ranks, rsLoRA) on adapted rows, base elsewhere."""
        linear = layer.get_base_layer()
        base = linear(args[0])
        if not self._fp8:
            return torch.where(self._adapted, out, base)
        assert linear.bias is None
        coarse = _through_fp8(args[0]) @ _through_fp8(linear.weight).t()
        added = torch.where(self._adapted, out - base, torch.zeros_like(out))
        return torch.where(self._quantised, coarse, base) + added

    @torch.no_grad()
    def draft_logits(
        self,
        context_ids: Sequence[int],
        block_ids: Sequence[int],
        unseen: range = range(0),
    ) -> torch.Tensor:
        """[B, V]: row i is the law of the token after block_ids[i].

        `context_ids` [C] are the tokens before the seed, at positions 0 .. C-1; `block_ids` [B]
        is the seed, at position C, and the noise ids. The block's rows do not attend to the
        positions `unseen`; those of the context see everything before them.
        """
        ids = torch.tensor([[*context_ids, *block_ids]])
        first, length = len(context_ids), ids.shape[1]
        self._adapted = (torch.arange(length) > first).view(1, -1, 1)
        self._quantised = (torch.arange(length) >= first).view(1, -1, 1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        mask[first:, unseen.start : unseen.stop] = float("-inf")
        out = self._model(input_ids=ids, attention_mask=mask[None, None], use_cache=False)
        return out.logits[0, first:]

    @torch.no_grad()
    def plain_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: the base model's logits over `ids` [T], teacher-forced."""
        tokens = torch.tensor([list(ids)])
        self._adapted = self._quantised = torch.zeros(1, tokens.shape[1], 1, dtype=torch.bool)
        return self._model(input_ids=tokens, use_cache=False).logits[0]


def _through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rows of x as FP8 E4M3 holds them, with a scale a row."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def draft_logits_reference(
    model_folder: str | Path,
    adapter_folder: str | Path | None,
    context_ids: Sequence[int],
    block_ids: Sequence[int],
) -> torch.Tensor:
    """[B, V] fp32 draft logits of one block: see `DraftOracle.draft_logits`."""
    return DraftOracle(model_folder, adapter_folder).draft_logits(context_ids, block_ids)
