"""`SamplingParams`: min_p and logit_bias work with UNO."""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook


def _validate_spec_decode(original: Any) -> Any:
    @functools.wraps(original)
    def validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is not None and speculative_config.method == "uno":
            return
        original(self, speculative_config)

    return validate_spec_decode


HOOKS = (
    Hook(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        parameters=("self", "speculative_config"),
        reason="vLLM refuses min_p and logit_bias for every speculative method; its V2 sampler "
        "applies both to every verify row, and our draft to every draft row",
        removable="vLLM asks the method",
        make=_validate_spec_decode,
    ),
)
