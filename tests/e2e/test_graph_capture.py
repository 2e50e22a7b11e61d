"""vLLM's own capture of CUDA graphs, run on a CPU: what is captured runs, nothing is recorded.

It cannot tell whether a replay is right (`tests/gpu` does), but that all graphs that UNO asks for
can be captured together: the sizes of one kind must fit the buffers that another has made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Engine, engine
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils, model_runner

from vllm_uno.graph_sizes import GraphSizes, draft_graph_sizes, graph_sizes
from vllm_uno.vllm_hooks import cuda_graphs

SEQUENCES, ROWS = 24, 512
STEP = 20 << 20  # bytes that every capture seems to take

MODES: dict[str, dict[str, Any]] = {
    "linear": {"num_speculative_tokens": 4},
    "tree": {
        "uno_mode": "tree",
        "uno_block_size": 4,
        "uno_tree_top_k": 4,
        "num_speculative_tokens": 8,
    },
}


class Graph:
    """In the place of a CUDA graph."""


@contextmanager
def captures_run() -> Iterator[None]:
    """vLLM captures CUDA graphs without a GPU."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, by, create=True))

        replace(cudagraph_utils, "graph_capture", lambda device: nullcontext())
        replace(cudagraph_utils, "capture_pool", lambda pool, config: nullcontext(pool))
        # As a compiled model's.
        replace(cudagraph_utils, "has_compiled_submodule", lambda model: True)
        replace(torch.cuda, "CUDAGraph", Graph)
        replace(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
        replace(type(current_platform), "get_global_graph_pool", lambda *args: None)
        for name in ("empty_cache", "synchronize"):
            replace(torch.accelerator, name, lambda *args: None)
        free = itertools.count(1 << 40, -STEP)
        replace(torch.accelerator, "get_memory_info", lambda *args: (next(free), 1 << 40))
        yield


def make_managers(e: Engine) -> GraphSizes:
    """What the runner does where graphs are supported, with small sizes, as `VllmConfig` sets
    them."""
    config = e.runner.vllm_config
    spec, compilation = config.speculative_config, config.compilation_config
    rows = e.runner.decode_query_len
    sizes = graph_sizes(64, spec.block_size, rows, SEQUENCES, ROWS)
    spec.uno_graph_sizes = sizes
    compilation.cudagraph_mode = mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = sizes.all
    compilation.max_cudagraph_capture_size = sizes.all[-1]
    e.runner.cudagraph_manager = model_runner.ModelCudaGraphManager(
        config, e.runner.device, mode, decode_query_len=rows
    )
    e.speculator.attn_cg_support = dataclasses.replace(
        e.speculator.attn_cg_support, min_cg_support=AttentionCGSupport.UNIFORM_BATCH
    )
    e.speculator.init_cudagraph_manager(mode)
    return sizes


@pytest.mark.parametrize("mode", MODES)
def test_all_graphs_can_be_captured(model: Path, adapter: Path, mode: str) -> None:
    uno = {"uno_lora_path": str(adapter), **MODES[mode]}
    with (
        engine(model, uno, max_num_seqs=SEQUENCES, max_num_batched_tokens=ROWS) as e,
        captures_run(),
    ):
        runner, speculator = e.runner, e.speculator
        sizes = make_managers(e)
        # More verify rows than vLLM's largest size: they share its buffer of outputs.
        assert sizes.verify[-1] > 64
        manager = runner.cudagraph_manager
        with mock.patch.object(manager, "run_pw_graph", wraps=manager.run_pw_graph) as ran:
            runner.capture_model(profile_only=True)
        piecewise = [len(call.args[1]["positions"]) for call in ran.call_args_list]
        assert sorted(piecewise) == sorted({*sizes.mixed, sizes.verify[-1]})
        captured = sorted(desc.num_tokens for desc in manager.graphs)
        assert captured == sizes.verify
        drafts = sorted(desc.num_tokens for desc in speculator.cudagraph_manager.graphs)
        assert drafts == draft_graph_sizes(sizes.all[-1], speculator.block_size, SEQUENCES)
        if mode == "linear":
            sampled = sorted(desc.num_tokens for desc in speculator.sampling_graphs.graphs)
            assert sampled == drafts
        # While vLLM measures what graphs take, three draft passes stand for all.
        sizes = make_managers(e)
        speculator.graph_profile = profile = cuda_graphs.GraphProfile()
        runner.capture_model(profile_only=True)
        assert len(speculator.cudagraph_manager.graphs) == len(profile.samples) == 3
        assert profile.total == len(drafts)
        assert profile.left_out() == (profile.total - 3) * STEP
