"""The compiled draft view in CUDA graphs, replayed a thousand times.

A file of its own: an engine that ends takes the process's distributed groups with it, and those of
another file's engine, were it still running.
"""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import engine
from poisoned import poison
from prompts import make_prompts
from vllm import SamplingParams

from vllm_uno.lora_linear import slow_layers
from vllm_uno.vllm_hooks.runner_api import build_slot_mappings_by_layer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "fp8"])
def test_a_thousand_replays_of_the_view_under_a_poisoned_allocator(
    model: Path, adapter: Path, quantised: bool
) -> None:
    """Every draft pass of a running engine, replayed again and again between poisonings of what
    the allocator has free: each time bit for bit the same, and what the compiled view computes
    without graphs. (A draft pass writes the same KV rows each time.) With the kernels' LoRA."""
    settings = {"uno_lora_path": str(adapter), "num_speculative_tokens": 8}
    if quantised:
        settings["uno_draft_quantization"] = "fp8"
    with engine(
        model, settings, enforce_eager=False, dtype="bfloat16", attention_backend="TRITON_ATTN"
    ) as running:
        speculator = running.speculator
        assert not slow_layers(speculator.model)
        manager, replay = speculator.cudagraph_manager, speculator.cudagraph_manager.run_fullgraph
        propose = speculator.propose
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        apart: list[torch.Tensor] = []
        sizes: list[int] = []

        def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(
                manager, "run_fullgraph", side_effect=functools.partial(many, batch)
            ):
                return propose(batch, *args, **kwargs)

        def many(batch: Any, desc: Any) -> None:
            rows = batch.num_reqs * speculator.block_size
            slots = speculator.rows.slots[:, : desc.num_tokens]
            eager = speculator._forward(
                desc.num_tokens,
                speculator._build_metadata(desc, batch),
                build_slot_mappings_by_layer(slots, speculator.kv_cache_config),
            )[:rows].clone()
            found = speculator.hidden_states[:rows]
            for number in range(24):
                speculator.hidden_states.fill_(float("nan"))
                if number % 4 == 0:
                    poison()
                replay(desc)
                if number == 0:
                    first = found.clone()
                wrong.add_((found != first).sum())
                sizes.append(desc.num_tokens)
            scale = eager.float().abs().amax(1, keepdim=True)
            apart.append(((first.float() - eager.float()).abs() / scale).max())

        with mock.patch.object(speculator, "propose", side_effect=watched):
            params = [
                SamplingParams(temperature=0.0, max_tokens=8 + 12 * i, ignore_eos=True)
                for i in range(8)
            ]
            running.tokens(make_prompts(2048, 8), params)
        assert len(sizes) >= 1000 and len(set(sizes)) >= 4
        assert int(wrong) == 0
        assert float(torch.stack(apart).max()) < 3e-2  # NaN is not
