"""The proposer of tree mode: the same draft pass, but a tree of its rows' best tokens.

V nodes are verified where linear mode verifies B tokens; vLLM's `num_speculative_tokens` is V.
No draft laws are kept: the target's own samples decide which nodes are accepted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_uno.draft_sampling import DraftBatch
from vllm_uno.proposer import UnoProposer
from vllm_uno.tree import state as tree_state
from vllm_uno.tree.backends import (
    check_tree_backends,
    register_tree_backends,
    unregister_tree_backends,
)
from vllm_uno.tree.drafting import TreeDrafter
from vllm_uno.tree.verification import TreeMemory, num_drafted, verify_trees
from vllm_uno.tree.warmup import warm_up_trees
from vllm_uno.vllm_hooks.runner_api import InputBatch, Sampler
from vllm_uno.warmup import filter_jobs


class TreeProposer(UnoProposer):
    """vLLM speculator that drafts trees.

    Attributes:
        memory: the trees, and what verification finds in them (`verification.TreeMemory`).
    """

    kv_cache_kinds = (FullAttentionSpec,)
    copies_logits = True

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.memory = TreeMemory.allocate(self.max_num_reqs, self.num_speculative_steps, device)
        self.verified_depths = self.memory.trees.depths
        # The model is built after this, and chooses its attention backends then.
        register_tree_backends()
        tree_state.install(self.memory.attention)
        weakref.finalize(self, _leave, self.memory.attention)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        check_tree_backends(self.vllm_config)
        return super().load_draft_model(target_model, target_attn_layer_names)

    def _replace_model_state(self, target_model: nn.Module) -> None:
        verify_trees(target_model, self.vllm_config, self.memory)

    def _set_sampler(self, sampler: Sampler) -> None:
        self.drafter = TreeDrafter(
            sampler,
            self.memory.trees,
            self.memory.needs_path,
            self.block_size,
            self.speculative_config.uno_tree_top_k,
        )

    def _buffer_owners(self) -> list[Any]:
        return [self.memory, self.memory.trees, self.drafter, self.drafter.candidates]

    def _warm_up_jobs(self) -> list[Callable[[], object]]:
        return filter_jobs(self.vocab_size, self.device)

    def _capture_sampling(self) -> None:
        """Trees are built eagerly: what is left is to compile their kernels."""
        warm_up_trees(
            self.drafter.sampler,
            self.drafter,
            self.memory,
            self.model_state.uno_compact,
            self.dtype,
        )

    def _after_verification(self, input_batch: InputBatch, num_sampled: torch.Tensor) -> None:
        if num_drafted(input_batch) > 0:
            self.model_state.uno_compact(input_batch, num_sampled)

    def _sample(self, hidden_states: torch.Tensor, batch: DraftBatch, out: torch.Tensor) -> None:
        drafting = self.rows.drafting[: len(batch.idx_mapping_np)]
        self.drafter(hidden_states, self.compute_logits, batch, drafting, out)


def _leave(state: tree_state.TreeState) -> None:
    """The engine is gone: the next one in this process has vLLM's own backends."""
    if tree_state.installed() is state:
        tree_state.install(None)
        unregister_tree_backends()
