"""Every configuration that UNO refuses, on a real VllmConfig of vLLM 0.32."""

import copy
import dataclasses

import pytest
import torch
from vllm.config import (
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    WatermarkConfig,
)
from vllm.config.parallel import ParallelConfig
from vllm.platforms import current_platform

from vllm_uno.config import UnoSpeculativeConfig
from vllm_uno.tiny_model import write_random_adapter, write_tiny_model
from vllm_uno.validation import fit_limits, validate

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A configuration as vLLM builds it, with nothing in UNO's way."""
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_model(folder / "model", vocab_size=64, num_layers=1, intermediate_size=64)
    adapter = write_random_adapter(folder / "adapter", model)
    model_config = ModelConfig(
        str(model), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="float32"
    )
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            max_num_seqs=16,
            max_num_batched_tokens=128,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    config.speculative_config = UnoSpeculativeConfig(
        uno_lora_path=str(adapter), target_model_config=model_config
    )
    return config


@pytest.fixture
def config(base, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    copied = copy.copy(base)
    for name in (
        "model_config",
        "parallel_config",
        "cache_config",
        "offload_config",
        "scheduler_config",
        "speculative_config",
    ):
        setattr(copied, name, copy.deepcopy(getattr(base, name)))
    return copied


def change(config, path, value):
    """Set an attribute that must exist: one that vLLM renames must not pass unseen."""
    *owners, name = path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    assert hasattr(config, name), path
    setattr(config, name, value)


def refusal(config):
    with pytest.raises(
        ValueError, match=r"^speculative method 'uno' cannot run with this"
    ) as error:
        validate(config)
    return str(error.value)


def refusal_of_trees(config):
    """Of what linear mode serves."""
    validate(config)
    change(config, "speculative_config.uno_mode", "tree")
    message = refusal(config)
    assert "set uno_mode to 'linear'" in message
    return message


def test_a_plain_configuration_is_served(config):
    validate(config)


@pytest.mark.parametrize(
    ("path", "value", "texts"),
    [
        (
            "parallel_config.pipeline_parallel_size",
            2,
            ["pipeline_parallel_size=2", "set it to 1 (tensor_parallel_size may be more)"],
        ),
        ("parallel_config.decode_context_parallel_size", 2, ["decode_context_parallel_size=2"]),
        ("parallel_config.prefill_context_parallel_size", 2, ["prefill_context_parallel_size=2"]),
        ("parallel_config.enable_dbo", True, ["enable_dbo", "leave it out"]),
        ("parallel_config.ubatch_size", 2, ["ubatch_size", "leave it out"]),
        (
            "parallel_config.enable_batch_sharded_sampling",
            True,
            ["enable_batch_sharded_sampling", "leave it out"],
        ),
        ("cache_config.kv_offloading_size", 2.0, ["kv_offloading_size=2.0", "leave it out"]),
        (
            "kv_transfer_config",
            KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
            ["kv_transfer_config (KV connector NixlConnector)", "leave it out"],
        ),
        ("cache_config.kv_sharing_fast_prefill", True, ["kv_sharing_fast_prefill", "leave it out"]),
        ("offload_config.uva.cpu_offload_gb", 1.5, ["cpu_offload_gb=1.5", "leave it out"]),
        ("offload_config.prefetch.offload_group_size", 4, ["offload_group_size=4", "leave it out"]),
        ("watermark_config", WatermarkConfig(key=7), ["watermark_config", "leave it out"]),
        ("lora_config", LoRAConfig(), ["enable_lora on a CPU", "leave out --enable-lora"]),
    ],
)
def test_settings_in_the_way(config, path, value, texts):
    change(config, path, value)
    message = refusal(config)
    for text in texts:
        assert text in message
    assert message.count("\n- ") == 1


def test_sampling_masks_of_trees(config):
    change(config, "model_config.return_sampling_mask", True)
    assert "return_sampling_mask" in refusal_of_trees(config)


def test_batch_invariance_with_trees(config, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in refusal_of_trees(config)


def test_quantised_kv_caches_of_trees(config):
    change(config, "cache_config.cache_dtype", "fp8")
    assert "kv_cache_dtype=fp8" in refusal_of_trees(config)


def test_fp8_drafts_need_a_gpu_that_has_them(config, monkeypatch):
    from vllm.platforms import current_platform

    from vllm_uno.vllm_hooks import linear_api

    change(config, "speculative_config.uno_draft_quantization", "fp8")
    validate(config)  # on a CPU, for trying
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    able = [True]
    monkeypatch.setattr(linear_api, "fp8_matmul_available", lambda: able[0])
    message = refusal(config)
    assert "uno_draft_quantization='fp8' with dtype=torch.float32" in message
    assert "set dtype to one of these" in message and "compute capability" not in message
    change(config, "model_config.dtype", torch.bfloat16)
    validate(config)
    able[0] = False
    assert (
        "uno_draft_quantization='fp8': this GPU, or this build of vLLM, has no FP8 products"
        in refusal(config)
    )


def test_a_part_of_the_context_and_alibi(config):
    config.model_config.hf_text_config.alibi = True
    validate(config)
    change(config, "speculative_config.uno_draft_context", 64)
    assert "uno_draft_context=64 with a model of ALiBi positions" in refusal(config)
    config.model_config.hf_text_config.alibi = False
    validate(config)
    config.model_config.architectures.append("Step1ForCausalLM")
    assert "ALiBi" in refusal(config)


def test_rows_of_a_tree_s_draft(config):
    change(config, "speculative_config.uno_mode", "tree")
    change(config, "speculative_config.uno_block_size", 9)
    assert "max_num_seqs=16 with uno_block_size=9: the 144 rows" in refusal(config)


def test_user_lora_is_served_on_a_gpu(config, monkeypatch):
    change(config, "lora_config", LoRAConfig())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    validate(config)


def test_kv_offloading_is_named_by_the_users_setting(config):
    # vLLM turns it into a connector.
    change(config, "cache_config.kv_offloading_size", 2.0)
    change(config, "kv_transfer_config", KVTransferConfig())
    assert "kv_transfer_config" not in refusal(config)


def test_data_parallel(config, monkeypatch):
    change(config, "parallel_config.data_parallel_size", 2)
    validate(config)  # dense models: the engines are independent
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: True))
    assert "data_parallel_size=2 with a mixture-of-experts model" in refusal(config)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("is_encoder_decoder", "an encoder-decoder model is not supported"),
        ("is_diffusion", "a diffusion language model"),
        ("uses_mrope", "M-RoPE"),
        ("is_multimodal_model", "a multimodal model"),
        ("is_attention_free", "a model without attention"),
        ("is_hybrid", "a hybrid model"),
    ],
)
def test_models(config, monkeypatch, name, text):
    assert not getattr(config.model_config, name)
    monkeypatch.setattr(ModelConfig, name, property(lambda self: True))
    message = refusal(config)
    assert text in message
    assert config.model_config.model in message
    assert "serve it without speculative method 'uno'" in message


