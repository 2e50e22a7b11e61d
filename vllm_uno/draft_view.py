"""The draft view: the target model's structure again, with a row-gated LoRA.

Every module on the path to a targeted linear layer is shallow-copied; all else
is shared: parameters, attention objects and with them the KV cache, norms,
embeddings, lm_head. So the verify pass runs the untouched target (its graphs,
fusions and numerics are those of a plain deployment), no weight exists twice,
and no KV group is added; yet the view has its own compiled code and graphs.

What must not be shared by the copies, and why, stands at each step below.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers.base import BaseLayerWithLoRA

import vllm_uno
from vllm_uno.adapter import LinearLora
from vllm_uno.draft_fp8 import Fp8Weights
from vllm_uno.lora_kernels import kernels_available
from vllm_uno.lora_linear import UnoLinearMethod
from vllm_uno.ops import extension_available


def view_digest(
    loras: Mapping[str, LinearLora], block_size: int, quantised: Sequence[str] = ()
) -> str:
    """Identity of the view's *code*: B, targets, slices and ranks, FP8 layers, plugin version.

    Two adapters of equal shape share compiled code, since weights are inputs of
    it; B is a constant in it.
    """
    fused = any(kernels_available(lora.a.device) for lora in loras.values())
    # What traced code calls differs with the extension; vLLM compares Python sources only.
    identity = hashlib.sha256(
        f"{vllm_uno.__version__} {block_size} {extension_available()} {fused} "
        f"{sorted(quantised)}".encode()
    )
    for name in sorted(loras):
        lora = loras[name]
        identity.update(
            f"{name} {tuple(lora.a.shape)} {lora.a.dtype} {lora.out_slices} "
            f"{lora.rank_slices}".encode()
        )
    return identity.hexdigest()[:16]


def build_draft_view(
    target: nn.Module,
    loras: Mapping[str, LinearLora],
    block_size: int,
    vllm_config: VllmConfig,
    fp8: Fp8Weights | None = None,
) -> nn.Module:
    """Clone `target`'s structure with a LoRA on each layer named in `loras`.

    Args:
        target: the loaded model, not changed.
        loras: by module name of `target.named_modules()`. Empty: a structural
            clone that computes what the target computes.
        block_size: B.
        vllm_config: the engine's; the view compiles under a copy of it.
        fp8: takes quantised weights for the layers named in `loras`; None: as the target's.

    Raises:
        ValueError: a name in `loras` is no module of the target.
    """
    modules = dict(target.named_modules())
    if missing := [name for name in loras if name not in modules]:
        raise ValueError(f"UNO adapter: no such module in the model: {', '.join(missing[:5])}")
    view = _clone(target, "", loras, block_size, fp8)
    tag = f"uno_draft_{view_digest(loras, block_size, fp8.names if fp8 else ())}"
    for module in view.modules():
        compiles = isinstance(module, TorchCompileWithNoGuardsWrapper) and not getattr(
            module, "do_not_compile", True
        )
        if compiles and getattr(module, "_uno_copy", False):
            _compile_again(module, tag, vllm_config)
    return view


def _clone(
    module: nn.Module,
    name: str,
    loras: Mapping[str, LinearLora],
    block_size: int,
    fp8: Fp8Weights | None,
) -> nn.Module:
    """Clone what holds a targeted layer, or a user-LoRA wrapper, below it."""
    if isinstance(module, BaseLayerWithLoRA):
        # A user's adapters must not act on drafts (their state is the verify
        # batch's): the view sees the wrapped layer itself.
        module = module.base_layer
    lora = loras.get(name)
    if lora is not None:
        copied = shallow_copy(module)
        quantised = fp8 is not None and fp8.quantise(name, copied, module)
        UnoLinearMethod.attach(copied, module, lora, block_size, quantised)
        return copied
    children = {
        key: _clone(child, f"{name}.{key}" if name else key, loras, block_size, fp8)
        for key, child in module._modules.items()
        if child is not None
    }
    changed = any(child is not module._modules[key] for key, child in children.items())
    # The root is always copied: `get_draft_model()` must not be the target.
    if not changed and name:
        return module
    copied = shallow_copy(module)
    copied._modules.update(children)
    return copied


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module that shares `module`'s parameters, children and buffers, but may change them."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    # `_parameters` stays the same dict: weights reloaded in place, or replaced
    # in it, are seen by both. Children and buffers differ.
    copied.__dict__["_modules"] = dict(module._modules)
    copied.__dict__["_buffers"] = dict(module._buffers)
    copied.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    # A bound method kept as an attribute would run the original, LoRA-less.
    for key, value in module.__dict__.items():
        if inspect.ismethod(value) and value.__self__ is module:
            copied.__dict__[key] = value.__func__.__get__(copied)
    copied.__dict__["_uno_copy"] = True
    return copied


def _compile_again(module: nn.Module, tag: str, vllm_config: VllmConfig) -> None:
    """Give a copied `@support_torch_compile` module its own compiled code and cache.

    vLLM's AOT cache key holds the config's hash and the forward's source, but
    not the tag; without it the cache folder is kept in `compilation_config`.
    Both are therefore the view's own, or target and view would read each
    other's artifacts (seen: a row gate of B=8 loaded for B=4).
    """
    config = copy.copy(vllm_config)
    config.additional_config = {**(_as_dict(vllm_config.additional_config)), "uno": tag}
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.traced_files = set()
    compilation.inductor_compile_config = dict(compilation.inductor_compile_config)
    compilation.cache_dir = ""
    compilation.local_cache_dir = None
    config.compilation_config = compilation
    for key in ("aot_compiled_fn", "_aot_compilation_path"):
        module.__dict__.pop(key, None)
    module.__dict__["was_aot_compile_fn_loaded_from_disk"] = False
    module.__dict__["_compile_tag"] = tag
    module.__dict__["compilation_config"] = compilation
    with set_current_vllm_config(config), set_model_tag(tag):
        TorchCompileWithNoGuardsWrapper.__init__(module)
    module.__dict__["vllm_config"] = config


def _as_dict(additional_config: Any) -> dict[str, Any]:
    if isinstance(additional_config, dict):
        return additional_config
    # A platform's own config object: its hash must still count.
    return {"base": additional_config.compute_hash()}


def check_every_lora_runs(view: nn.Module, run_uncompiled: Callable[[], object]) -> None:
    """Raise unless one forward calls every targeted layer of the view.

    Some modules keep direct references to layers, or look them up by name at run
    time; their LoRA would silently never run. A compiled forward cannot tell (on
    a warm start nothing is traced), so `run_uncompiled` must bypass it.

    Raises:
        RuntimeError: names the layers that did not run.
    """
    methods = {
        name: module.quant_method
        for name, module in view.named_modules()
        if isinstance(getattr(module, "quant_method", None), UnoLinearMethod)
    }
    for method in methods.values():
        method.calls = 0
    try:
        run_uncompiled()
        silent = [name for name, method in methods.items() if not method.calls]
    finally:
        for method in methods.values():
            method.calls = None
    if silent:
        raise RuntimeError(
            f"UNO: {len(silent)} of {len(methods)} adapter layers never run in the draft pass "
            f"of this model ({', '.join(silent[:5])}): the model calls them in a way that the "
            "draft view cannot follow. Use an adapter that does not target them."
        )
