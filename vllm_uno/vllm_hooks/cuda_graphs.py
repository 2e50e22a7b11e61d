"""The target's CUDA graphs, their sizes, and how draft graphs are weighed. For workers only.

`ModelCudaGraphManager._init_candidates`: vLLM captures every size twice, as a PIECEWISE graph for
mixed batches and, rounded up to whole requests, as a FULL one for verification. The two want other
sizes (graph_sizes.py).

`GPUModelRunner.profile_cudagraph_memory` and `capture_model`: at every start vLLM captures graphs
once to see what memory they take, before it sizes the KV cache, and throws them away. Of the
target's FULL graphs it captures the largest two and extrapolates; PIECEWISE ones and a speculator's
it captures all. Here it captures the largest three FULL, PIECEWISE and draft graphs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_uno.vllm_hooks.hook import Hook, UnsupportedVllm, installed_vllm
from vllm_uno.vllm_hooks.runner_api import CudaGraphManager

GRAPH_SAMPLES = 3
# What a further graph takes at least, in bytes a layer. Draft graphs of 36 layers took 5 to 9 MiB
# more, 19 PIECEWISE and 11 FULL ones of plain vLLM 113 MiB together (both inferred, H200).
LEAST_OF_DRAFT_LAYER = 512 << 10
LEAST_OF_TARGET_LAYER = 256 << 10


def _init_candidates(original: Any) -> Any:
    @functools.wraps(original)
    def _init_candidates(self: Any) -> None:
        mode = self.cudagraph_mode
        sizes = getattr(self.vllm_config.speculative_config, "uno_graph_sizes", None)
        config = self.compilation_config
        split = mode.separate_routine() and mode.decode_mode()
        # A platform may have changed the sizes since.
        if not split or sizes is None or config.cudagraph_capture_sizes != sizes.all:
            original(self)
            return
        # vLLM captures PIECEWISE graphs first, the largest one first, and makes its buffer of
        # outputs, FULL graphs' too, from that one's.
        mixed, mixed_sizes = mode.mixed_mode(), sorted({*sizes.mixed, sizes.room})
        passes = [(CUDAGraphMode.FULL_DECODE_ONLY, sizes.verify), (mixed, mixed_sizes)]
        try:
            # FULL first: a batch that both fit runs in the earlier one.
            for self.cudagraph_mode, chosen in passes:
                self.compilation_config = copy.copy(config)
                self.compilation_config.cudagraph_capture_sizes = chosen
                original(self)
        finally:
            self.cudagraph_mode, self.compilation_config = mode, config
        # No batch is to be padded to it.
        for (num_tokens, _), graphs in self._candidates.items():
            if num_tokens > sizes.mixed[-1]:
                graphs[:] = [graph for graph in graphs if graph.cg_mode != mixed]

    return _init_candidates


def _profile_cudagraph_memory(original: Any) -> Any:
    @functools.wraps(original)
    def profile_cudagraph_memory(self: Any) -> int:
        if not hasattr(self.speculator, "graph_profile"):  # not ours
            measured: int = original(self)
            return measured
        layers = self.model_config.get_num_layers(self.parallel_config)
        profile = self.speculator.graph_profile = GraphProfile(layers)
        try:
            return int(original(self)) + profile.left_out()
        finally:
            self.speculator.graph_profile = None

    return profile_cudagraph_memory


def _capture_model(original: Any) -> Any:
    @functools.wraps(original)
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        profile = getattr(self.speculator, "graph_profile", None)
        if profile is not None:
            profile.limit_target(self.cudagraph_manager)
        taken: int = original(self, profile_only=profile_only)
        return taken

    return capture_model


class GraphSample:
    """What the largest graphs of one kind took, for what all of them will take.

    Attributes:
        total: graphs that the real capture will make.
        least: bytes that one takes at least.
        taken: bytes that each captured graph took, the largest graph first.
    """

    def __init__(self, total: int, least: int) -> None:
        self.total = total
        self.least = least
        self.taken: list[int] = []

    def left_out(self) -> int:
        """Bytes of the graphs that were not captured.

        By vLLM's rule, each further graph as large as the second, the graphs of an 8B model and its
        draft would take 7.8 GiB; on an H200 they took 4.1. The second may be the last to make the
        pool grow, so the cheapest after the first counts. (Of the target's, too: vLLM's own
        extrapolation has no samples then.)

        Raises:
            UnsupportedVllm: vLLM captured more or fewer graphs than it was to.
        """
        if len(self.taken) != min(self.total, GRAPH_SAMPLES):
            raise UnsupportedVllm(
                f"vllm-uno does not fit the model runner of vLLM {installed_vllm()}: it captured "
                f"{len(self.taken)} of {self.total} graphs to measure their memory, not "
                f"{GRAPH_SAMPLES}"
            )
        others = self.total - len(self.taken)
        return others * max(self.least, min(self.taken[1:])) if others > 0 else 0


class MeasuredGraphs(list[Any]):
    """Graphs to capture, which on its way through measures what each took."""

    def __init__(self, graphs: list[Any], taken: list[int]) -> None:
        super().__init__(graphs)
        self.taken = taken

    def __iter__(self) -> Iterator[Any]:
        for graph in super().__iter__():
            before = _free_bytes()
            yield graph
            self.taken.append(before - _free_bytes())


def _free_bytes() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.get_memory_info()[0]


class GraphProfile:
    """Which graphs are captured while vLLM measures their memory, and what the others take.

    Attributes:
        layers: of the target, and so of its draft view.
        samples: one for each kind of graph.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.samples: list[GraphSample] = []

    def limit_target(self, manager: CudaGraphManager) -> None:
        """Have `manager`, which serves no batch, capture its largest graphs of each kind only.

        Raises:
            UnsupportedVllm: the manager has not the attributes for it.
        """
        _require(manager, "_max_full_descs_to_capture", "_capture_mem_samples")
        # In the place of ours vLLM's own limit, and its extrapolation: without samples it takes
        # what it measured.
        manager._max_full_descs_to_capture = None
        manager._capture_mem_samples = None
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            self._limit(manager, mode, LEAST_OF_TARGET_LAYER)

    def limit_drafts(self, manager: CudaGraphManager) -> None:
        """The same for the draft's forward graphs.

        Raises:
            UnsupportedVllm: the manager has not the attribute for it.
        """
        self._limit(manager, CUDAGraphMode.FULL, LEAST_OF_DRAFT_LAYER)

    def _limit(self, manager: CudaGraphManager, mode: CUDAGraphMode, least_of_layer: int) -> None:
        _require(manager, "_capture_descs")
        graphs = manager._capture_descs.get(mode, [])
        sample = GraphSample(len(graphs), least_of_layer * self.layers)
        self.samples.append(sample)
        if graphs:
            manager._capture_descs[mode] = MeasuredGraphs(graphs[:GRAPH_SAMPLES], sample.taken)

    def left_out(self) -> int:
        """Bytes of the graphs that were not captured."""
        return sum(sample.left_out() for sample in self.samples)


def _require(manager: CudaGraphManager, *names: str) -> None:
    if missing := [name for name in names if not hasattr(manager, name)]:
        raise UnsupportedVllm(
            f"vllm-uno does not fit the model runner of vLLM {installed_vllm()}: "
            f"CudaGraphManager has no {', '.join(missing)}"
        )


HOOKS = (
    Hook(
        target="vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager._init_candidates",
        parameters=("self",),
        reason="every start would capture twice as many graphs as are of use",
        removable="vLLM has a list of sizes for each kind of graph",
        make=_init_candidates,
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_cudagraph_memory",
        parameters=("self",),
        reason="every start would capture all PIECEWISE and draft graphs twice",
        removable="vLLM samples PIECEWISE graphs and a speculator's as it does FULL ones",
        make=_profile_cudagraph_memory,
    ),
    Hook(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
        parameters=("self", "profile_only"),
        reason="the target's graphs can be limited no sooner",
        removable="with the hook on profile_cudagraph_memory",
        make=_capture_model,
    ),
)
"""For workers that run UNO."""
