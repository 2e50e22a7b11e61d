"""The frozen model with a LoRA that acts on noised rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_uno.train.blocks import UNUSED, dense_mask, doubled, flex_mask
from vllm_uno.train.data import PackedRows
from vllm_uno.train.losses import LossWeights, distillation_loss


class ModelError(ValueError):
    """A model that the trainer cannot use; says why and what to do."""


class RowGate:
    """Multiplies what an adapter adds: 1 on noised rows, 0 on clean ones.

    Adding an exact zero leaves a clean row bit for bit what the base model makes of it.

    Attributes:
        rows: [N, L, 1] or [1, L, 1] of ones and zeros, or None: the adapter acts nowhere.

    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    def attach(self, model: nn.Module) -> int:
        """Gate every LoRA layer of a PEFT model; returns how many there are."""
        from peft.tuners.lora import LoraLayer

        layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
        for layer in layers:
            for up in layer.lora_B.values():
                up.register_forward_hook(self._gate)
        return len(layers)

    def _gate(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return output * 0
        if output.dim() != 3 or output.shape[1] != self.rows.shape[1]:
            raise ModelError(
                f"a targeted layer sees rows of shape {tuple(output.shape[:-1])}, not the "
                f"sequence's: layers inside a mixture of experts cannot be gated by row. Leave "
                f"them out of targets."
            )
        return output * self.rows.to(output.dtype)


class NoisedModel(nn.Module):
    """A causal LM, its adapter, and the doubled forward pass.

    Args:
        peft_model: PEFT model over a transformers causal LM.
        attention: "flex" or "sdpa", as the model was loaded with.

    """

    def __init__(self, peft_model: Any, attention: str) -> None:
        super().__init__()
        self.peft_model = peft_model
        self.attention = attention
        self.gate = RowGate()
        self.layers = self.gate.attach(peft_model)
        language_model = peft_model.get_base_model()
        self._decoder = [language_model.get_decoder()]  # in a list: not registered twice
        self._head = [language_model.get_output_embeddings()]

    @property
    def head(self) -> nn.Linear:
        return self._head[0]

    @property
    def decoder(self) -> Any:
        return self._decoder[0]

    @property
    def autocast(self) -> Any:
        weight = self.head.weight
        return torch.autocast(
            weight.device.type, dtype=torch.bfloat16, enabled=weight.dtype == torch.bfloat16
        )

    def hidden_states(
        self, rows: PackedRows, seeds: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states of both halves.

        Args:
            rows: N rows of L tokens, on the model's device.
            seeds: int64 [N, L], of `block_seeds`.
            noise: int64 [N, L], token ids of the noised half.

        Returns:
            clean [N, L, H], noised [N, L, H].

        """
        length = rows.ids.shape[1]
        ids, positions = doubled(rows.ids, noise, rows.positions)
        make_mask = flex_mask if self.attention == "flex" else dense_mask
        self.gate.rows = torch.cat(
            [torch.zeros_like(seeds), (seeds != UNUSED).long()], dim=1
        ).unsqueeze(-1)
        from peft.helpers import disable_input_dtype_casting

        # PEFT would make fp32 of x for its fp32 weights, and autocast bf16 of it again.
        as_it_is = self.head.weight.dtype == torch.bfloat16
        with self.autocast, disable_input_dtype_casting(self.peft_model, active=as_it_is):
            hidden = self.decoder(
                input_ids=ids,
                attention_mask=make_mask(rows.documents, seeds),
                position_ids=positions,
                use_cache=False,
            ).last_hidden_state
        return hidden[:, :length], hidden[:, length:]

    def forward(
        self,
        rows: PackedRows,
        seeds: torch.Tensor,
        noise: torch.Tensor,
        used: torch.Tensor,
        weights: LossWeights,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss over the noised rows that have a law to learn.

        Args:
            rows: N rows of L tokens.
            seeds: int64 [N, L], of `block_seeds`.
            noise: int64 [N, L].
            used: int64 [R], of `learning_rows`.
            weights: of the losses.

        Returns:
            Loss []; means of TV, CE and KL [3].

        """
        clean, noised = self.hidden_states(rows, seeds, noise)
        targets = rows.ids.roll(-1, dims=1).flatten()[used]
        return distillation_loss(
            noised.flatten(0, 1)[used],
            clean.flatten(0, 1)[used],
            self.head.weight,
            self.head.bias,
            targets,
            weights,
        )


def learning_rows(seeds: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Flat indices of noised rows with a law to learn: int64 [R] into N * L.

    Blocks whose seed lies inside a prompt are left out: decoding never drafts the rest of one.
    On the CPU, where its length costs no synchronisation with the GPU.
    """
    after_prompt = trained.gather(1, seeds.clamp(min=0))
    return ((seeds != UNUSED) & trained & after_prompt).flatten().nonzero().flatten()


@torch.no_grad()
def check_doubled_pass(model: NoisedModel, rows: PackedRows, device: torch.device) -> None:
    """The clean half must be the model's own pass over a document.

    Finds what a mask cannot do: attention windows, position biases, recurrent layers, dropout.

    Args:
        model: with its adapter.
        rows: of which the first is looked at.
        device: of the model.

    Raises:
        ModelError: it is not, or a targeted layer cannot be gated.

    """
    part = rows.rows(torch.arange(1), device)
    seeds = torch.full_like(part.ids, UNUSED)
    clean, _ = model.hidden_states(part, seeds, part.ids)
    # The last of the row: one that must not see others.
    own = part.documents[0] == part.documents[0].max()
    with model.autocast, model.peft_model.disable_adapter():
        plain = model.decoder(input_ids=part.ids[:, own], use_cache=False).last_hidden_state
    error = float((clean[:, own].float() - plain.float()).norm() / plain.float().norm())
    limit = 0.05 if model.head.weight.dtype == torch.bfloat16 else 1e-3
    if not error < limit:
        raise ModelError(
            f"the model's own pass over a document differs from the doubled one (relative error "
            f"{error:.2g}): its attention is not what a mask can say (a window, position biases, "
            f"recurrent layers), and the trainer does not know it."
        )


def load_tokenizer(name: str, revision: str | None) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: there is none.

    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {name!r} could not be loaded: {error}") from error


def load_model(
    name: str,
    *,
    revision: str | None,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
) -> Any:
    """A frozen causal LM, checked to be one that the doubled pass fits.

    Raises:
        ModelError: attention that is not full in every layer, a logits processor of the model's
            own (soft caps, scales), or weights that are not there.

    """
    from transformers import AutoModelForCausalLM

    implementation = {"flex": "flex_attention", "sdpa": "sdpa"}[attention]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=dtype, attn_implementation=implementation
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} could not be loaded: {error}") from error
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if getattr(model.config, "sliding_window", None) is not None:
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        raise ModelError(
            f"{name!r} has layers of kinds {sorted(kinds)}: the block mask needs full attention "
            f"in every layer."
        )
    # Also where gradient checkpointing puts the model into training mode.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.requires_grad_(False)
    model.eval()
    model.to(device)
    _check_head(model, name)
    return model


@torch.no_grad()
def _check_head(model: Any, name: str) -> None:
    """Logits must be the output head's product alone: the losses compute them so."""
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if not isinstance(head, nn.Linear) or decoder is model:
        raise ModelError(f"{name!r} has no plain linear output head")
    ids = torch.arange(1, 9, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
    # A plain causal mask in both attention kinds: none given.
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(head(hidden).float(), logits.float(), rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"{name!r} changes its logits after the output head (a soft cap or a scale), which "
            f"the losses do not know."
        )


def add_adapter(model: Any, targets: Sequence[str], rank: int, scale: float) -> Any:
    """A PEFT model with a fresh LoRA; PEFT's initial B is zero, so it starts as the base model.

    Raises:
        ModelError: a target that no layer is called.

    """
    from peft import LoraConfig, get_peft_model

    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    missing = [t for t in targets if t not in names]
    if missing:
        raise ModelError(
            f"targets {missing} are not layers of this model; its linear layers are "
            f"{sorted(names)}."
        )
    head = model.get_output_embeddings()
    heads = [n for n, m in model.named_modules() if m is head and n.rpartition(".")[2] in targets]
    if heads:
        raise ModelError(
            f"targets name the output head ({heads[0]}): it must stay the base model's"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=rank * scale,  # type: ignore[arg-type]  # a float does as well
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def noise_high(tokenizer: Any, vocab_size: int, mask_token_id: int | None) -> int:
    """Noise ids lie below this one: the setting, the tokenizer's mask token, or its size."""
    if mask_token_id is None:
        own = tokenizer.mask_token_id
        mask_token_id = own if own is not None else min(len(tokenizer), vocab_size)
    if not 1 < mask_token_id <= vocab_size:
        raise ModelError(
            f"mask_token_id={mask_token_id} is outside the model's vocabulary ({vocab_size})"
        )
    return int(mask_token_id)
