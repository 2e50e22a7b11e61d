"""Compile the kernels of tree mode before serving, on rows of nobody.

vLLM's warm-up runs without drafts, so it meets none of them. Requests of slot -1 are read and
written nowhere, which leaves the kernels' variants: one for each dtype of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm_uno.tree.builder import build_trees
from vllm_uno.tree.candidates import select_candidates
from vllm_uno.tree.drafting import TreeDrafter
from vllm_uno.tree.rows import gather_rows, write_depth_positions
from vllm_uno.tree.verification import TreeMemory
from vllm_uno.tree.walk import walk_trees
from vllm_uno.vllm_hooks.runner_api import Sampler, gumbel_sample


def warm_up_trees(
    sampler: Sampler,
    drafter: TreeDrafter,
    memory: TreeMemory,
    compact: Callable[[Any, torch.Tensor], None],
    dtype: torch.dtype,
) -> None:
    """Run drafting and verification once for each variant of their kernels.

    Args:
        sampler: the target's; its sampling state is read, not changed.
        drafter: its scratch is written.
        memory: the trees; not changed.
        compact: the model state's `uno_compact`.
        dtype: of unprocessed logits.
    """
    trees, device = memory.trees, memory.path.device
    states, vocab_size = sampler.sampling_states, sampler.sampling_states.vocab_size
    block, num_nodes = drafter.block_size, trees.tokens.shape[1]
    nobody = torch.full((1,), -1, dtype=torch.int64, device=device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    temperature = states.temperature.gpu

    logits = torch.zeros(block, vocab_size, dtype=dtype, device=device)
    select_candidates(drafter.candidates, logits, nobody, temperature)
    build_trees(
        trees,
        torch.zeros(1, num_nodes, dtype=torch.int64, device=device),
        drafter.candidates,
        idx_mapping=nobody,
        roots=drafter.roots[:1],
        is_chain=torch.zeros(1, dtype=torch.bool, device=device),
        chain_tokens=drafter.chains[:1],
    )
    for kind in {dtype, torch.float32}:
        gumbel_sample(
            logits[:1].to(kind),
            one,
            temperature,
            states.seeds.gpu,
            one,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )

    # One request of one row: no node's position is written.
    rows: Any = SimpleNamespace(
        input_ids=torch.zeros(1, dtype=torch.int32, device=device),
        positions=one,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
        cu_num_logits=torch.tensor([0, 1], dtype=torch.int32, device=device),
        idx_mapping=one,
        logits_indices=one,
        expanded_idx_mapping=one,
        expanded_local_pos=one.int(),
    )
    write_depth_positions(rows, 1, trees.depths)
    row_tokens, _ = gather_rows(rows, sampler.req_states.prefill_len.gpu)
    num_sampled = torch.zeros(1, dtype=torch.int32, device=device)
    walk_trees(
        memory.path,
        num_sampled,
        torch.zeros(1, num_nodes + 1, dtype=torch.int64, device=device),
        target_tokens=one,
        row_tokens=row_tokens,
        cu_num_logits=rows.cu_num_logits,
        idx_mapping=nobody,
        trees=trees,
    )
    compact(rows, num_sampled)