def test_more_models(config):
    change(config, "model_config.attention_chunk_size", 16)
    assert "chunked local attention" in refusal(config)
    config.model_config.attention_chunk_size = None
    config.model_config.hf_text_config.index_topk = 2048
    assert "sparse attention indexer" in refusal(config)
    change(config, "model_config.runner_type", "pooling")
    assert "runner='pooling'" in refusal(config)


def test_v1_runner_forced(config, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(config)
    assert "UNO needs Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER=0" in message


def without_triton(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)


def test_v1_runner_for_want_of_triton_on_a_cpu(config, monkeypatch):
    without_triton(monkeypatch)
    assert "to try UNO on a CPU set UNO_CPU_INTERPRETER=1" in refusal(config)


def test_v1_runner_for_want_of_triton_on_a_gpu(config, monkeypatch):
    without_triton(monkeypatch)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    message = refusal(config)
    assert "install triton" in message
    assert "UNO_CPU_INTERPRETER" not in message


def test_v1_runner_for_a_reason_of_vllms(config, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: False))
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    assert "set VLLM_USE_V2_MODEL_RUNNER=1, vLLM then says" in refusal(config)


def set_limits(config, seqs, tokens, block):
    change(config, "scheduler_config.max_num_seqs", seqs)
    change(config, "scheduler_config.max_num_batched_tokens", tokens)
    change(config, "speculative_config.num_speculative_tokens", block)


