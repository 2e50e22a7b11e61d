"""The target's CUDA graphs, their sizes, and how draft graphs are weighed. For workers only.

`ModelCudaGraphManager._init_candidates`: vLLM captures every size twice, as a PIECEWISE graph for
mixed batches and, rounded up to whole requests, as a FULL one for verification. The two want other
sizes (graph_sizes.py).

`GPUModelRunner.profile_cudagraph_memory`: at every start vLLM captures graphs once to see what
memory they take, before it sizes the KV cache, and throws them away. Of the target's FULL graphs it
captures the largest two and extrapolates; a speculator's it captures all. Of draft graphs it
captures three here.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_uno.vllm_hooks.hook import Hook, UnsupportedVllm, installed_vllm
from vllm_uno.vllm_hooks.runner_api import CudaGraphManager

# By vLLM's rule, each further graph as large as the second, the graphs of an 8B model and its draft
# would take 7.8 GiB; on an H200 they took 4.1. The second may be the last to make the pool grow.
DRAFT_GRAPH_SAMPLES = 3
LEAST_GRAPH_BYTES = 16 << 20  # graphs of 36 layers took 5 to 9 MiB more each (inferred)


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
        profile = self.speculator.graph_profile = GraphProfile()
        try:
            return int(original(self)) + profile.left_out()
        finally:
            self.speculator.graph_profile = None

    return profile_cudagraph_memory


class GraphProfile:
    """Which draft graphs are captured while vLLM measures their memory, and what the others take.

    Attributes:
        samples: bytes that each captured graph took, the largest graph first.
        total: draft graphs that the real capture will make.
    """

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.total = 0

    def limit(self, manager: CudaGraphManager) -> None:
        """Have `manager` capture its largest graphs only.

        Raises:
            UnsupportedVllm: the manager has not the attributes for it.
        """
        wanted = {
            "_max_full_descs_to_capture": DRAFT_GRAPH_SAMPLES,
            "_capture_mem_samples": self.samples,
        }
        if missing := [name for name in (*wanted, "_capture_descs") if not hasattr(manager, name)]:
            raise UnsupportedVllm(
                f"vllm-uno does not fit the model runner of vLLM {installed_vllm()}: "
                f"CudaGraphManager has no {', '.join(missing)}"
            )
        self.total = len(manager._capture_descs.get(CUDAGraphMode.FULL, []))
        vars(manager).update(wanted)

    def left_out(self) -> int:
        """Bytes of the graphs that were not captured."""
        others = self.total - len(self.samples)
        return others * max(LEAST_GRAPH_BYTES, min(self.samples[1:])) if others > 0 else 0


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
        reason="every start would capture all draft graphs twice",
        removable="vLLM samples a speculator's FULL graphs as it does the target's",
        make=_profile_cudagraph_memory,
    ),
)
"""For workers that run UNO."""
