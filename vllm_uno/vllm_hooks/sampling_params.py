"""`SamplingParams`: min_p and logit_bias work with UNO, logprob_token_ids do not."""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.vllm_hooks.hook import Hook


def _validate_spec_decode(original: Any) -> Any:
    @functools.wraps(original)
    def validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is not None and speculative_config.method == "uno":
            if self.logprob_token_ids is not None:
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(
                    "logprob_token_ids is not supported with speculative method 'uno': vLLM's "
                    "rejection sampler returns the most likely tokens' logprobs only. Ask for "
                    "logprobs, or serve the request without speculation.",
                    parameter="logprob_token_ids",
                )
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
