"""The verify step of tree mode: positions, attention, the walk, and the KV that it leaves.

vLLM's runner asks its model state at each of these points, and its rejection sampler for the
tokens; both are ours here.

    add_request      does the request need to know its path (drafting.needs_path)?
    prepare_attn     attention metadata of trees (state.py, backends.py)
    prepare_inputs   node rows get their depths' positions (rows.py)
    TreeSampler      every row's token as plain vLLM samples it, then the walk (walk.py)
    compact          the path's KV to where a chain's would lie, before the next draft
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_uno.serving_stats import WatchedModelState
from vllm_uno.tree.builder import TreeBuffers
from vllm_uno.tree.compaction import KVCaches, compact_kv
from vllm_uno.tree.cpu_layout import compact_kv_cpu
from vllm_uno.tree.drafting import needs_path
from vllm_uno.tree.rows import gather_rows, write_depth_positions
from vllm_uno.tree.state import TreeState
from vllm_uno.tree.synthetic import impose_paths
from vllm_uno.tree.target_sampling import LogitsRows, sample_target
from vllm_uno.tree.walk import walk_trees
from vllm_uno.vllm_hooks.runner_api import (
    NO_LOGPROBS,
    PROCESSED_LOGPROBS_MODES,
    BlockTables,
    InputBatch,
    LogprobsTensors,
    ModelState,
    Sampler,
    SamplerOutput,
    compute_topk_scores,
    get_max_chunk_logits,
    get_num_nans,
    get_num_sampled_and_rejected,
    resolve_model_state_cls,
)

logger = init_logger("vllm.uno")


@dataclass(frozen=True)
class TreeMemory:
    """What draft and verification share, by request-state slot.

    Attributes:
        trees: persistent device buffers, written by the draft, read by verification.
        attention: the same trees as attention sees them.
        path: int32 [max_num_reqs, V + 1], of the last walk.
        needs_path: bool [max_num_reqs], on the host.
    """

    trees: TreeBuffers
    attention: TreeState
    path: torch.Tensor
    needs_path: np.ndarray

    @classmethod
    def allocate(cls, max_num_reqs: int, num_nodes: int, device: torch.device) -> TreeMemory:
        trees = TreeBuffers.allocate(max_num_reqs, num_nodes, device)
        return cls(
            trees=trees,
            attention=TreeState.over(trees.ancestors),
            path=torch.zeros(max_num_reqs, num_nodes + 1, dtype=torch.int32, device=device),
            needs_path=np.zeros(max_num_reqs, dtype=bool),
        )


def num_drafted(batch: InputBatch) -> int:
    """Leading requests of a batch that carry drafts; vLLM sorts them to the front."""
    drafts = batch.num_draft_tokens_per_req
    return 0 if drafts is None else int(np.count_nonzero(drafts))


def verify_trees(target: nn.Module, vllm_config: VllmConfig, memory: TreeMemory) -> None:
    """Make the runner verify trees: its model state, resolved after this, becomes ours.

    The model state gets `uno_sampler`, the target's sampler, and `uno_compact`, which moves the
    KV of the paths just walked: (batch, num_sampled int32 [n]) -> None.
    """
    base: type[ModelState] = resolve_model_state_cls(vllm_config, target)

    class UnoTreeModelState(WatchedModelState, base):
        uno_sampler: Sampler
        uno_compact: Callable[[InputBatch, torch.Tensor], None]

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            chained = needs_path(new_req_data.sampling_params, self.uno_sampler)
            memory.needs_path[req_index] = chained
            if chained:
                # A model's generation_config.json may set a penalty for every request.
                logger.info_once(
                    "UNO: requests with penalties, bad words, a grammar, a thinking budget or "
                    "custom logits processors are verified as chains, not as trees",
                )

        def initialize_kv_cache(
            self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
        ) -> None:
            super().initialize_kv_cache(kv_cache_config, block_tables)
            self.uno_compact = _compaction(vllm_config, memory, kv_cache_config, block_tables)

        def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
            with memory.attention.verifying(input_batch.idx_mapping, num_drafted(input_batch)):
                return super().prepare_attn(input_batch, *args, **kwargs)

        def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> dict[str, Any]:
            write_depth_positions(input_batch, num_drafted(input_batch), memory.trees.depths)
            inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
            if "positions" in inputs:
                raise ValueError("UNO's tree mode does not support the positions of this model")
            return inputs

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
            if super().custom_sampler(sampler) is not None:
                raise ValueError("UNO's tree mode does not support models with their own sampler")
            self.uno_sampler = sampler
            return sampler, TreeSampler(sampler, memory, vllm_config.speculative_config)

    UnoTreeModelState.__name__ = f"UnoTree{base.__name__}"
    target.get_model_state_cls = lambda: UnoTreeModelState  # type: ignore[assignment]


def _compaction(
    vllm_config: VllmConfig,
    memory: TreeMemory,
    kv_cache_config: KVCacheConfig,
    block_tables: BlockTables,
) -> Callable[[InputBatch, torch.Tensor], None]:
    found = vllm_config.compilation_config.static_forward_context
    layers, groups = [], []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            layers.append(found[name])
            groups.append(number)
    on_cpu = current_platform.is_cpu()
    caches = None
    if not on_cpu:
        # Not held here: those made to profile graphs must be free when the real ones are made.
        caches = replace(KVCaches.of([layer.kv_cache for layer in layers], groups), kept=())

    def compact(batch: InputBatch, num_sampled: torch.Tensor) -> None:
        # A request with drafts has no other rows than those of its tree, so its first row is its
        # first token; the others have nothing to move.
        where: dict[str, Any] = {
            "path": memory.path,
            "num_sampled": num_sampled,
            "idx_mapping": batch.idx_mapping,
            "positions": batch.positions,
            "cu_num_logits": batch.query_start_loc,
            "block_tables": block_tables,
        }
        if caches is None:
            compact_kv_cpu(layers, groups, **where)
        else:
            compact_kv(caches, **where)

    return compact


class TreeSampler:
    """In the place of vLLM's rejection sampler: the target's own samples, and the walk.

    Args:
        sampler: the target's.
        memory: the trees, and where paths are written.
        config: the UnoSpeculativeConfig.
    """

    # Read by vLLM's warm-up, of whatever verifies.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, memory: TreeMemory, config: Any) -> None:
        self.sampler = sampler
        self.memory = memory
        self.rates: torch.Tensor | None = None
        if config.rejection_sample_method == "synthetic":
            self.rates = torch.tensor(config.synthetic_acceptance_rates, device=memory.path.device)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """As vLLM's `RejectionSampler`; no host sync.

        Args:
            logits: [rows, vocab] of all verify rows, grammar bitmasks applied.
            input_batch: its positions are depth positions.
            draft_logits: None.
            invalid_drafts: bool [rows], rows whose token a grammar forbids.
        """
        sampler, batch = self.sampler, input_batch
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        row_tokens, positions = gather_rows(batch, sampler.req_states.prefill_len.gpu)
        walked = row_tokens
        if invalid_drafts is not None:
            walked = row_tokens.masked_fill(invalid_drafts, -1)

        num_reqs, width = batch.num_reqs, self.memory.path.shape[1]
        sampled = torch.empty(num_reqs, width, dtype=torch.int64, device=logits.device)
        num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
        max_logprobs = sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        logprobs = []
        for start, stop, first, last in self._chunks(batch, logits):
            rows = LogitsRows(
                slots=batch.expanded_idx_mapping[first:last],
                local_pos=batch.expanded_local_pos[first:last],
                tokens=row_tokens[first:last],
                positions=positions[first:last],
                idx_mapping=batch.idx_mapping[start:stop],
                idx_mapping_np=batch.idx_mapping_np[start:stop],
                seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy()[start:stop],
            )
            target_tokens, processed = sample_target(sampler, logits[first:last], rows)
            self._walk(
                num_sampled[start:stop],
                sampled[start:stop],
                target_tokens,
                walked[first:last],
                rows,
                batch.cu_num_logits[start : stop + 1] - first,
            )
            if max_logprobs != NO_LOGPROBS:
                if sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
                    processed = logits[first:last]
                logprobs.append(self._logprobs(processed, max_logprobs, target_tokens, rows))
            del processed  # the next chunk's comes in its place

        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=_joined(logprobs, batch.cu_num_logits_np.tolist()),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _chunks(
        self, batch: InputBatch, logits: torch.Tensor
    ) -> Iterator[tuple[int, int, int, int]]:
        """(first request, past the last, first row, past the last), 1 GiB of fp32 logits each.

        Cut at every fourth request: what begins at another address is another variant of a kernel.
        """
        starts = batch.cu_num_logits_np
        limit = get_max_chunk_logits(logits.shape[1])
        start = 0
        while start < batch.num_reqs:
            stop = start + 1
            while stop < batch.num_reqs and starts[stop + 1] - starts[start] <= limit:
                stop += 1
            if stop < batch.num_reqs and stop - start > 4:
                stop -= (stop - start) % 4
            yield start, stop, int(starts[start]), int(starts[stop])
            start = stop

    def _walk(
        self,
        num_sampled: torch.Tensor,
        sampled: torch.Tensor,
        target_tokens: torch.Tensor,
        row_tokens: torch.Tensor,
        rows: LogitsRows,
        cu_num_logits: torch.Tensor,
    ) -> None:
        if self.rates is not None:
            impose_paths(
                self.memory.path,
                num_sampled,
                sampled,
                target_tokens=target_tokens,
                row_tokens=row_tokens,
                positions=rows.positions,
                cu_num_logits=cu_num_logits,
                idx_mapping=rows.idx_mapping,
                seeds=self.sampler.sampling_states.seeds.gpu,
                rates=self.rates,
            )
            return
        walk_trees(
            self.memory.path,
            num_sampled,
            sampled,
            target_tokens=target_tokens,
            row_tokens=row_tokens,
            cu_num_logits=cu_num_logits,
            idx_mapping=rows.idx_mapping,
            trees=self.memory.trees,
        )

    def _logprobs(
        self,
        logits: torch.Tensor,
        max_logprobs: int,
        target_tokens: torch.Tensor,
        rows: LogitsRows,
    ) -> LogprobsTensors:
        """Of each row's own sampled token, then in the order of the paths.

        A request's first rows become its path's, where vLLM looks for them; what follows is of
        no meaning.
        """
        scores = compute_topk_scores(
            logits,
            max_logprobs,
            target_tokens,
            None,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
        first = torch.arange(len(target_tokens), device=logits.device) - rows.local_pos
        order = first + self.memory.path[rows.slots, rows.local_pos.long()]
        return LogprobsTensors(
            scores.logprob_token_ids[order],
            scores.logprobs[order],
            scores.selected_token_ranks[order],
        )


def _joined(chunks: list[LogprobsTensors], cu_num_logits: list[int]) -> LogprobsTensors | None:
    if not chunks:
        return None
    return LogprobsTensors.cat(chunks, cu_num_generated_tokens=cu_num_logits)
