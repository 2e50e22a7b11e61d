"""A small random model and a random LoRA adapter, written to disk: for `make demo` and the tests.

    from vllm_uno.tiny_model import write_random_adapter, write_tiny_model
    model = write_tiny_model("/tmp/tiny")                  # folder for vLLM or transformers
    adapter = write_random_adapter("/tmp/adapter", model)  # folder for `uno_lora_path`
    LLM(str(model), dtype="float32", speculative_config={
        "method": "uno", "num_speculative_tokens": 8, "uno_lora_path": str(adapter)})

With fewer than `MIN_TOKENIZER_VOCAB` token ids no tokenizer is written: pass
`skip_tokenizer_init=True` and prompts of token ids. Token 0 is the end token: pass
`ignore_eos=True` where the length of the output matters.

The weights are ours, not vLLM's dummy ones, because a model whose output falls into a loop hides
faults of the KV cache. The default shape was chosen by measurement: see `write_tiny_model`.

Weight names and config keys are those of Hugging Face's `Qwen3ForCausalLM` and
`LlamaForCausalLM`; the adapter's are PEFT's. Neither library is needed to write them.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
END_TOKEN = "<|end|>"

# The tokenizer's alphabet: newline and printable ASCII. Byte 0x80 and above would decode to
# replacement characters in the demo, and a random model would emit them half of the time.
_ALPHABET = ["\n", *(chr(code) for code in range(32, 127))]
MIN_TOKENIZER_VOCAB = 1 + len(_ALPHABET)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _normal(generator: torch.Generator, rows: int, columns: int, std: float) -> torch.Tensor:
    """[rows, columns] fp32 from N(0, std^2)."""
    return torch.randn(rows, columns, generator=generator) * std


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-pair tokenizer over ASCII with exactly `vocab_size` entries; id 0 is the end token.

    The merges spell made-up syllables ("ba", " ba", "bace", ...), so that any id decodes to
    readable text and every id below `vocab_size` exists. Characters that are not in the alphabet
    are dropped by `encode`.
    """
    # The byte-level pre-tokenizer writes byte b as a printable stand-in; for ASCII that is b
    # itself, except for the space ("Ġ") and the newline ("Ċ").
    stand_in = {" ": "Ġ", "\n": "Ċ"}
    vocab = {END_TOKEN: 0}
    for char in _ALPHABET:
        vocab[stand_in.get(char, char)] = len(vocab)

    syllables = [a + b for a, b in itertools.product("bcdfghjklmnprstvwxz", "aeiou")]
    pairs: list[tuple[str, str]] = [(s[0], s[1]) for s in syllables]
    pairs += [("Ġ", s) for s in syllables]
    pairs += list(itertools.product(syllables, syllables))
    pairs += [("Ġ" + a, b) for a, b in itertools.product(syllables, syllables)]
    merges = pairs[: vocab_size - len(vocab)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    if len(vocab) != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} is outside {MIN_TOKENIZER_VOCAB}..{len(vocab)}")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    return tokenizer


def _write_tokenizer(folder: Path, vocab_size: int, max_position_embeddings: int) -> None:
    _tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TOKEN,
            "pad_token": END_TOKEN,
            "model_max_length": max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            # Enough for the chat endpoint of `vllm serve`.
            "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        },
    )


_EXPERTS = 8

