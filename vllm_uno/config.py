"""The configuration of UNO speculative decoding.

This module is imported by unpickling in vLLM's child processes before any plugin is
loaded there, so it must be importable without a patch: at module level it imports
nothing but vLLM's configuration classes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger

logger = init_logger("vllm.uno")  # below vLLM's logger, which has the handlers

DEFAULT_BLOCK_SIZE = 8
DEFAULT_TREE = (16, 32, 32)  # B, K, V

# Tree mode: nodes are bits of two words, and V * K candidates at most are ranked.
MAX_TREE_NODES = 128
MAX_TREE_TOP_K = 128
MAX_TREE_CANDIDATES = 4096
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
    "enable_adaptive_verification": "UNO has no confidence head",
}


def mode_of(settings: Mapping[str, Any]) -> Literal["linear", "tree"]:
    """The mode that given settings, absent or None where they were left out, ask for."""
    mode: Literal["linear", "tree"] | None = settings.get("uno_mode")
    if mode is None:
        mode = "tree" if (settings.get("uno_tree_top_k") or 1) > 1 else "linear"
    return mode


def sizes_of(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """B, K and V of given settings, unchecked, with their defaults; linear mode: B, 1 and B."""

    def given(name: str, default: int) -> int:
        value = settings.get(name)
        return default if value is None else value

    if mode_of(settings) == "tree":
        block, top_k, nodes = DEFAULT_TREE
        return (
            given("uno_block_size", block),
            given("uno_tree_top_k", top_k),
            given("num_speculative_tokens", nodes),
        )
    block = given("uno_block_size", given("num_speculative_tokens", DEFAULT_BLOCK_SIZE))
    return block, given("uno_tree_top_k", 1), given("num_speculative_tokens", block)


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
    num_speculative_tokens: int = Field(default=cast(Any, None))  # resolved
    """Tokens verified per request and cycle. Linear mode: the block size B >= 1 (default 8).
    Tree mode: nodes of the tree V, 2 to 128 (default 32)."""
    uno_mode: Literal["linear", "tree"] = Field(default=cast(Any, None))  # resolved
    """"linear" drafts a chain and tests it by rejection sampling; "tree" drafts a tree of the
    positions' best tokens and follows the target's own samples through it. "linear" unless
    `uno_tree_top_k` is more than 1."""
    uno_block_size: int | None = None
    """Block size B: rows of the draft pass per request (the seed and B-1 noise rows). Linear
    mode: num_speculative_tokens is the setting, None afterwards. Tree mode: at least 2 (default
    16), the levels of the tree. Read `block_size`."""
    uno_tree_top_k: int = Field(default=cast(Any, None))  # resolved
    """Tree mode: candidates per position K, 1 to 128 (default 32). Linear mode: 1."""
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default=cast(Any, None)
    )  # resolved
    """Linear mode: "probabilistic" (default) samples drafts from the draft law and tests them
    against it; "greedy" proposes the most likely token. Both are lossless. Tree mode keeps no
    draft law: always "greedy"."""
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

    uno_draft_quantization: Literal["fp8"] | None = None
    """"fp8": the draft pass reads FP8 copies of the weights of the layers that the adapter targets
    (half their bytes more memory). Drafts are accepted a little less often; never changes the
    output law. On GPUs of compute capability 8.9 and newer, in bfloat16 or float16."""

    uno_draft_context: int | None = None
    """The draft pass attends to the first KV block and at least this many tokens before the seed,
    verification to everything. For many requests with long contexts, whose draft passes spend most
    of their time reading the KV cache. Drafts are accepted less often where they depend on what was
    left out; never changes the output law. Models that attend to the whole context alone."""

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
        "num_speculative_tokens_per_batch_size",
        "uno_mode",
        "uno_block_size",
        "uno_tree_top_k",
        "uno_lora_path",
        "uno_lora_revision",
        "uno_mask_token_id",
        "uno_noise_low",
        "uno_noise_seed",
        "uno_draft_vocab",
        "uno_draft_quantization",
        "uno_draft_context",
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

        self._resolve_mode()
        if not 0 <= self.uno_noise_seed <= _MAX_NOISE_SEED:
            raise ValueError(
                f"uno_noise_seed must be between 0 and {_MAX_NOISE_SEED}, "
                f"got {self.uno_noise_seed}."
            )
        if self.uno_draft_context is not None and self.uno_draft_context < 1:
            raise ValueError(
                f"uno_draft_context must be at least 1 token, got {self.uno_draft_context}. Leave "
                "it out for the whole context."
            )
        if self.rejection_sample_method == "block":
            raise ValueError(_BLOCK_REASON)
        if self.rejection_sample_method == "synthetic":
            logger.warning_once(
                "rejection_sample_method='synthetic' accepts drafts by chance: the output is "
                "NOT lossless and makes no sense. It is for benchmarks only."
            )
        self._resolve_adapter()
        if self.uno_mode == "tree":
            self._check_vocabulary()
        if self.uno_draft_vocab is not None:
            from vllm_uno.draft_vocab import read_draft_vocab

            read_draft_vocab(self.uno_draft_vocab, self.target_model_config.get_vocab_size())
            self.uno_draft_vocab = os.path.abspath(self.uno_draft_vocab)

    def _resolve_mode(self) -> None:
        """Fill in mode, B, K, V and the draft's sampling; check them."""
        given = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "uno_mode": self.uno_mode,
            "uno_block_size": self.uno_block_size,
            "uno_tree_top_k": self.uno_tree_top_k,
        }
        self.uno_mode = mode_of(given)
        block, self.uno_tree_top_k, self.num_speculative_tokens = sizes_of(given)
        if self.uno_mode == "linear":
            self._check_linear(block)
            self.uno_block_size = None
            if self.draft_sample_method is None:
                self.draft_sample_method = "probabilistic"
            return
        self.uno_block_size = block
        self._check_tree(block)
        if self.draft_sample_method == "probabilistic":
            raise ValueError(
                "draft_sample_method='probabilistic' is refused with uno_mode 'tree': a tree is "
                "followed by the target's own samples, no draft law is kept or tested. Leave it "
                "out."
            )
        self.draft_sample_method = "greedy"
        if self.uno_draft_vocab is not None:
            raise ValueError(
                "uno_draft_vocab is refused with uno_mode 'tree': the clean token and the "
                "candidates are taken from laws over the whole vocabulary. Leave it out."
            )

    def _check_linear(self, block: int) -> None:
        drafted = self.num_speculative_tokens
        if drafted < 1:
            raise ValueError(
                f"num_speculative_tokens (UNO's block size B) must be at least 1, got {drafted}. "
                f"Leave it out for the default of {DEFAULT_BLOCK_SIZE}."
            )
        if block != drafted:
            raise ValueError(
                f"uno_block_size={block} with num_speculative_tokens={drafted}: in linear mode "
                "they are the same. Leave one out, or set uno_mode to 'tree'."
            )
        self._check_schedule()
        if self.uno_tree_top_k != 1:
            raise ValueError(
                f"uno_tree_top_k={self.uno_tree_top_k} with uno_mode 'linear': leave one of the "
                "two out."
            )

    def _check_schedule(self) -> None:
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is None:
            return
        from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

        try:  # here, in the front end, and not in the scheduler's process
            ranges = validate_and_normalize_dynamic_sd_schedule(list(schedule))
        except ValueError as error:
            raise ValueError(f"num_speculative_tokens_per_batch_size: {error}") from error
        widest = max(width for _, _, width in ranges)
        if widest > self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens_per_batch_size asks for {widest} drafts, "
                f"num_speculative_tokens (UNO's block size B) is {self.num_speculative_tokens}: "
                "raise it, or lower the schedule."
            )

    def _check_tree(self, block: int) -> None:
        if self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "num_speculative_tokens_per_batch_size is refused with uno_mode 'tree': every "
                "tree has the same number of nodes. Leave it out, or set uno_mode to 'linear'."
            )
        top_k, nodes = self.uno_tree_top_k, self.num_speculative_tokens
        found = f"got {nodes} nodes of {top_k} candidates a position, block size {block}"
        if not 2 <= nodes <= MAX_TREE_NODES:
            raise ValueError(
                f"num_speculative_tokens (the tree's nodes V) must be 2 to {MAX_TREE_NODES} in "
                f"tree mode: below, there is no tree, and ancestors are kept as "
                f"{MAX_TREE_NODES} bits; {found}."
            )
        if block < 2:
            raise ValueError(
                f"uno_block_size (B) must be at least 2 in tree mode: the first row gives the "
                f"root alone; {found}."
            )
        if not 1 <= top_k <= MAX_TREE_TOP_K:
            raise ValueError(
                f"uno_tree_top_k (candidates a position K) must be 1 to {MAX_TREE_TOP_K}, which "
                f"is what its kernel selects; {found}."
            )
        if nodes * top_k > MAX_TREE_CANDIDATES:
            raise ValueError(
                f"num_speculative_tokens * uno_tree_top_k (V * K) must be at most "
                f"{MAX_TREE_CANDIDATES}: more candidates are never worth their time; {found}. "
                f"Lower uno_tree_top_k to at most {MAX_TREE_CANDIDATES // nodes}."
            )
        room = sum(top_k**depth for depth in range(min(block, nodes)))
        if room < nodes:
            raise ValueError(
                f"a tree of num_speculative_tokens={nodes} nodes cannot be filled: uno_block_size "
                f"{block} and uno_tree_top_k {top_k} give {room} nodes. Raise one of the two or "
                "lower num_speculative_tokens."
            )

    def _check_vocabulary(self) -> None:
        vocab_size = self.target_model_config.get_vocab_size()
        if self.uno_tree_top_k > vocab_size:
            raise ValueError(
                f"uno_tree_top_k={self.uno_tree_top_k} candidates of a vocabulary of {vocab_size} "
                "tokens: lower it."
            )

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
        if trained and self.block_size > max(trained):
            logger.warning_once(
                "%s=%d is more than the largest block size that the UNO "
                "adapter was trained with (%d): later positions will rarely be accepted.",
                "uno_block_size" if self.uno_mode == "tree" else "num_speculative_tokens",
                self.block_size,
                max(trained),
            )

    @property
    def block_size(self) -> int:
        """B, rows of the draft pass per request."""
        block = self.uno_block_size
        return self.num_speculative_tokens if block is None else block

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """0: draft rows run in a pass of their own, not in the scheduler's token budget."""
        return 0

    def uses_draft_kv_cache(self) -> bool:
        """False: draft rows use the target's own KV cache."""
        return False

    def __repr__(self) -> str:
        tree = (
            f"uno_mode='tree', uno_block_size={self.block_size}, "
            f"uno_tree_top_k={self.uno_tree_top_k}, "
            if self.uno_mode == "tree"
            else ""
        )
        return (
            f"UnoSpeculativeConfig({tree}num_speculative_tokens={self.num_speculative_tokens}, "
            f"uno_lora_path={self.uno_lora_path!r}, "
            f"noise=[{self.uno_noise_low}, {self.uno_mask_token_id}), "
            f"draft_sample_method={self.draft_sample_method!r}, "
            f"rejection_sample_method={self.rejection_sample_method!r})"
        )
