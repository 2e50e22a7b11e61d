"""From a PEFT LoRA folder to the weights that each linear layer of a vLLM model needs.

Nothing is dropped silently: every tensor of the adapter lands on a layer of this rank's
model, or loading fails. (Lossless output hides a LoRA that is only half there.)
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import nn
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.utils import get_packed_modules_mapping

from vllm_uno.adapter_source import CONFIG_FILE, WEIGHTS_FILE
from vllm_uno.vllm_hooks.k2_horizon import folded_rope_rows

_KNOWN = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
_SHOWN = 5  # names in an error message


@dataclasses.dataclass(frozen=True, eq=False)
class LinearLora:
    """LoRA of one linear layer on this tensor-parallel rank.

    The layer's output gets, for every slice i and only on noise rows,
    `out[:, out_slices[i]] += (x @ a.T)[:, rank_slices[i]] @ b[i].T`, before the all-reduce
    of a row-parallel layer.

    Attributes:
        a: [R, in_local], the A's of all slices one below the other.
        b: [out_i_local, r_i] each, with the LoRA scale folded in.
        out_slices: (start, stop) in the layer's local output columns, ascending.
        rank_slices: (start, stop) in the R rows of `a`.
        out_features: local output columns of the whole layer.

    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    out_slices: tuple[tuple[int, int], ...]
    rank_slices: tuple[tuple[int, int], ...]
    out_features: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """One of the layers packed into a layer: `full` output columns, of which this rank holds
    `local`, from the `start`-th one on, at `offset` in its own output."""

    full: int
    local: int
    start: int
    offset: int


@dataclasses.dataclass(frozen=True)
class _Target:
    """What an adapter's module name means: a layer, and the slot of a packed layer."""

    layer_name: str
    layer: LinearBase
    slot: int | None  # None: the whole layer


def load_adapter(
    folder: str | Path,
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, LinearLora]:
    """Read a PEFT LoRA folder for this rank of `model`.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors.
        model: a loaded vLLM model; the user's `*WithLoRA` wrappers are looked through.
        dtype: of the returned weights. The scale is folded into B in fp32 before the cast.
        device: of the returned weights.

    Returns:
        By module name (of `model.named_modules()`; for a wrapped layer the wrapper's name).

    Raises:
        ValueError: names `uno_lora_path` and the reason: an unsupported kind of adapter or
            target, tensors without a layer or without their counterpart, another model's
            shapes.

    """
    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"uno_lora_path: {folder} has no {name}.")
    peft = _read_config(folder)
    with safe_open(str(folder / WEIGHTS_FILE), framework="pt", device="cpu") as tensors:
        keys = sorted(tensors.keys())
        if not keys:
            raise ValueError(f"uno_lora_path: {folder / WEIGHTS_FILE} holds no tensors.")
        _refuse_unsupported_keys(folder, keys)
        modules, peft_names = _pair_keys(folder, keys, model)
        targets = _find_targets(folder, modules, model)

        by_layer: dict[str, list[str]] = {}
        for name, target in targets.items():
            by_layer.setdefault(target.layer_name, []).append(name)

        get_tensor = _in_vllms_row_order(modules, model, tensors.get_tensor)
        loras = {}
        for layer_name, names in by_layer.items():
            names.sort(key=lambda name: targets[name].slot or 0)
            slices = []
            for name in names:
                rank, scale = peft.get_rank_and_scaling(peft_names[name])
                a, b, parts = _slice(folder, targets[name], modules[name], get_tensor, rank)
                # Moved first: a GPU casts and scales an 8B model's adapter in no time.
                b = (b.to(device).to(torch.float32) * scale).to(dtype).contiguous()
                slices.append((a.to(device).to(dtype), b, parts))
            loras[layer_name] = _join(targets[names[0]].layer, slices)
    return loras


