"""The proposer: one draft pass per cycle over the target's own KV cache.

`UnoProposer.propose` is the method's draft half in order: pick a graph, prepare
the rows, run the draft view, sample each row from its marginal. Everything the
pass writes into the KV cache is scratch: the verify pass recomputes the seed's
row and the drafted tokens' rows on base weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from vllm_uno.adapter import load_adapter
from vllm_uno.adapter_source import AdapterSource, fetch_adapter
from vllm_uno.draft_context import DraftBlocks
from vllm_uno.draft_fp8 import Fp8Weights
from vllm_uno.draft_graphs import capture_draft_graphs, capture_sampling_graphs
from vllm_uno.draft_head import ReducedHead
from vllm_uno.draft_inputs import DraftRows, prepare_draft_inputs
from vllm_uno.draft_law import FILTER_ROWS, LawRows
from vllm_uno.draft_sampling import HEAD_ROWS, DraftBatch, DraftSampler
from vllm_uno.draft_view import build_draft_view, check_every_lora_runs
from vllm_uno.draft_vocab import read_draft_vocab
from vllm_uno.graph_sizes import covered_requests, draft_graph_sizes
from vllm_uno.lora_kernels import slow_path
from vllm_uno.lora_linear import slow_layers
from vllm_uno.memory import footprint, sampling_peak
from vllm_uno.metrics import DraftCounters
from vllm_uno.serving_stats import StepRecorder
from vllm_uno.verification import keep_sampler
from vllm_uno.vllm_hooks.cuda_graphs import GraphProfile
from vllm_uno.vllm_hooks.runner_api import (
    AttentionCGSupport,
    BatchExecutionDescriptor,
    BlockTables,
    CudaGraphManager,
    DPSyncState,
    DraftModelSpeculator,
    InputBatch,
    InputBuffers,
    ModelState,
    Sampler,
    build_slot_mappings_by_layer,
    check_runner_api,
    dispatch_cg_and_sync_dp,
    get_max_chunk_logits,
    init_attn_backend,
)
from vllm_uno.warmup import run_at_once, sampling_jobs

logger = init_logger("vllm.uno")


def _all_mid_prefill(batch: InputBatch) -> bool:
    """Host-known: no request of the batch samples in this step."""
    done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
    return bool(np.all(done[: batch.num_reqs] < batch.prefill_len_np[: batch.num_reqs]))


class UnoProposer(DraftModelSpeculator):
    """vLLM speculator whose draft model is a view of the target.

    Attributes:
        block_size: B; in linear mode also vLLM's `num_speculative_tokens`.
        model: the draft view (after `load_model`).
        counters: acceptance of real drafts (`metrics.DraftCounters`).
        recorder: what goes to vLLM's statistics (`serving_stats.StepRecorder`).
        one_hot: bool [max_num_reqs], by request-state slot: has a grammar (draft_law.py). Linear
            mode's; trees are walked by the target's samples.
    """

    # Of a sliding window vLLM frees blocks that no position from C on sees: the draft pass reads
    # what the next verify pass reads, and writes from C on.
    kv_cache_kinds: tuple[type, ...] = (FullAttentionSpec, SlidingWindowSpec)
    # Whether some requests' logits are gathered from a part's before they are sampled.
    copies_logits = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any) -> None:
        check_runner_api()
        spec: Any = vllm_config.speculative_config
        if spec.draft_sample_method == "probabilistic":
            requests = vllm_config.scheduler_config.max_num_seqs
            rows = requests * spec.num_speculative_tokens
            laws = 4 * rows * vllm_config.model_config.get_vocab_size()
            if laws > 2**30:  # said before they are made: they may not fit
                logger.info(
                    "UNO: draft laws take %.1f GiB (max_num_seqs %d x %d x vocabulary, fp32); for "
                    "less lower max_num_seqs, or set draft_sample_method to 'greedy'",
                    laws / 2**30,
                    requests,
                    spec.num_speculative_tokens,
                )
        # The base class sizes its buffers by the draft model's config: here the
        # target's. It must not reach other readers of the real config.
        shadow = copy.copy(vllm_config)
        shadow.speculative_config = copy.copy(vllm_config.speculative_config)
        shadow.speculative_config.draft_model_config = vllm_config.model_config
        super().__init__(shadow, device)
        self.vllm_config = vllm_config
        self.speculative_config: Any = vllm_config.speculative_config
        self.req_states = req_states
        self.block_size: int = self.speculative_config.block_size
        self.num_query_per_req = self.block_size
        self.noise_range = (
            self.speculative_config.uno_noise_low,
            self.speculative_config.uno_mask_token_id,
        )
        num_rows = self.max_num_reqs * self.block_size
        # `validate` has seen to it that the base class's buffers hold every row.
        assert num_rows <= self.max_num_tokens
        self.hidden_states = torch.zeros(
            num_rows, self.hidden_size, dtype=self.dtype, device=device
        )
        self.one_hot = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        self.counters = DraftCounters(self.block_size, device)
        self.recorder = StepRecorder(self.counters, device)
        self.cudagraph_manager: CudaGraphManager | None = None
        self.sampling_graphs: CudaGraphManager | None = None
        # While vLLM measures what graphs will take (vllm_hooks/cuda_graphs.py).
        self.graph_profile: GraphProfile | None = None
        self._graph_scratch: list[torch.Tensor] = []
        self.draft_sampler: DraftSampler | None = None
        self.reduced_head: ReducedHead | None = None
        self.fp8: Fp8Weights | None = None
        self._checked_loras = False
        self._told_memory = False
        self._warmed_up = False
        self.verified_depths: torch.Tensor | None = None

    # --- loading -----------------------------------------------------------

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        # vLLM's default is bf16: rounding the law that the test divides by makes
        # the test inexact.
        return torch.float32, float("-inf")

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        self.attn_layer_names = set(target_attn_layer_names)
        self._replace_model_state(target_model)
        source = AdapterSource.parse(
            self.speculative_config.uno_lora_path, self.speculative_config.uno_lora_revision
        )
        loras = load_adapter(fetch_adapter(source), target_model, self.dtype, self.device)
        if self.speculative_config.uno_draft_quantization == "fp8":
            self.fp8 = Fp8Weights(target_model)
            logger.info(  # said before they are made: they may not fit
                "UNO: FP8 draft weights take up to %.1f GiB; without uno_draft_quantization none",
                sum(lora.out_features * lora.a.shape[1] for lora in loras.values()) / 2**30,
            )
        view = build_draft_view(target_model, loras, self.block_size, self.vllm_config, self.fp8)
        logger.info(
            "UNO: adapter %s on %d layers, block size %d", source, len(loras), self.block_size
        )
        if self.fp8 is not None:
            self.fp8.check()
        slow = slow_path(self.device)
        if slow is not None:
            logger.warning("UNO: the adapter runs in plain PyTorch, which is slow: %s", slow)
        elif self.device.type == "cuda" and (layers := slow_layers(view)):
            logger.warning(
                "UNO: the adapter runs in plain PyTorch, which is slow, on %d of %d layers (%s, "
                "...): kernels take bf16 or fp16, ranks up to 256 and at most three slices of a "
                "layer's output, which end at multiples of 32",
                len(layers),
                len(loras),
                layers[0],
            )
        path = self.speculative_config.uno_draft_vocab
        if path is not None:
            self.reduced_head = ReducedHead(
                view,
                target_model,
                read_draft_vocab(path, self.vocab_size),
                self.vocab_size,
                self.hidden_size,
                self.dtype,
                self.device,
            )
        return view

    def _replace_model_state(self, target_model: nn.Module) -> None:
        keep_sampler(target_model, self.vllm_config, self.one_hot)

    def weights_reloaded(self) -> None:
        """Told by vLLM's runner: what was made of the target's weights is stale."""
        for derived in (self.reduced_head, self.fp8):
            if derived is not None:
                derived.watch.note()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft logits [rows, V] of [rows, H]; -inf outside a draft vocabulary."""
        logits: torch.Tensor = (self.reduced_head or self.model.compute_logits)(hidden_states)
        return logits

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[Any]],
    ) -> None:
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            specs = getattr(spec, "kv_cache_specs", None)
            for one in specs.values() if specs else (spec,):
                # Exactly these classes: others keep latents, or a recurrent state.
                if type(one) not in self.kv_cache_kinds:
                    kinds = " and ".join(kind.__name__ for kind in self.kv_cache_kinds)
                    raise ValueError(
                        f"UNO supports KV caches of kind {kinds} only in uno_mode "
                        f"'{self.speculative_config.uno_mode}'; this model has a "
                        f"{type(one).__name__}. Remove the speculative config to serve it."
                    )
        self.model_state = model_state
        self.kv_cache_config = kv_cache_config
        self.kv_blocks = block_tables
        # What attention metadata is built from.
        self.block_tables: Any = block_tables
        self.draft_blocks: DraftBlocks | None = None
        context = self.speculative_config.uno_draft_context
        if context is not None:
            self._refuse_partial_context(kv_cache_config)
            self.draft_blocks = DraftBlocks(block_tables, context, self.block_size)
            self.block_tables = self.draft_blocks
        # Builders of our own: their scratch (FlashAttention's schedule) must not
        # be shared with the verify graphs.
        self.attn_groups, self.attn_cg_support, _ = init_attn_backend(
            kv_cache_config,
            self.vllm_config,
            self.device,
            active_layer_names=self.attn_layer_names,
        )
        self._configure_decode_metadata_update()
        self.rows = DraftRows.allocate(
            block_tables.num_kv_cache_groups, self.max_num_reqs, self.block_size, self.device
        )
        self._set_sampler(model_state.uno_sampler)
        model_state.uno_recorder = self.recorder
        self._tell_memory()
        self._warm_up()

    @staticmethod
    def _refuse_partial_context(kv_cache_config: KVCacheConfig) -> None:
        specs: list[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        # Without its hybrid manager vLLM has windows in the specs of full attention.
        if (
            len(specs) != 1
            or type(specs[0]) is not FullAttentionSpec
            or specs[0].sliding_window is not None
        ):
            raise ValueError(
                "uno_draft_context needs a model with one kind of KV cache, whose layers all "
                f"attend to the whole context; this one has {len(specs)} "
                f"({', '.join(sorted({type(spec).__name__ for spec in specs}))}), or a sliding "
                "window. Leave it out."
            )

    def _set_sampler(self, sampler: Sampler) -> None:
        law_rows = LawRows.allocate(
            self.block_size,
            self.vocab_size,
            request=self.rows.request,
            positions=self.input_buffers.positions,
            drafting=self.rows.drafting,
        )
        self.draft_sampler = DraftSampler(sampler, law_rows, self.draft_logits, self.reduced_head)

    def _tell_memory(self) -> None:
        if self._told_memory:  # vLLM sets attention up twice, once to profile graphs
            return
        self._told_memory = True
        head = [] if self.reduced_head is None else self.reduced_head.tensors
        found = footprint(
            self.model,
            self.draft_logits,
            head,
            self.device,
            self,
            self.input_buffers,
            self.rows,
            self.counters,
            *([] if self.draft_blocks is None else [self.draft_blocks]),
            *self._buffer_owners(),
        )
        logger.info("UNO takes %s", found.line())

    def _buffer_owners(self) -> list[Any]:
        assert self.draft_sampler is not None
        return [self.draft_sampler.rows]

    # --- CUDA graphs -------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        support = self.attn_cg_support
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        if full and support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
            logger.warning(
                "UNO: attention backend %s has no CUDA graphs for uniform batches; the draft "
                "pass runs eagerly",
                support.min_cg_attn_backend,
            )
            full = False
        shadow = copy.copy(self.vllm_config)
        shadow.compilation_config = copy.copy(self.vllm_config.compilation_config)
        shadow.compilation_config.cudagraph_capture_sizes = draft_graph_sizes(
            max(self.vllm_config.compilation_config.cudagraph_capture_sizes or [0]),
            self.block_size,
            self.max_num_reqs,
        )
        self.cudagraph_manager, self.sampling_graphs = (
            CudaGraphManager(
                shadow,
                self.device,
                CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
                decode_query_len=self.block_size,
            )
            for _ in range(2)
        )

    def capture(self) -> None:
        assert self.cudagraph_manager is not None and self.sampling_graphs is not None
        if self.graph_profile is not None:
            self.graph_profile.limit_drafts(self.cudagraph_manager)
        free_before = torch.accelerator.get_memory_info()[0]
        capture_draft_graphs(
            self.cudagraph_manager,
            self._forward_into_buffer,
            self._update_draft_decode_metadata if self.supports_decode_metadata_update else None,
            buffers=self.input_buffers,
            slots=self.rows.slots,
            block_tables=self.block_tables,
            attn_groups=self.attn_groups,
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
        )
        self._capture_sampling()
        if self.graph_profile is not None:
            return
        graphs = max(0, free_before - torch.accelerator.get_memory_info()[0])
        compilation = self.vllm_config.compilation_config
        chosen = getattr(self.speculative_config, "uno_graph_sizes", None)
        sizes = chosen.verify if chosen else compilation.cudagraph_capture_sizes or []
        verify_full = compilation.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        logger.info(
            "UNO: draft CUDA graphs take %.2f GiB; graphs cover draft passes of up to %d and "
            "verify passes of up to %d requests (max_num_seqs=%d), larger batches run without",
            graphs / 2**30,
            max((desc.num_reqs or 0 for desc in self.cudagraph_manager.graphs), default=0),
            covered_requests(sizes, self.num_speculative_steps + 1, self.max_num_reqs)
            if verify_full
            else 0,
            self.max_num_reqs,
        )

    def _capture_sampling(self) -> None:
        assert self.sampling_graphs is not None
        self._graph_scratch = capture_sampling_graphs(self.sampling_graphs, self._sample_plain)

    def _warm_up(self) -> None:
        # Attention is set up twice, see above. Where vLLM compiles nothing ahead, nor do we.
        wanted = self.vllm_config.kernel_config.enable_jit_warmup and self.device.type != "cpu"
        if self._warmed_up or not wanted:
            return
        self._warmed_up = True
        run_at_once(self._warm_up_jobs(), self.device)
        # The KV cache is allocated next.
        torch.accelerator.empty_cache()

    def _warm_up_jobs(self) -> list[Callable[[], object]]:
        assert self.draft_sampler is not None
        return sampling_jobs(
            self.draft_sampler.sampler,
            self.draft_logits,
            self.block_size,
            self.vocab_size,
            self.dtype,
            self.device,
        )

    # --- one draft pass ----------------------------------------------------

    def _forward(
        self,
        num_rows: int,
        attn_metadata: dict[str, Any] | None,
        slots_by_layer: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
        skip_compiled: bool = False,
    ) -> torch.Tensor:
        """The view over the first `num_rows` rows of the buffers: [num_rows, H]."""
        buffers = self.input_buffers
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            # Never PIECEWISE: the view's pieces have no graphs of their own.
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slots_by_layer,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            is_padding=buffers.is_padding[:num_rows],
            skip_compiled=skip_compiled,
        ):
            hidden_states: torch.Tensor = self.model(
                input_ids=buffers.input_ids[:num_rows],
                positions=buffers.positions[:num_rows],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden_states

    def _forward_into_buffer(
        self,
        num_rows: int,
        attn_metadata: dict[str, Any] | None,
        slots_by_layer: dict[str, torch.Tensor] | None,
    ) -> None:
        hidden_states = self._forward(num_rows, attn_metadata, slots_by_layer)
        self.hidden_states[:num_rows].copy_(hidden_states)

    def _sample_plain(self, num_reqs: int) -> None:
        """Plain draft tokens of the first `num_reqs` requests, from their hidden states."""
        assert self.draft_sampler is not None
        self.draft_sampler.sample_plain(
            self.hidden_states[: num_reqs * self.block_size],
            self.compute_logits,
            self.draft_tokens[:num_reqs],
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft for every request of the batch just verified.

        Called after vLLM's `post_update`, on the same stream: positions and last
        tokens are read from GPU state, so the host waits for nothing.

        Returns:
            int64 [num_reqs, num_speculative_tokens] draft tokens; 0 for requests that do not
            draft.
        """
        num_reqs = input_batch.num_reqs
        block = self.block_size
        if dummy_run and skip_attn_for_dummy_run:
            self._profile(num_reqs)
            return self.draft_tokens[:num_reqs]
        num_rows = num_reqs * block
        if num_speculative_tokens == 0 and not dummy_run and self.dp_size == 1:
            # A schedule by batch size (num_speculative_tokens_per_batch_size) turns drafts off.
            self.recorder.draft_left_out()
            return self.draft_tokens[:num_reqs]
        if dummy_run:
            self.recorder.drop()
        else:
            self.recorder.draft_begins()
            self._after_verification(input_batch, num_sampled)
        if not dummy_run and self.dp_size == 1 and _all_mid_prefill(input_batch):
            # Nobody can draft yet. (Data-parallel ranks must run the pass together.)
            self.recorder.drop()
            return self.draft_tokens[:num_reqs]

        if self.reduced_head is not None:
            self.reduced_head.refresh()
        if self.fp8 is not None:
            self.fp8.refresh()
        desc, dp_sync = self._dispatch(num_reqs, dp_sync_state, need_eager=is_profile)
        full_graph = desc.cg_mode == CUDAGraphMode.FULL
        # More than `num_reqs` in a graph, and where data-parallel ranks agreed on more rows.
        padded_reqs = desc.num_tokens // block
        prepare_draft_inputs(
            self.input_buffers,
            self.rows,
            self.counters.tensors,
            idx_mapping=input_batch.idx_mapping,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            num_computed_tokens=self.req_states.num_computed_tokens.gpu,
            prefill_len=self.req_states.prefill_len.gpu,
            last_sampled=last_sampled,
            seeds=seeds,
            block_tables=self.kv_blocks,
            block_size=block,
            padded_reqs=padded_reqs,
            max_model_len=self._length_limit(),
            noise_seed=self.speculative_config.uno_noise_seed,
            noise_range=self.noise_range,
            live=not dummy_run,
            verified_depths=self.verified_depths,
        )
        if self.draft_blocks is not None:
            self.draft_blocks.shorten(self.input_buffers.seq_lens, num_reqs)
        if self.draft_sampler is not None:
            self.draft_sampler.rows.gather(
                input_batch.idx_mapping,
                self.draft_sampler.sampler.sampling_states,
                self.one_hot,
                padded_reqs,
            )
        if full_graph and self.supports_decode_metadata_update:
            draft_metadata = None  # refreshed inside the graph
        else:
            draft_metadata = self._build_metadata(desc, input_batch)
        if full_graph:
            assert self.cudagraph_manager is not None
            self.cudagraph_manager.run_fullgraph(desc)
            hidden_states = self.hidden_states[:num_rows]
        else:
            slots = self.rows.slots[:, : desc.num_tokens]
            hidden_states = self._forward(
                desc.num_tokens,
                draft_metadata,
                build_slot_mappings_by_layer(slots, self.kv_cache_config),
                None if dp_sync is None else dp_sync.num_tokens_across_dp,
            )[:num_rows]
        if dummy_run:
            return self.draft_tokens[:num_reqs]

        slots_np = input_batch.idx_mapping_np[:num_reqs]
        if (
            full_graph
            and self.draft_sampler is not None
            and self.sampling_graphs is not None
            and desc in self.sampling_graphs.graphs
            and self.draft_sampler.is_plain(slots_np)
        ):
            self.sampling_graphs.run_fullgraph(desc)
            self._drafted(desc, num_speculative_tokens)
            return self.draft_tokens[:num_reqs]
        batch = DraftBatch(
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=slots_np,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy() + block,
            input_ids=self.input_buffers.input_ids[:num_rows],
            positions=self.input_buffers.positions[:num_rows],
        )
        self._sample(hidden_states, batch, self.draft_tokens[:num_reqs])
        self._drafted(desc, num_speculative_tokens)
        return self.draft_tokens[:num_reqs]

    def _drafted(self, desc: BatchExecutionDescriptor, asked_for: int | None) -> None:
        width = self.num_speculative_steps if asked_for is None else asked_for
        self.recorder.draft_ends(desc.cg_mode.name, width)

    def _after_verification(self, input_batch: InputBatch, num_sampled: torch.Tensor) -> None:
        """Before anything of the draft pass runs."""

    def _sample(self, hidden_states: torch.Tensor, batch: DraftBatch, out: torch.Tensor) -> None:
        """Write draft tokens [n, num_speculative_tokens] from hidden states [n * B, H]."""
        assert self.draft_sampler is not None
        self.draft_sampler(hidden_states, self.compute_logits, batch, out)

    def _length_limit(self) -> int:
        # Not `self.max_model_len`: `--max-model-len auto` lowers the runner's later on.
        limit: int = self.req_states.max_model_len
        return limit

    def _dispatch(
        self, num_reqs: int, dp_sync_state: DPSyncState | None, need_eager: bool
    ) -> tuple[BatchExecutionDescriptor, DPSyncState | None]:
        block = self.block_size
        sync, num_tokens = (
            (None, num_reqs * block)
            if dp_sync_state is None
            else self._build_uniform_batch_dp_sync(dp_sync_state, num_reqs, block)
        )
        return dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            num_reqs,
            num_tokens,
            uniform_token_count=block,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=need_eager,
            dp_sync_state=sync,
        )

    def _build_metadata(
        self, desc: BatchExecutionDescriptor, input_batch: InputBatch
    ) -> dict[str, Any] | None:
        num_reqs = input_batch.num_reqs
        block = self.block_size
        longest = int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy().max())
        self.draft_max_seq_len = min(longest + block, self._length_limit())
        if self.draft_blocks is not None:
            self.draft_max_seq_len = min(self.draft_max_seq_len, self.draft_blocks.max_seq_len)
        num_tokens = desc.num_tokens if desc.cg_mode == CUDAGraphMode.FULL else num_reqs * block
        return self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=desc,
            query_start_loc_np=self.arange_np[: num_reqs + 1] * block,
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
            step=block,
            slot_mappings=self.rows.slots[:, :num_tokens],
        )

    def _profile(self, num_reqs: int) -> None:
        """vLLM's memory profile: a pass wider than any draft, without attention or KV cache."""
        self.input_buffers.input_ids.fill_(0)
        self.input_buffers.positions.fill_(0)
        if not self._checked_loras:
            rows = min(num_reqs, 2) * self.block_size
            check_every_lora_runs(
                self.model, lambda: self._forward(rows, None, None, skip_compiled=True)
            )
            self._checked_loras = True
        # The first compiled call: Inductor writes its kernels for the number of rows that it
        # sees. vLLM's profile has just run the target on as many, so kernels that the view
        # has in common with it come out the same, and their binaries from Triton's cache.
        hidden_states = self._forward(self.max_num_tokens, None, None)
        if not current_platform.is_cpu():
            chunk_rows = get_max_chunk_logits(self.vocab_size)
            draft_rows = min(self.max_num_reqs * self.block_size, HEAD_ROWS, chunk_rows)
            sampling_peak(
                self.compute_logits,
                # Not the target's own: a user's LoRA knows the profile's few sampled rows only.
                self.reduced_head.whole if self.reduced_head else self.compute_logits,
                hidden_states,
                draft_rows=draft_rows,
                copied_rows=draft_rows if self.copies_logits else 0,
                filtered_rows=FILTER_ROWS,
                verify_rows=min(
                    self.max_num_reqs * (self.num_speculative_steps + 1), self.max_num_tokens
                ),
                chunk_rows=chunk_rows,
            )
