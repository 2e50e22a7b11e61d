"""`VllmConfig`: KV slots for the draft rows, async scheduling, graph sizes, checks."""

from __future__ import annotations

import functools
from typing import Any

from vllm_uno.graph_sizes import graph_sizes
from vllm_uno.vllm_hooks.hook import Hook


def _uno_config(vllm_config: Any) -> Any | None:
    spec = vllm_config.speculative_config
    return spec if spec is not None and spec.method == "uno" else None


def _num_lookahead_tokens(original: property) -> property:
    def num_lookahead_tokens(self: Any) -> int:
        spec = _uno_config(self)
        if spec is None:
            assert original.fget is not None
            return original.fget(self)
        # After a step that schedules K+1 tokens, C is at most K+1 further on
        # and the draft writes B rows from there (internals, section 2.5).
        # Verify rows are scheduled tokens: they have slots of their own.
        return spec.block_size

    return property(num_lookahead_tokens)


def _post_init(original: Any) -> Any:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = _uno_config(self)
        if spec is None:
            return original(self, *args, **kwargs)
        # 0.32 lists the methods that async scheduling admits; the V2 runner
        # itself needs no list. `draft_model` has no other reader in here.
        spec.__dict__["method"] = "draft_model"
        try:
            result = original(self, *args, **kwargs)
        finally:
            spec.__dict__["method"] = "uno"
        from vllm_uno.validation import validate

        validate(self)
        return result

    return __post_init__


def _set_cudagraph_sizes(original: Any) -> Any:
    @functools.wraps(original)
    def set_cudagraph_sizes(self: Any) -> None:
        compilation = self.compilation_config
        chosen_by_user = (
            compilation.cudagraph_capture_sizes is not None
            or compilation.max_cudagraph_capture_size is not None
        )
        compile_sizes = set(compilation.compile_sizes or ())
        original(self)
        # Not `_uno_config`: `__post_init__` above hides the method meanwhile.
        spec = self.speculative_config
        own = compilation.cudagraph_capture_sizes
        if chosen_by_user or not hasattr(spec, "uno_noise_seed") or not own:
            return
        sizes = graph_sizes(
            max(own),
            spec.block_size,
            spec.num_speculative_tokens + 1,
            self.scheduler_config.max_num_seqs,
            self.scheduler_config.max_num_batched_tokens,
            more=[n for n in own if n <= 32] if self.performance_mode == "interactivity" else (),
        )
        if spec.uses_dynamic_speculative_decoding():
            # Other widths need other sizes: vLLM's own, each for both kinds of graph.
            captured = mixed = sorted({*own, *sizes.all})
        else:
            captured, mixed = sizes.all, sizes.mixed
            spec.uno_graph_sizes = sizes
        compilation.cudagraph_capture_sizes = captured
        compilation.max_cudagraph_capture_size = captured[-1]
        if "cudagraph_capture_sizes" in compile_sizes:  # to the sizes that vLLM's own list had
            compilation.compile_sizes = sorted(
                compile_sizes - {"cudagraph_capture_sizes"} | {*mixed}
            )

    return set_cudagraph_sizes


HOOKS = (
    Hook(
        target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        parameters=None,
        reason="without lookahead slots draft rows would overwrite other blocks",
        removable="vLLM asks the speculative config for its lookahead",
        make=_num_lookahead_tokens,
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig.__post_init__",
        parameters=("self",),
        reason="0.32 admits async scheduling for listed methods only, and settings that UNO "
        "cannot serve must fail before workers start",
        removable="0.33 for the method list; the check moves to a config hook if vLLM has one",
        make=_post_init,
    ),
    Hook(
        target="vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
        parameters=("self",),
        reason="vLLM's default ceiling of 512 captured tokens covers 56 requests at B = 8",
        removable="vLLM covers max_num_seqs uniform decode batches by default",
        make=_set_cudagraph_sizes,
    ),
)