def _read_config(folder: Path) -> PEFTHelper:
    """Read adapter_config.json; refuse what is no plain LoRA."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"uno_lora_path: {folder / CONFIG_FILE} is not JSON: {error}") from error
    reasons = []
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        reasons.append(f"its peft_type is {kind}, only LORA is supported")
    if config.get("use_dora"):
        reasons.append("it uses DoRA (use_dora), whose scale depends on the base weights")
    if config.get("bias", "none") != "none":
        reasons.append(f"it trains biases (bias={config['bias']!r}); only bias='none' is supported")
    if config.get("modules_to_save"):
        reasons.append(
            f"it replaces whole modules (modules_to_save={config['modules_to_save']}); UNO "
            f"drafts with the base model's modules"
        )
    if config.get("trainable_token_indices"):
        reasons.append("it trains token embeddings (trainable_token_indices)")
    if config.get("target_parameters"):
        reasons.append(
            f"it targets parameters (target_parameters={config['target_parameters']}), as of "
            f"MoE experts; only linear layers are supported"
        )
    if not reasons:
        try:
            peft = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
            # Only the rank limit is read from vLLM's LoRA settings; UNO has none.
            highest = max([peft.r, *peft.rank_pattern.values()])
            limits = types.SimpleNamespace(max_lora_rank=highest)
            peft.validate_legal(cast(LoRAConfig, limits))
            return peft
        except (ValueError, TypeError) as error:
            reasons.append(str(error))
    raise ValueError(
        f"uno_lora_path: the adapter in {folder} is not supported: {'; '.join(reasons)}."
    )


def _refuse_unsupported_keys(folder: Path, keys: Iterable[str]) -> None:
    """Refuse targets that would need more than a linear layer's LoRA, with the reason."""
    found: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        if "lora_magnitude_vector" in key:
            reason = "DoRA is not supported"
        elif key.endswith((".lora_A.bias", ".lora_B.bias")):
            reason = "LoRA biases (lora_bias) are not supported"
        elif (
            "lm_head" in parts
            or "embed_tokens" in parts
            or parts[-1] in ("lora_embedding_A", "lora_embedding_B")
        ):
            reason = (
                "lm_head and embeddings cannot be targets: the draft and verify rows share them"
            )
        elif "experts" in parts:
            reason = "MoE experts cannot be targets"
        elif "kv_b_proj" in parts:
            reason = "MLA's kv_b_proj cannot be a target: its weights are absorbed at run time"
        else:
            continue
        found.setdefault(reason, []).append(key)
    if found:
        reasons = "; ".join(f"{reason} ({_show(names)})" for reason, names in found.items())
        raise ValueError(f"uno_lora_path: the adapter in {folder} is not supported: {reasons}.")


