"""A custom logits processor, as a user would hand one to vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    from vllm import SamplingParams


class Repeat(LogitsProcessor):
    """`extra_args={"repeat": x}`: x on the logit of the token just before, in every row."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.strength = torch.zeros(req_states.max_num_reqs, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        strength = (sampling_params.extra_args or {}).get("repeat", 0.0)
        self.strength[req_idx] = strength
        return bool(strength)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        rows = torch.arange(len(logits), device=logits.device)
        # Inert rows of a draft have no slot; what happens to them does not matter.
        slots = ctx.expanded_idx_mapping.long().clamp(min=0)
        # A drafted row's predecessor is a draft: right only in rows that are really verified.
        logits[rows, ctx.input_ids[: len(logits)].long()] += self.strength[slots]
        return logits
