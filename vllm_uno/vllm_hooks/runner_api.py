"""What UNO imports from vLLM's V2 model runner, in one place.

Imported in workers only (it pulls in the runner's modules). `check_runner_api`
is called before the proposer is built, so that a vLLM whose private parts have
moved fails at start-up with its version, not in the middle of a request.
"""

from __future__ import annotations

import inspect

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
)
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import _load_ptr as load_ptr
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.dp_utils import DPSyncState, dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    InputBuffers,
    get_num_sampled_and_rejected,
)
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.gumbel import (
    gumbel_noised_argmax,
    gumbel_sample,
    murmur3_hash32,
)
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, use_penalty
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_uno.vllm_hooks.hook import UnsupportedVllm, installed_vllm

__all__ = [
    "NO_LOGPROBS",
    "PAD_SLOT_ID",
    "PROCESSED_LOGPROBS_MODES",
    "AttentionCGSupport",
    "BadWordsState",
    "BatchExecutionDescriptor",
    "BlockTables",
    "CudaGraphManager",
    "DPSyncState",
    "DraftModelSpeculator",
    "InputBatch",
    "InputBuffers",
    "LogitBiasState",
    "LogitsContext",
    "LogprobsTensors",
    "ModelState",
    "PenaltiesState",
    "Sampler",
    "SamplerOutput",
    "SamplingStates",
    "apply_top_k_top_p",
    "async_tensor_h2d",
    "build_attn_metadata",
    "build_slot_mappings_by_layer",
    "check_runner_api",
    "compute_topk_scores",
    "dispatch_cg_and_sync_dp",
    "filter_scratch",
    "get_max_chunk_logits",
    "get_num_nans",
    "get_num_sampled_and_rejected",
    "gumbel_noised_argmax",
    "gumbel_sample",
    "init_attn_backend",
    "load_ptr",
    "murmur3_hash32",
    "rejection_sample",
    "resolve_model_state_cls",
    "tl",
    "triton",
    "use_penalty",
]

_PARAMETERS: dict[object, tuple[str, ...]] = {
    DraftModelSpeculator.propose: (
        "self",
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
        "last_sampled",
        "next_prefill_tokens",
        "temperature",
        "seeds",
        "dp_sync_state",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "mm_inputs",
        "is_profile",
        "num_speculative_tokens",
    ),
    DraftModelSpeculator.load_draft_model: ("self", "target_model", "target_attn_layer_names"),
    DraftModelSpeculator.set_attn: (
        "self",
        "model_state",
        "kv_cache_config",
        "block_tables",
        "target_input_buffers",
        "target_attn_groups",
    ),
    DraftModelSpeculator._build_attn_metadata: (
        "self",
        "num_reqs",
        "batch_desc",
        "query_start_loc_np",
        "seq_lens_cpu_upper_bound",
        "step",
        "causal",
        "dcp_local_seq_lens",
        "slot_mappings",
    ),
    ModelState.custom_sampler: ("self", "sampler"),
    gumbel_sample: (
        "logits",
        "expanded_idx_mapping",
        "temperature",
        "seed",
        "pos",
        "apply_temperature",
        "is_drafting",
        "logits_cache",
        "logits_cache_col",
        "use_fp64",
        "logits_cache_source",
    ),
    gumbel_noised_argmax.fn: (
        "logits",
        "keys",
        "mask",
        "seed",
        "pos",
        "temp",
        "IS_DRAFTING",
        "USE_FP64",
        "APPLY_TEMPERATURE",
    ),
}


def check_runner_api() -> None:
    """Raise `UnsupportedVllm` if a private function we call has other parameters."""
    for function, expected in _PARAMETERS.items():
        found = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        if found != expected:
            name = getattr(function, "__qualname__", str(function))
            raise UnsupportedVllm(
                f"vllm-uno does not fit the model runner of vLLM {installed_vllm()}: {name} "
                f"takes {found}, expected {expected}"
            )


def filter_scratch() -> list[torch.Tensor]:
    """The buffers in which `apply_top_k_top_p` has worked so far on any device.

    vLLM replaces one when a batch needs a larger one. A graph that was captured over it needs
    it to stay: keep these as long as the graph.
    """
    found = list(topk_topp_triton._TRITON_BUFFER_CACHE.values())
    for tables in topk_topp_triton._TRITON_TABLE_CACHE.values():
        found += tables
    for split in topk_topp_triton._TRITON_SPLIT_CACHE.values():
        found += split.values()
    return found
