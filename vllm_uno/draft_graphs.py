"""FULL CUDA graphs of the draft pass, by number of requests.

Two for each number, replayed one behind the other: the refresh of the attention
metadata and the view's forward up to the hidden states; then lm_head and the
sampling of plain batches (draft_sampling.py), which reads what each request
asks for from the GPU. A batch with logits processors replays the first alone
and samples eagerly. A graph reads only buffers that stay: the draft inputs, the
slots, vLLM's `input_block_tables`, the hidden states and `LawRows`. Batches
outside every graph run the same functions eagerly.

Why two and not one: a batch with processors would pay lm_head twice in one
graph (1.2 GB of weights, 0.3 ms, on an 8B model), and a second copy of the large
graph costs memory and start-up. The second launch costs a gap of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_uno.vllm_hooks.runner_api import (
    PAD_SLOT_ID,
    BatchExecutionDescriptor,
    BlockTables,
    CudaGraphManager,
    InputBatch,
    InputBuffers,
    build_attn_metadata,
    build_slot_mappings_by_layer,
    filter_scratch,
)

DraftForward = Callable[[int, dict[str, Any] | None, dict[str, torch.Tensor] | None], None]
"""(number of rows, attention metadata, slots by layer) -> hidden states in a buffer."""


def capture_draft_graphs(
    manager: CudaGraphManager,
    forward: DraftForward,
    update_metadata: Callable[[dict[str, Any], int], None] | None,
    *,
    buffers: InputBuffers,
    slots: torch.Tensor,
    block_tables: BlockTables,
    attn_groups: list[Any],
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
) -> None:
    """Capture every forward graph of `manager` (uniform batches of its `decode_query_len` rows).

    Args:
        forward: the view's forward over the first rows of `buffers`.
        update_metadata: refreshes attention metadata in place from the buffers,
            recorded ahead of the forward; None where the backend cannot.
        slots: int64 [groups, rows], persistent.
    """

    def create_forward(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[..., None]:
        num_rows = desc.num_tokens
        num_reqs = desc.num_reqs
        assert num_reqs is not None
        batch = InputBatch.make_dummy(num_reqs, num_rows, buffers)
        slots.fill_(PAD_SLOT_ID)
        rows = slots[:, :num_rows]
        metadata = build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_rows,
            query_start_loc_gpu=batch.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
            max_query_len=num_rows // num_reqs,
            seq_lens=batch.seq_lens,
            max_seq_len=max_model_len,
            block_tables=block_tables.get_dummy_block_tables(num_reqs),
            slot_mappings=rows,
            kv_cache_config=kv_cache_config,
            for_cudagraph_capture=True,
        )
        slots_by_layer = build_slot_mappings_by_layer(rows, kv_cache_config)

        def run(mode: CUDAGraphMode) -> None:
            if update_metadata is not None:
                update_metadata(metadata, num_reqs)
            forward(num_rows, metadata, slots_by_layer)

        return run

    manager.capture(create_forward, "Capturing UNO draft CUDA graphs")


def capture_sampling_graphs(
    manager: CudaGraphManager, sample: Callable[[int], None]
) -> list[torch.Tensor]:
    """Capture lm_head and sampling for every size of `manager`.

    Args:
        sample: samples the first requests, as many as it is given, of a plain batch from the
            hidden states in their buffer.

    Returns:
        Buffers of vLLM's that the graphs work in; keep them as long as the graphs.
    """

    def create_forward(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[..., None]:
        num_reqs = desc.num_reqs
        assert num_reqs is not None
        return lambda mode: sample(num_reqs)

    manager.capture(create_forward, "Capturing UNO sampling CUDA graphs")
    return filter_scratch() if manager.graphs else []