# architecture -> (vLLM's class, transformers' model type), settings of its own
_KINDS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "qwen3": (("Qwen3ForCausalLM", "qwen3"), {"use_sliding_window": False}),
    "llama": (("LlamaForCausalLM", "llama"), {"mlp_bias": False}),
    "qwen3_moe": (
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        {
            "use_sliding_window": False,
            "num_experts": _EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "gemma3": (
        ("Gemma3ForCausalLM", "gemma3_text"),
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
}


def write_tiny_model(
    folder: str | Path,
    *,
    vocab_size: int = 2048,
    hidden_size: int = 256,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 2048,
    max_position_embeddings: int = 4096,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    std: float = 0.02,
    dtype: str = "float32",
    architecture: Literal["qwen3", "llama", "qwen3_moe", "gemma3"] = "qwen3",
) -> Path:
    """Write config.json, model.safetensors and, if `vocab_size` allows, a tokenizer to `folder`.

    Every matrix is N(0, std^2), every norm weight 1. The same arguments give the same bytes.
    Returns the folder.

    The default shape keeps greedy output from looping: over 8 prompts, 128 greedy tokens each,
    seeds 0 to 2, 88 to 89 % of a prompt's tokens are distinct on average, at least 75 % in every
    prompt. Changed one at a time (average / worst prompt): tied embeddings 1 / 1 %, intermediate
    512 63 / 9 %, 8 heads with 8 KV heads 67 / 27 %, head_dim 64 71 / 44 %, 4 layers 76 / 59 %,
    vocabulary 512 65 / 40 %, 1,024 81 / 65 %. (Attention over many tokens is an average that
    hardly moves, so wide attention drowns what differs from step to step; the MLP adds to it.)
    The hidden size gives logits a standard deviation of 0.32, enough for an adapter to move some
    by more than 1; so flat a law means a high acceptance when sampling and a low one when greedy.
    With architecture="llama" the average is 82 %, but single prompts do loop.

    "qwen3_moe" has 8 experts of an eighth of `intermediate_size`, two a token; "gemma3" has layers
    with a sliding window of 32 tokens and with full attention in turn.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names, own = _KINDS[architecture]
    config: dict[str, Any] = {
        "architectures": [names[0]],
        "model_type": names[1],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "initializer_range": std,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": dtype,
    }
    config |= own
    gemma = architecture == "gemma3"
    moe = architecture == "qwen3_moe"
    if gemma:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(num_layers)]
        config["query_pre_attn_scalar"] = head_dim
        rope = config["rope_parameters"]
        config["rope_parameters"] = {kind: dict(rope) for kind in kinds}
    if moe:
        config["moe_intermediate_size"] = intermediate_size // _EXPERTS

    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    matrices: dict[str, tuple[int, int]] = {"model.embed_tokens": (vocab_size, hidden_size)}
    norms: dict[str, int] = {"model.norm": hidden_size}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        matrices |= {
            f"{prefix}.self_attn.q_proj": (q_size, hidden_size),
            f"{prefix}.self_attn.k_proj": (kv_size, hidden_size),
            f"{prefix}.self_attn.v_proj": (kv_size, hidden_size),
            f"{prefix}.self_attn.o_proj": (hidden_size, q_size),
        }
        mlps, width = [f"{prefix}.mlp"], intermediate_size
        if moe:
            matrices[f"{prefix}.mlp.gate"] = (_EXPERTS, hidden_size)
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(_EXPERTS)]
            width = intermediate_size // _EXPERTS
        for mlp in mlps:
            matrices[f"{mlp}.gate_proj"] = (width, hidden_size)
            matrices[f"{mlp}.up_proj"] = (width, hidden_size)
            matrices[f"{mlp}.down_proj"] = (hidden_size, width)
        norms[f"{prefix}.input_layernorm"] = hidden_size
        norms[f"{prefix}.post_attention_layernorm"] = hidden_size
        if gemma:
            norms[f"{prefix}.pre_feedforward_layernorm"] = hidden_size
            norms[f"{prefix}.post_feedforward_layernorm"] = hidden_size
        if architecture != "llama":
            norms[f"{prefix}.self_attn.q_norm"] = head_dim
            norms[f"{prefix}.self_attn.k_norm"] = head_dim
    if not tie_word_embeddings:
        matrices["lm_head"] = (vocab_size, hidden_size)

    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": _normal(generator, *shape, std).to(torch_dtype)
        for name, shape in matrices.items()
    }
    # Gemma's norms multiply by 1 + weight.
    tensors |= {
        f"{name}.weight": torch.full((n,), 0.0 if gemma else 1.0, dtype=torch_dtype)
        for name, n in norms.items()
    }

    _write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if vocab_size >= MIN_TOKENIZER_VOCAB:
        _write_tokenizer(folder, vocab_size, max_position_embeddings)
    return folder


def _pattern_value(pattern: Mapping[str, int], module: str, default: int) -> int:
    """PEFT's rule: the first key that matches the end of the module's name, as a regex."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def write_random_adapter(
    folder: str | Path,
    model_folder: str | Path,
    *,
    rank: int = 8,
    alpha: int = 16,
    targets: Sequence[str] = ALL_TARGETS,
    seed: int = 0,
    strength: float = 1.0,
    mask_token_id: int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, int] | None = None,
    use_rslora: bool = False,
) -> Path:
    """Write a PEFT LoRA folder plus `uno_config.json` for the model in `model_folder`.

    `strength` is the size of the LoRA term relative to the base layer: with inputs of unit RMS
    the RMS of scale * B(A x) is `strength` times the RMS of W x, whatever rank and scale are.
    `mask_token_id` (default: the last token id) bounds the noise ids, [1, mask_token_id).
    `rank_pattern` and `alpha_pattern` map PEFT module patterns to values. Returns the folder.
    """
    folder, model_folder = Path(folder), Path(model_folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank_pattern, alpha_pattern = dict(rank_pattern or {}), dict(alpha_pattern or {})
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((model_folder / "config.json").read_text())

    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model_folder / "model.safetensors", framework="pt") as weights:
        for name in sorted(weights.keys()):
            module = name.removesuffix(".weight")
            if module.rsplit(".", 1)[-1] not in targets:
                continue
            weight = weights.get_tensor(name)
            out_size, in_size = weight.shape
            r = _pattern_value(rank_pattern, module, rank)
            scale = _pattern_value(alpha_pattern, module, alpha) / (r**0.5 if use_rslora else r)
            # x of unit RMS: A x is N(0, 1) per rank, so B(A x) has RMS b_std * sqrt(r); the base
            # layer's output has RMS w_std * sqrt(in_size).
            w_std = float(weight.float().std())
            b_std = strength * w_std * (in_size / r) ** 0.5 / scale
            lora_a = _normal(generator, r, in_size, in_size**-0.5)
            lora_b = _normal(generator, out_size, r, b_std)
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = lora_a.to(weight.dtype)
            tensors[f"{prefix}.lora_B.weight"] = lora_b.to(weight.dtype)
    if not tensors:
        raise ValueError(f"no module of {model_folder} is named in targets={tuple(targets)}")

    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model_folder),
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(targets),
            "rank_pattern": rank_pattern,
            "alpha_pattern": alpha_pattern,
            "use_rslora": use_rslora,
            "use_dora": False,
            "modules_to_save": None,
        },
    )
    if mask_token_id is None:
        mask_token_id = config["vocab_size"] - 1
    _write_json(
        folder / "uno_config.json",
        {
            "noise_low": 1,
            "mask_token_id": mask_token_id,
            "block_sizes": [2, 4, 8],
            "base_model": str(model_folder),
            "revision": None,
        },
    )
    return folder