def _pair_keys(
    folder: Path, keys: Iterable[str], model: nn.Module
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Sort tensor names into (A, B) pairs.

    Returns:
        By module name in vLLM's naming: the names of A and B, and the module's name in the
        adapter, which rank_pattern and alpha_pattern refer to.

    """
    # Only renames: stacking would merge q, k and v into one name.
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = mapper.get_rename_mapper()
    pairs: dict[str, dict[bool, str]] = {}
    peft_names = {}
    unknown = []
    for key in keys:
        try:
            name, is_a = parse_fine_tuned_lora_name(key, mapper)
            peft_name, _ = parse_fine_tuned_lora_name(key)
        except ValueError:
            unknown.append(key)
            continue
        if not key.endswith((".lora_A.weight", ".lora_B.weight")) or is_a in pairs.get(name, {}):
            unknown.append(key)
            continue
        pairs.setdefault(name, {})[is_a] = key
        peft_names[name] = peft_name
    if unknown:
        raise ValueError(
            f"uno_lora_path: the adapter in {folder} has tensors that are no LoRA weights "
            f"(lora_A.weight, lora_B.weight) or come twice: {_show(unknown)}."
        )
    single = [next(iter(pair.values())) for pair in pairs.values() if len(pair) == 1]
    if single:
        raise ValueError(
            f"uno_lora_path: the adapter in {folder} is incomplete, lora_A or lora_B is "
            f"missing beside: {_show(single)}."
        )
    return {name: (pair[True], pair[False]) for name, pair in pairs.items()}, peft_names


def _find_targets(
    folder: Path, names: Mapping[str, tuple[str, str]], model: nn.Module
) -> dict[str, _Target]:
    """Find the layer that each module name of the adapter means."""
    modules = dict(model.named_modules(remove_duplicate=False))
    packed = {
        child: (parent, slot, len(children))
        for parent, children in get_packed_modules_mapping(model).items()
        for slot, child in enumerate(children)
        if child != parent
    }
    aliases: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, LinearBase):
            aliases.setdefault(id(module), []).append(name)

    targets: dict[str, _Target] = {}
    missing, wrong, shared = [], [], []
    for name, (key_a, _) in names.items():
        prefix, _, last = name.rpartition(".")
        layer_name, slot, slots = name, None, None
        if name not in modules and last in packed:
            parent, slot, slots = packed[last]
            layer_name = f"{prefix}.{parent}" if prefix else parent
        layer = modules.get(layer_name)
        while isinstance(layer, BaseLayerWithLoRA):
            layer = layer.base_layer
        if layer is None:
            missing.append(key_a)
        elif not isinstance(layer, _KNOWN):
            wrong.append(f"{key_a} ({type(layer).__name__})")
        elif slots is not None and len(getattr(layer, "output_sizes", ())) != slots:
            wrong.append(f"{key_a} ({type(layer).__name__} without {slots} slices)")
        elif len(aliases[id(layer)]) > 1:
            shared.append(f"{key_a} ({' = '.join(aliases[id(layer)])})")
        else:
            targets[name] = _Target(layer_name, layer, slot)
    for found, what in (
        (missing, "for modules that the model does not have; is it for another model?"),
        (wrong, "for modules that are no linear layers UNO knows"),
        (shared, "for layers that the model holds under several names"),
    ):
        if found:
            raise ValueError(
                f"uno_lora_path: the adapter in {folder} has weights {what}: {_show(found)}."
            )
    # A packed layer targeted both whole and by slice would be counted twice.
    whole = {target.layer_name for target in targets.values() if target.slot is None}
    twice = [
        names[name][0]
        for name, target in targets.items()
        if target.slot is not None and target.layer_name in whole
    ]
    if twice:
        raise ValueError(
            f"uno_lora_path: the adapter in {folder} targets a packed layer as a whole and "
            f"also by: {_show(twice)}."
        )
    return targets


def _in_vllms_row_order(
    names: Mapping[str, tuple[str, str]],
    model: nn.Module,
    get_tensor: Callable[[str], torch.Tensor],
) -> Callable[[str], torch.Tensor]:
    """Reorder B's rows where vLLM keeps a projection's rows in another order than the checkpoint.

    Unnoticed it would leave the output lossless and the adapter useless.
    """
    modules = dict(model.named_modules())
    orders = {}
    for name, (_, key_b) in names.items():
        parent, _, last = name.rpartition(".")
        if last in ("q_proj", "k_proj") and parent in modules:
            order = folded_rope_rows(modules[parent])
            if order is not None:
                orders[key_b] = order

    def get(key: str) -> torch.Tensor:
        weight = get_tensor(key)
        if key not in orders:
            return weight
        head_dim, index = orders[key]
        return weight.view(-1, head_dim, weight.shape[1])[:, index].reshape(weight.shape)

    return get


def _parts(layer: LinearBase) -> list[_Part]:
    """Output columns of a layer, one part for each layer packed into it.

    Raises:
        ValueError: the layer shards its output in a way of its own.

    """
    if isinstance(layer, QKVParallelLinear) and len(layer.output_sizes) == 3:
        # With more ranks than key heads, several ranks hold the same key head.
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        heads = (
            (layer.total_num_heads, layer.num_heads, layer.head_size, layer.tp_rank),
            (layer.total_num_kv_heads, layer.num_kv_heads, layer.head_size, kv_rank),
            (layer.total_num_kv_heads, layer.num_kv_heads, layer.v_head_size, kv_rank),
        )
        split = [
            (total * size, local * size, rank * local * size) for total, local, size, rank in heads
        ]
    else:
        sizes = getattr(layer, "output_sizes", None) or [layer.output_size]
        shards = 1
        if isinstance(layer, ColumnParallelLinear):
            shards = layer.tp_size
            if shards > 1 and type(layer).weight_loader not in (
                ColumnParallelLinear.weight_loader,
                MergedColumnParallelLinear.weight_loader,
            ):
                raise ValueError(
                    f"uno_lora_path: the adapter targets {layer.prefix}, a layer that shards its "
                    f"weights in a way of its own ({type(layer).__name__}), which UNO does not "
                    f"know; use tensor_parallel_size=1."
                )
        split = [
            (size, size // shards, layer.tp_rank * (size // shards) if shards > 1 else 0)
            for size in sizes
        ]
    parts, offset = [], 0
    for full, local, start in split:
        parts.append(_Part(full, local, start, offset))
        offset += local
    return parts


def _slice(
    folder: Path,
    target: _Target,
    keys: tuple[str, str],
    get_tensor: Callable[[str], torch.Tensor],
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, list[_Part]]:
    """Read A [r, in_local] and B [out_local, r] of one module, checked and cut for this rank."""
    layer = target.layer
    parts = _parts(layer) if target.slot is None else [_parts(layer)[target.slot]]
    a, b = get_tensor(keys[0]), get_tensor(keys[1])
    wanted = ((rank, layer.input_size), (sum(part.full for part in parts), rank))
    for key, tensor, shape in zip(keys, (a, b), wanted, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"uno_lora_path: the adapter in {folder} is for another model: {key} has "
                f"shape {list(tensor.shape)}, but the model's layer {target.layer_name} and "
                f"rank {rank} of {CONFIG_FILE} call for {list(shape)}."
            )
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        a = a[:, layer.tp_rank * width : (layer.tp_rank + 1) * width]
    # Of several parts (the packed layer as a whole) B holds one below the other.
    rows = [
        whole[part.start : part.start + part.local]
        for whole, part in zip(b.split([part.full for part in parts]), parts, strict=True)
    ]
    return a.contiguous(), rows[0] if len(rows) == 1 else torch.cat(rows), parts


def _join(
    layer: LinearBase, slices: list[tuple[torch.Tensor, torch.Tensor, list[_Part]]]
) -> LinearLora:
    """Put the slices of one layer together, in the order of their output columns."""
    out_slices, rank_slices, row = [], [], 0
    for a, b, parts in slices:
        start = parts[0].offset
        out_slices.append((start, start + b.shape[0]))
        rank_slices.append((row, row + a.shape[0]))
        row += a.shape[0]
    all_a = [a for a, _, _ in slices]
    return LinearLora(
        a=all_a[0] if len(all_a) == 1 else torch.cat(all_a),
        b=tuple(b for _, b, _ in slices),
        out_slices=tuple(out_slices),
        rank_slices=tuple(rank_slices),
        out_features=sum(part.local for part in _parts(layer)),
    )


def _show(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} in all)"
