"""CUDA graphs on a CPU: vLLM's own capture, and replays that run again what was captured.

A capture here runs and records nothing, which shows whether all graphs that UNO asks for can be
captured together. A replay reads the same buffers and writes the same buffers as a graph's would,
padding included; attention alone is handed the batch's own metadata, as CPU attention has no form
of it that a graph could keep.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Engine, engine
from prompts import make_prompts
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils, model_runner

from vllm_uno.graph_sizes import GraphSizes, draft_graph_sizes, graph_sizes
from vllm_uno.vllm_hooks import cuda_graphs
from vllm_uno.vllm_hooks.runner_api import build_slot_mappings_by_layer

SEQUENCES, ROWS, BLOCKS = 24, 512, 40
STEP = 20 << 20  # bytes that a graph seems to take

MODES: dict[str, dict[str, Any]] = {
    "linear": {"num_speculative_tokens": 4},
    "coarse": {
        "num_speculative_tokens": 4,
        "uno_draft_quantization": "fp8",
        "uno_draft_context": 16,
    },
    "tree": {
        "uno_mode": "tree",
        "uno_block_size": 4,
        "uno_tree_top_k": 4,
        "num_speculative_tokens": 8,
    },
}


class Graph:
    """In the place of a CUDA graph."""

    replay: Callable[[], None]


class Memory:
    """A GPU's, of which every captured graph takes one STEP and nothing else takes anything."""

    free = 1 << 40

    def info(self, *args: Any) -> tuple[int, int]:
        return self.free, 1 << 40

    @contextmanager
    def capture(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield
        self.free -= STEP


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
        memory = Memory()
        replace(torch.cuda, "graph", memory.capture)
        run_pw_graph = cudagraph_utils.ModelCudaGraphManager.run_pw_graph
        replace(
            cudagraph_utils.ModelCudaGraphManager, "run_pw_graph", memory.capture()(run_pw_graph)
        )
        for name in ("get_global_graph_pool", "graph_pool_handle"):
            replace(type(current_platform), name, lambda *args: None)
        for name in ("empty_cache", "synchronize"):
            replace(torch.accelerator, name, lambda *args: None)
        replace(torch.accelerator, "get_memory_info", memory.info)
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


@pytest.fixture(scope="module", params=MODES)
def uno(request: pytest.FixtureRequest, model: Path, adapter: Path) -> Iterator[Engine]:
    settings = {"uno_lora_path": str(adapter), **MODES[request.param]}
    with (
        engine(
            model,
            settings,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=ROWS,
            num_gpu_blocks_override=BLOCKS,
        ) as running,
        captures_run(),
    ):
        yield running


def test_all_graphs_can_be_captured(uno: Engine) -> None:
    runner, speculator = uno.runner, uno.speculator
    sizes = make_managers(uno)
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
    if speculator.draft_sampler is not None:  # trees sample eagerly
        sampled = sorted(desc.num_tokens for desc in speculator.sampling_graphs.graphs)
        assert sampled == drafts


def test_three_graphs_stand_for_all_while_memory_is_measured(uno: Engine) -> None:
    sizes = make_managers(uno)
    speculator, manager = uno.speculator, uno.runner.cudagraph_manager
    with (
        mock.patch.object(speculator, "graph_profile", cuda_graphs.GraphProfile(2)) as profile,
        mock.patch.object(manager, "run_pw_graph", wraps=manager.run_pw_graph) as ran,
    ):
        uno.runner.capture_model(profile_only=True)
    mixed, full, drafts = profile.samples
    piecewise = [len(call.args[1]["positions"]) for call in ran.call_args_list]
    every = sorted({*sizes.mixed, sizes.room}, reverse=True)
    assert piecewise == every[:3]
    assert sorted(desc.num_tokens for desc in manager.graphs) == sizes.verify[-3:]
    assert len(speculator.cudagraph_manager.graphs) == 3
    totals = [len(every), len(sizes.verify)]
    totals += [len(draft_graph_sizes(sizes.all[-1], speculator.block_size, SEQUENCES))]
    for sample, total in zip((mixed, full, drafts), totals, strict=True):
        assert (sample.taken, sample.total) == ([STEP] * 3, total)
    assert profile.left_out() == (sum(totals) - 9) * STEP


def test_a_profile_counts_every_graph_once(uno: Engine) -> None:
    make_managers(uno)
    with (  # the engine's own KV cache stays
        mock.patch.object(cudagraph_utils, "_init_minimal_kv_cache_for_profiling"),
        mock.patch.object(cudagraph_utils, "_teardown_profiling_state"),
    ):
        foreseen = uno.runner.profile_cudagraph_memory()
    make_managers(uno)
    assert foreseen == uno.runner.capture_model(profile_only=True) > 0


def make_replayable(e: Engine) -> Counter[str]:
    """Give every captured graph of the engine what its replay must do; counts replays."""
    runner, speculator = e.runner, e.speculator
    seen: dict[str, Any] = {}
    ran: Counter[str] = Counter()
    prepare, build = runner.model_state.prepare_attn, speculator._build_metadata

    def prepare_attn(batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **kw: Any) -> Any:
        seen["target"] = prepare(batch, mode, tables, slots, *args, **kw), slots
        return seen["target"][0]

    def build_metadata(*args: Any) -> Any:
        seen["draft"] = build(*args)
        return seen["draft"]

    runner.model_state.prepare_attn, speculator._build_metadata = prepare_attn, build_metadata

    def verify(num_tokens: int) -> None:
        metadata, slots = seen["target"]
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=num_tokens, slot_mapping=by_layer
        ):
            buffers = runner.input_buffers
            runner.cudagraph_manager.hidden_states[:num_tokens] = runner.model(
                input_ids=buffers.input_ids[:num_tokens], positions=buffers.positions[:num_tokens]
            )

    def draft(num_rows: int) -> None:
        slots = speculator.rows.slots[:, :num_rows]
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        speculator._forward_into_buffer(num_rows, seen["draft"], by_layer)

    def give(kind: str, manager: Any, run: Callable[[Any], object]) -> None:
        for desc, graph in manager.graphs.items():

            def replay(desc: Any = desc) -> None:
                ran[f"{kind} {desc.num_reqs}"] += 1
                run(desc)

            graph.replay = replay

    give("verify", runner.cudagraph_manager, lambda desc: verify(desc.num_tokens))
    give("draft", speculator.cudagraph_manager, lambda desc: draft(desc.num_tokens))
    give("sampling", speculator.sampling_graphs, lambda d: speculator._sample_plain(d.num_reqs))
    return ran


def test_replayed_steps_give_the_same_tokens(uno: Engine) -> None:
    prompts = make_prompts(2048, 8)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"seed": 3, "min_p": 0.1},
        {"temperature": 0.0, "max_tokens": 5},
        {"temperature": 0.0},
        {"seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.3},  # sampled outside the graph
    ]
    params = [SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **kind}) for kind in kinds]

    def batches() -> list[list[list[int]]]:
        """Eight requests; then five, in graphs of more, whose last rows were the others' before.
        They take over the others' KV blocks."""
        uno.llm.reset_prefix_cache()
        return [uno.tokens(prompts, params), uno.tokens(prompts[:5], params[:5])]

    make_managers(uno)
    eager = batches()
    uno.runner.capture_model(profile_only=True)
    ran = make_replayable(uno)
    assert batches() == eager
    assert {"verify 8", "draft 8", "verify 6"} <= set(ran)
    assert ("sampling 8" in ran) == (uno.speculator.draft_sampler is not None)
