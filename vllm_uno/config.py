"""The configuration of UNO speculative decoding.

This module is imported by unpickling in vLLM's child processes before any plugin is
loaded there, so it must be importable without a patch: at module level it imports
nothing but vLLM's configuration classes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger

logger = init_logger("vllm.uno")  # below vLLM's logger, which has the handlers

DEFAULT_BLOCK_SIZE = 8
# Kernels take the seed as one 32-bit integer.
_MAX_NOISE_SEED = 2**31 - 1

_BLOCK_REASON = (
    "rejection_sample_method='block' is not lossless over several cycles: it keys its "
    "random numbers by seed and position and uses those it has already examined again in "
    "the next cycle. Use rejection_sample_method='standard'."
)

# Why a setting of the parent class means nothing for UNO, by the name of the setting. A
# setting that is neither here nor in `UnoSpeculativeConfig.settings` gets `_NO_MEANING`.
_SAME_MODEL = "UNO drafts with the target model itself, there is no draft model"
_SAME_LAYERS = "UNO drafts with the target's own layers and KV cache; set it for the target"
_NO_MEANING = "it belongs to another speculative method"
_REFUSED = {
    "model": f"{_SAME_MODEL}. The adapter is given by uno_lora_path",
    "revision": "the adapter's revision is given by uno_lora_revision",
    "code_revision": _SAME_MODEL,
    "quantization": _SAME_MODEL,
    "max_model_len": _SAME_MODEL,
    "draft_load_config": _SAME_MODEL,
    "draft_tensor_parallel_size": f"{_SAME_MODEL}, it has the target's tensor parallel size",
    "tensor_parallel_size": f"{_SAME_MODEL}, it has the target's tensor parallel size",
    "enforce_eager": "UNO follows the target's --enforce-eager",
    "moe_backend": _SAME_LAYERS,
    "attention_backend": _SAME_LAYERS,
    "kv_cache_dtype": _SAME_LAYERS,
    "use_heterogeneous_vocab": _SAME_MODEL,
    "parallel_drafting": "UNO always drafts a whole block in one pass",
    "disable_padded_drafter_batch": "UNO's draft batches are uniform and always padded",
    "use_local_argmax_reduction": "UNO's verification needs the full draft logits",
    "num_speculative_tokens_per_batch_size": "UNO's block size is the same for every batch",
    "enable_adaptive_verification": "UNO has no confidence head",
}


@config
class UnoSpeculativeConfig(SpeculativeConfig):
    """`--speculative-config '{"method": "uno", ...}'`, checked and resolved.

    After construction `uno_lora_path`, `uno_lora_revision`, `uno_mask_token_id` and
    `uno_noise_low` hold what was *found* (see `vllm_uno.adapter_source`), so that workers
    need no search. Survives pickle, `copy` and `dataclasses.replace`.

    Raises:
        ValueError: (as pydantic's ValidationError) names the setting and the way out:
            unknown or senseless settings, values out of range, no adapter, no noise range.

    """

    method: Literal["uno"] = "uno"
    """Always "uno"."""
    num_speculative_tokens: int = DEFAULT_BLOCK_SIZE
    """Block size B >= 1: rows of the draft pass per request (the seed and B-1 noise rows),
    and so the tokens drafted per cycle."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """"probabilistic" samples drafts from the draft law and tests them against it; "greedy"
    proposes the most likely token. Both are lossless."""
    uno_lora_path: str | None = None
    """The UNO adapter: a local folder or a hub id, with an optional `:subfolder`. Without
    it: an `adapter/` folder beside the model, then the published adapter of the model."""
    uno_lora_revision: str | None = None
    """Branch, tag or commit of the adapter's hub repository."""
    uno_mask_token_id: int | None = None
    """Noise ids are drawn from [uno_noise_low, uno_mask_token_id). Only needed where neither
    the adapter's own metadata nor the table of published adapters has it."""
    uno_noise_low: int = 1
    """Lowest noise id."""
    uno_noise_seed: int = 0
    """Base seed of the noise, 0 to 2^31-1. Never changes the output law."""
    uno_draft_vocab: str | None = None
    """File of token ids (`.json` list, or `.pt` as SGLang's speculative token map): the draft
    head scores only these. Verification always uses the whole vocabulary. On every node."""

    # Redeclared without the parent's "ge=1": `__post_init__` sets them to 0 for the readers
    # in vLLM that compare them, and `dataclasses.replace` validates what it was set to.
    prompt_lookup_max: int | None = None
    """Always 0."""
    prompt_lookup_min: int | None = None
    """Always 0."""

    # What users may set. The two target_* configs are passed by the engine, not by users.
    settings: ClassVar[tuple[str, ...]] = (
        "method",
        "num_speculative_tokens",
        "uno_lora_path",
        "uno_lora_revision",
        "uno_mask_token_id",
        "uno_noise_low",
        "uno_noise_seed",
        "uno_draft_vocab",
        "draft_sample_method",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, values: Any) -> Any:
        # pydantic refuses unknown names too, but cannot say which ones there are.
        given = values.kwargs if isinstance(values, ArgsKwargs) else values
        if isinstance(given, dict):
            known = {f.name for f in dataclasses.fields(cls)}
            unknown = sorted(str(name) for name in given if name not in known)
            if unknown:
                raise ValueError(
                    f"unknown setting(s) in the speculative config of method 'uno': "
                    f"{', '.join(unknown)}. Settings are: {', '.join(cls.settings)}."
                )
            if given.get("rejection_sample_method") == "block":
                raise ValueError(_BLOCK_REASON)
        return values

    def __post_init__(self) -> None:
        # The parent's __post_init__ is not called: it insists on a draft model. Its
        # `_verify_args` still runs after this one (synthetic acceptance rates).
        self._refuse_senseless_settings()
        self.prompt_lookup_max = 0
        self.prompt_lookup_min = 0
        self.model = None
        self.draft_model_config = None
        self.draft_parallel_config = None

        block = self.num_speculative_tokens
        if block < 1:
            raise ValueError(
                f"num_speculative_tokens (UNO's block size B) must be at least 1, got {block}. "
                f"Leave it out for the default of {DEFAULT_BLOCK_SIZE}."
            )
        if not 0 <= self.uno_noise_seed <= _MAX_NOISE_SEED:
            raise ValueError(
                f"uno_noise_seed must be between 0 and {_MAX_NOISE_SEED}, "
                f"got {self.uno_noise_seed}."
            )
        if self.rejection_sample_method == "block":
            raise ValueError(_BLOCK_REASON)
        if self.rejection_sample_method == "synthetic":
            logger.warning_once(
                "rejection_sample_method='synthetic' accepts drafts by chance: the output is "
                "NOT lossless and makes no sense. It is for benchmarks only."
            )
        self._resolve_adapter()
        if self.uno_draft_vocab is not None:
            from vllm_uno.draft_vocab import read_draft_vocab

            read_draft_vocab(self.uno_draft_vocab, self.target_model_config.get_vocab_size())
            self.uno_draft_vocab = os.path.abspath(self.uno_draft_vocab)

    def _refuse_senseless_settings(self) -> None:
        kept = {*self.settings, "target_model_config", "target_parallel_config"}
        # What __post_init__ itself sets, seen again by dataclasses.replace.
        zeroed = {"prompt_lookup_max", "prompt_lookup_min"}
        for field in dataclasses.fields(self):
            name = field.name
            value = getattr(self, name)
            if name in kept or value == self._default_of(field):
                continue
            if name in zeroed and value == 0:
                continue
            raise ValueError(
                f"{name}={value!r} is refused for speculative method 'uno': "
                f"{_REFUSED.get(name, _NO_MEANING)}. Leave it out."
            )

    @staticmethod
    def _default_of(field: dataclasses.Field[Any]) -> Any:
        if isinstance(field.default, FieldInfo):  # as vLLM writes constrained fields
            return field.default.get_default(call_default_factory=True)
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return field.default

    def _resolve_adapter(self) -> None:
        from vllm_uno import adapter_source

        model_config = self.target_model_config
        if model_config is None:
            raise ValueError(
                "target_model_config is missing: UnoSpeculativeConfig is built by vLLM's "
                "EngineArgs.create_speculative_config from speculative_config={'method': 'uno'}."
            )
        model = model_config.model
        source = adapter_source.find_adapter(
            model, model_config.revision, self.uno_lora_path, self.uno_lora_revision
        )
        folder = adapter_source.fetch_adapter(source)
        low, high = adapter_source.noise_range(
            folder,
            model,
            self.uno_mask_token_id,
            self.uno_noise_low,
            model_config.get_vocab_size(),
            source=source,
        )
        source = adapter_source.pin(source, folder)
        self.uno_lora_path = str(source)
        self.uno_lora_revision = source.revision
        self.uno_noise_low, self.uno_mask_token_id = low, high

        trained = adapter_source.read_metadata(folder).block_sizes
        if trained and self.num_speculative_tokens > max(trained):
            logger.warning_once(
                "num_speculative_tokens=%d is more than the largest block size that the UNO "
                "adapter was trained with (%d): later positions will rarely be accepted.",
                self.num_speculative_tokens,
                max(trained),
            )

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """0: draft rows run in a pass of their own, not in the scheduler's token budget."""
        return 0

    def uses_draft_kv_cache(self) -> bool:
        """False: draft rows use the target's own KV cache."""
        return False

    def __repr__(self) -> str:
        return (
            f"UnoSpeculativeConfig(num_speculative_tokens={self.num_speculative_tokens}, "
            f"uno_lora_path={self.uno_lora_path!r}, "
            f"noise=[{self.uno_noise_low}, {self.uno_mask_token_id}), "
            f"draft_sample_method={self.draft_sample_method!r}, "
            f"rejection_sample_method={self.rejection_sample_method!r})"
        )
