"""Refusals as a user meets them: from the settings of `vllm serve`, before any worker starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

import vllm_uno

_MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 2048,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "conv_kernel": 4,
    "time_step_rank": 4,
}
_HYBRID = {
    "architectures": ["Zamba2ForCausalLM"],
    "model_type": "zamba2",
    "vocab_size": 2048,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 2,
    "hybrid_layer_ids": [1],
    "layers_block_type": ["mamba", "hybrid"],
}
_ENCODER_DECODER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 2048,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def start(model: Path, adapter: Path, **settings: Any) -> None:
    vllm_uno.register()
    EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        speculative_config={"method": "uno", "uno_lora_path": str(adapter)},
        **settings,
    ).create_engine_config()


def test_nothing_in_the_way(model: Path, adapter: Path) -> None:
    start(model, adapter)


@pytest.mark.parametrize(
    ("settings", "reason", "way_out"),
    [
        pytest.param(
            {"pipeline_parallel_size": 2},
            "the draft pass needs all layers on one rank",
            "set it to 1",
            id="pipeline-parallel",
        ),
        pytest.param(
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "draft rows are not split over ranks",
            "set it to 1",
            id="decode-context-parallel",
        ),
        pytest.param(
            {"prefill_context_parallel_size": 2},
            "draft rows are not split over ranks",
            "set it to 1",
            id="prefill-context-parallel",
        ),
        pytest.param(
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                }
            },
            "the draft pass writes scratch rows into KV blocks",
            "leave it out",
            id="kv-connector",
        ),
        pytest.param(
            {"kv_offloading_size": 1.0},
            "the draft pass writes scratch rows into KV blocks",
            "leave it out",
            id="kv-offloading",
        ),
        pytest.param(
            {"cpu_offload_gb": 1.0},
            "the draft pass shares the model's layers",
            "leave it out",
            id="cpu-offload",
        ),
        pytest.param(
            {"enable_lora": True},
            "vLLM's own LoRA crashes there",
            "leave out --enable-lora",
            id="lora-on-a-cpu",
        ),
    ],
)
def test_refused_settings(
    settings: dict[str, Any],
    reason: str,
    way_out: str,
    model: Path,
    adapter: Path,
) -> None:
    refused(model, adapter, settings, reason, way_out)


def refused(model: Path, adapter: Path, settings: dict[str, Any], *texts: str) -> None:
    with pytest.raises(ValueError) as error:
        start(model, adapter, **settings)
    message = str(error.value)
    for text in ("speculative method 'uno' cannot run", *texts):
        assert text in message, message


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(_MAMBA, "a model without attention", id="mamba"),
        pytest.param(_HYBRID, "a hybrid model", id="hybrid"),
        pytest.param(_ENCODER_DECODER, "an encoder-decoder model", id="encoder-decoder"),
    ],
)
def test_refused_models(config: dict[str, Any], reason: str, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, adapter, {}, reason, "serve it without speculative method 'uno'")