def test_draft_rows_must_fit(config):
    set_limits(config, 16, 128, 8)
    validate(config)
    set_limits(config, 17, 128, 8)
    message = refusal(config)
    assert "max_num_seqs=17 with num_speculative_tokens=8: the 136 rows" in message
    assert "max_num_batched_tokens=128" in message
    assert "lower max_num_seqs to at most 16" in message
    assert "lower num_speculative_tokens to at most 7" in message
    assert "raise max_num_batched_tokens to at least 136" in message
    # Each way out is one.
    for limits in ((16, 128, 8), (17, 128, 7), (17, 136, 8)):
        set_limits(config, *limits)
        validate(config)
    # Ways that lead nowhere are not named.
    set_limits(config, 16, 8, 9)
    message = refusal(config)
    assert "lower" not in message
    assert "raise max_num_batched_tokens to at least 144" in message


def test_verify_rows_of_a_request_must_fit(config):
    """Or a cached prompt of one new token, padded to them, would wait for ever."""
    set_limits(config, 1, 9, 8)
    validate(config)
    set_limits(config, 1, 8, 8)
    message = refusal(config)
    assert "num_speculative_tokens=8: the 9 rows that verify a request do not fit" in message
    assert "max_num_batched_tokens=8; raise that to at least 9, or lower" in message
    assert "num_speculative_tokens to at most 7" in message


def test_a_block_must_fit_into_a_request(config):
    set_limits(config, 1, 128, MAX_MODEL_LEN - 1)
    validate(config)
    set_limits(config, 1, 128, MAX_MODEL_LEN)
    message = refusal(config)
    assert f"num_speculative_tokens={MAX_MODEL_LEN}" in message
    assert f"max_model_len={MAX_MODEL_LEN}" in message
    assert f"lower it to at most {MAX_MODEL_LEN - 1} or raise max_model_len" in message


def test_all_problems_at_once(config):
    change(config, "parallel_config.pipeline_parallel_size", 2)
    change(config, "cache_config.kv_sharing_fast_prefill", True)
    set_limits(config, 17, 128, 8)
    assert refusal(config).count("\n- ") == 3


def test_what_is_read_exists_in_this_vllm():
    """`use_ubatching` and the like are properties; a rename must not go unseen."""
    assert isinstance(ParallelConfig.use_ubatching, property)
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    names = {field.name for field in dataclasses.fields(VllmConfig)}
    assert {"watermark_config", "lora_config", "kv_transfer_config", "offload_config"} <= names


@pytest.mark.parametrize(
    ("user_seqs", "user_tokens", "seqs", "tokens", "rows", "expected"),
    [
        (None, None, 1024, 8192, 8, (1024, 8192)),  # `vllm serve` on an H200, B=8: fits
        (None, None, 1024, 8192, 16, (512, 8192)),
        (None, None, 1024, 8192, 9, (910, 8192)),  # with --enable-lora
        (None, 512, 256, 512, 8, (64, 512)),
        (None, 4, 256, 4, 8, (1, 4)),
        (256, None, 256, 1024, 8, (256, 2048)),
        (16, None, 16, 1024, 8, (16, 1024)),
        (256, 512, 256, 512, 8, (256, 512)),  # both chosen: for validate() to refuse
    ],
)
def test_fit_limits(user_seqs, user_tokens, seqs, tokens, rows, expected):
    assert fit_limits(user_seqs, user_tokens, seqs, tokens, rows) == expected
