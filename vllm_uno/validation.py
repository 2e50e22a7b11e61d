"""What UNO cannot serve, refused before any worker starts.

Called at the end of vLLM's configuration, in the front-end process, so that a user sees one
clear error instead of a worker's traceback. What only a worker can know (kinds of KV cache,
shapes of the adapter) is checked there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_uno.vllm_hooks.cpu_interpreter import SWITCH as CPU_SWITCH

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_LEAVE_OUT = "leave it out, or run without speculative method 'uno'"


def validate(vllm_config: VllmConfig) -> None:
    """Refuse a configuration that UNO cannot serve.

    Args:
        vllm_config: a complete configuration whose speculative method is "uno".

    Raises:
        ValueError: names every setting that is in the way, why, and the way out.

    """
    problems = [
        *_runner_problems(vllm_config),
        *_parallel_problems(vllm_config),
        *_cache_problems(vllm_config),
        *_limit_problems(vllm_config),
        *_tree_problems(vllm_config),
        *_draft_problems(vllm_config),
        *_other_problems(vllm_config),
    ]
    if vllm_config.model_config is not None:
        problems += _model_problems(vllm_config.model_config)
    if problems:
        listed = "".join(f"\n- {problem}." for problem in problems)
        raise ValueError(f"speculative method 'uno' cannot run with this configuration:{listed}")


def fit_limits(
    user_max_num_seqs: int | None,
    user_max_num_batched_tokens: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    rows: int,
) -> tuple[int, int]:
    """Fit vLLM's default limits to the rows of a draft pass; never change what the user set.

    Args:
        user_max_num_seqs, user_max_num_batched_tokens: what the user set, or None.
        max_num_seqs, max_num_batched_tokens: what vLLM takes.
        rows: rows a request: B, or those of a verify pass where they count, too.

    Returns:
        (max_num_seqs, max_num_batched_tokens). Requests give way unless the user chose them;
        where the user set both, `validate` says so if they do not fit.

    """
    if user_max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, max(1, max_num_batched_tokens // rows))
    elif user_max_num_batched_tokens is None:
        max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs * rows)
    return max_num_seqs, max_num_batched_tokens


def _runner_problems(vllm_config: VllmConfig) -> list[str]:
    if vllm_config.use_v2_model_runner:
        return []
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    what = "vLLM chose its V1 model runner, UNO needs Model Runner V2"
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return [f"{what}: unset VLLM_USE_V2_MODEL_RUNNER=0"]
    if not HAS_TRITON:
        if current_platform.is_cpu():
            return [
                f"{what}, which needs Triton: to try UNO on a CPU set {CPU_SWITCH}=1 (slow: "
                f"Triton's kernels run in its interpreter)"
            ]
        return [f"{what}, which needs Triton: install triton"]
    return [f"{what}: set VLLM_USE_V2_MODEL_RUNNER=1, vLLM then says what is in its way"]


def _parallel_problems(vllm_config: VllmConfig) -> list[str]:
    parallel = vllm_config.parallel_config
    problems = []
    for name, why in (
        ("pipeline_parallel_size", "the draft pass needs all layers on one rank"),
        ("decode_context_parallel_size", "draft rows are not split over ranks by position"),
        ("prefill_context_parallel_size", "draft rows are not split over ranks by position"),
    ):
        size = getattr(parallel, name)
        if size > 1:
            problems.append(f"{name}={size}: {why}; set it to 1 (tensor_parallel_size may be more)")
    if parallel.use_ubatching:
        problems.append(
            f"enable_dbo / ubatch_size: the draft pass does not run in micro-batches; {_LEAVE_OUT}"
        )
    if parallel.enable_batch_sharded_sampling:
        problems.append(
            f"enable_batch_sharded_sampling: draft laws are not sharded over ranks; {_LEAVE_OUT}"
        )
    model = vllm_config.model_config
    if parallel.data_parallel_size > 1 and model is not None and model.is_moe:
        problems.append(
            f"data_parallel_size={parallel.data_parallel_size} with a mixture-of-experts model: "
            f"the ranks would have to draft in step; set it to 1"
        )
    return problems


def _cache_problems(vllm_config: VllmConfig) -> list[str]:
    cache, offload = vllm_config.cache_config, vllm_config.offload_config
    scratch = "the draft pass writes scratch rows into KV blocks, which would be transferred"
    problems = []
    if cache.kv_offloading_size is not None:
        problems.append(f"kv_offloading_size={cache.kv_offloading_size}: {scratch}; {_LEAVE_OUT}")
    elif vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        problems.append(f"kv_transfer_config (KV connector {connector}): {scratch}; {_LEAVE_OUT}")
    if cache.kv_sharing_fast_prefill:
        problems.append(
            f"kv_sharing_fast_prefill: it skips rows that UNO samples from; {_LEAVE_OUT}"
        )
    if offload.uva.cpu_offload_gb > 0:
        problems.append(
            f"cpu_offload_gb={offload.uva.cpu_offload_gb}: the draft pass shares the model's "
            f"layers, which offloading rewires; {_LEAVE_OUT}"
        )
    if offload.prefetch.offload_group_size > 0:
        problems.append(
            f"offload_group_size={offload.prefetch.offload_group_size}: the draft pass shares "
            f"the model's layers, which offloading rewires; {_LEAVE_OUT}"
        )
    return problems


def _limit_problems(vllm_config: VllmConfig) -> list[str]:
    assert vllm_config.speculative_config is not None
    spec = vllm_config.speculative_config
    block = spec.block_size
    setting = "uno_block_size" if spec.uno_mode == "tree" else "num_speculative_tokens"
    seqs = vllm_config.scheduler_config.max_num_seqs
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    problems = []
    if seqs * block > tokens:
        ways = [f"raise max_num_batched_tokens to at least {seqs * block}"]
        if tokens >= seqs:
            ways.insert(0, f"lower {setting} to at most {tokens // seqs}")
        if tokens >= block:
            ways.insert(0, f"lower max_num_seqs to at most {tokens // block}")
        problems.append(
            f"max_num_seqs={seqs} with {setting}={block}: the {seqs * block} rows "
            f"of a draft pass do not fit into max_num_batched_tokens={tokens}; "
            f"{', or '.join(ways)}"
        )
    elif (rows := spec.num_speculative_tokens + 1) > tokens:
        # vLLM pads a cached one-token prefill to as many, and waits for room that never comes.
        problems.append(
            f"num_speculative_tokens={rows - 1}: the {rows} rows that verify a request do not fit "
            f"into max_num_batched_tokens={tokens}; raise that to at least {rows}, or lower "
            f"num_speculative_tokens to at most {tokens - 1}"
        )
    model = vllm_config.model_config
    if model is not None and block > model.max_model_len - 1:
        problems.append(
            f"{setting}={block}: no request of max_model_len={model.max_model_len} "
            f"tokens has room for a draft; lower it to at most {max(1, model.max_model_len - 1)} "
            f"or raise max_model_len"
        )
    return problems


def _tree_problems(vllm_config: VllmConfig) -> list[str]:
    assert vllm_config.speculative_config is not None
    if vllm_config.speculative_config.uno_mode != "tree":
        return []
    from vllm import envs
    from vllm.utils.torch_utils import is_quantized_kv_cache

    linear = "leave it out, or set uno_mode to 'linear'"
    problems = []
    model = vllm_config.model_config
    if model is not None and model.return_sampling_mask:
        problems.append(
            f"return_sampling_mask with uno_mode 'tree': a tree's rows have none; {linear}"
        )
    if envs.VLLM_BATCH_INVARIANT:
        problems.append(
            "VLLM_BATCH_INVARIANT with uno_mode 'tree': tree attention divides its work by the "
            "number of requests; unset it, or set uno_mode to 'linear'"
        )
    kind = vllm_config.cache_config.cache_dtype
    if is_quantized_kv_cache(kind):
        problems.append(
            f"kv_cache_dtype={kind} with uno_mode 'tree': tree attention reads no quantised KV "
            f"cache; {linear}"
        )
    return problems


def _draft_problems(vllm_config: VllmConfig) -> list[str]:
    spec: Any = vllm_config.speculative_config
    model = vllm_config.model_config
    problems = []
    # vLLM's own list of models with ALiBi has no Step1.
    if (
        spec.uno_draft_context is not None
        and model is not None
        and (model.uses_alibi or "Step1ForCausalLM" in model.architectures)
    ):
        problems.append(
            f"uno_draft_context={spec.uno_draft_context} with a model of ALiBi positions: they are "
            "counted in the KV cache, of which the draft pass would see a part; leave it out"
        )
    if spec.uno_draft_quantization is None:
        return problems
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # for trying and testing
        return problems
    from vllm_uno.vllm_hooks.linear_api import fp8_matmul_available

    if not fp8_matmul_available():
        problems.append(
            "uno_draft_quantization='fp8': this GPU, or this build of vLLM, has no FP8 products "
            "(NVIDIA GPUs of compute capability 8.9 and newer have); leave it out"
        )
    if model is not None and model.dtype not in (torch.bfloat16, torch.float16):
        problems.append(
            f"uno_draft_quantization='fp8' with dtype={model.dtype}: FP8 products give bfloat16 "
            "or float16; set dtype to one of these, or leave it out"
        )
    return problems


def _other_problems(vllm_config: VllmConfig) -> list[str]:
    from vllm.platforms import current_platform

    problems = []
    if vllm_config.lora_config is not None and current_platform.is_cpu():
        problems.append(
            "enable_lora on a CPU: vLLM's own LoRA crashes there with any speculative method; "
            "leave out --enable-lora"
        )
    if vllm_config.watermark_config is not None:
        problems.append(
            f"watermark_config: a watermark changes the law that drafts are tested against; "
            f"{_LEAVE_OUT}"
        )
    return problems


def _model_problems(model: ModelConfig) -> list[str]:
    no = "is not supported; serve it without speculative method 'uno'"
    # The vision (or audio) parts of a multimodal model get no draft rows, but its text
    # positions may depend on them.
    for refused, what in (
        (model.runner_type != "generate", f"runner={model.runner_type!r} (no text generation)"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
        (model.is_diffusion, "a diffusion language model"),
        (model.uses_mrope, "a model with multimodal rotary positions (M-RoPE)"),
        (model.is_multimodal_model, "a multimodal model"),
        (model.is_attention_free, "a model without attention (draft rows would change its state)"),
        (model.is_hybrid, "a hybrid model (draft rows would change its recurrent state)"),
        (model.attention_chunk_size is not None, "a model with chunked local attention"),
        (
            hasattr(model.hf_text_config, "index_topk"),
            "a model with a sparse attention indexer",
        ),
    ):
        if refused:
            # One reason suffices: most of these come in company.
            return [f"model {model.model!r}: {what} {no}"]
    return []
