"""What tree mode's sampling needs for a moment is bounded, however many rows it verifies."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peak import Peak

import vllm_uno

vllm_uno.register()  # the interpreter's mends

from vllm_uno import proposer  # noqa: E402
from vllm_uno.tree.proposer import TreeProposer  # noqa: E402

GIB = 2**30
VOCAB = 151_936


def profiled(max_num_reqs: int, nodes: int, max_num_tokens: int = 8192) -> int:
    """Bytes that vLLM's memory profile sees of sampling, at B = 16 on Qwen3's vocabulary."""

    def logits(hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.new_empty(len(hidden_states), VOCAB)

    hidden_states = torch.empty(1, 8, dtype=torch.bfloat16, device="meta")
    it: Any = SimpleNamespace(
        input_buffers=SimpleNamespace(input_ids=torch.zeros(1), positions=torch.zeros(1)),
        _checked_loras=True,
        _forward=lambda *a: hidden_states,
        compute_logits=logits,
        reduced_head=None,
        copies_logits=TreeProposer.copies_logits,
        vocab_size=VOCAB,
        block_size=16,
        max_num_reqs=max_num_reqs,
        num_speculative_steps=nodes,
        max_num_tokens=max_num_tokens,
    )
    gpu = mock.patch.object(proposer, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with gpu, Peak() as seen, torch.inference_mode():
        TreeProposer._profile(it, 1)
    return seen.peak


def test_128_requests_of_32_nodes() -> None:
    logits = 128 * 33 * VOCAB * 2  # 1.195 GiB in bf16
    chunks = 2 * GIB  # of fp32: z, and what a filter makes of it
    assert logits + 0.99 * chunks < profiled(128, 32) < logits + chunks < 3.2 * GIB


@pytest.mark.parametrize("nodes", [32, 64, 128])
def test_logits_alone_grow_with_the_tree(nodes: int) -> None:
    rows = min(128 * (nodes + 1), 8192)  # of a step
    assert profiled(128, nodes) < rows * VOCAB * 2 + 2 * GIB < 4.4 * GIB
