"""Read UNO's counters from a running engine: `draft_stats(llm)`.

vLLM's own speculative counters count placeholder drafts as rejected (see `vllm_uno.metrics`);
these are the real ones. Where the engine runs in a process of its own (vLLM's default), a
function must be sent there, which vLLM admits only with VLLM_ALLOW_INSECURE_SERIALIZATION=1 in
the environment *before* the engine starts; VLLM_ENABLE_V1_MULTIPROCESSING=0 needs nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_uno.metrics import DraftStats

if TYPE_CHECKING:
    from vllm import LLM


def draft_stats(llm: LLM, *, reset: bool = False) -> DraftStats:
    """Return what `llm` has drafted and accepted so far; waits for the device.

    Args:
        llm: runs with `speculative_config={"method": "uno", ...}`.
        reset: start counting from zero again.

    Raises:
        ValueError: the engine does not run UNO.

    """
    # Every tensor-parallel rank counts the same.
    found: dict[str, Any] | None = llm.collective_rpc(_read_counters, args=(reset,))[0]
    if found is None:
        raise ValueError("this engine has no UNO counters: it was started without method 'uno'")
    return DraftStats(
        cycles=found["cycles"],
        emitted=found["emitted"],
        # Lists, where they come from another process.
        proposed=tuple(found["proposed"]),
        accepted=tuple(found["accepted"]),
    )


@dataclass(frozen=True)
class VerifiedTree:
    """One request's tree in one verify step.

    Attributes:
        tokens, parents: of its nodes (builder.TreeBuffers).
        accepted: nodes of the path, root first.
        emitted: tokens of this step, one more than were accepted.
    """

    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    emitted: list[int]


def watch_trees(llm: LLM) -> None:
    """From now on, keep every tree that `llm` verifies, for `verified_trees`. Waits for the device.

    Raises:
        ValueError: the engine does not run UNO in tree mode.
    """
    if not llm.collective_rpc(_watch_trees)[0]:
        raise ValueError("this engine verifies no trees: it was started without uno_mode 'tree'")


def verified_trees(llm: LLM) -> list[VerifiedTree]:
    """Trees verified since the last call, step by step, in each in the order of the batch."""
    return [VerifiedTree(**tree) for tree in llm.collective_rpc(_take_trees)[0]]


def _watch_trees(worker: Any) -> bool:
    runner = getattr(worker, "worker", worker).model_runner
    memory = getattr(runner.speculator, "memory", None)
    if memory is None:
        return False
    seen: list[dict[str, list[int]]] = []
    verify = runner.rejection_sampler

    def watched(logits: Any, batch: Any, *args: Any) -> Any:
        output = verify(logits, batch, *args)
        rows = batch.cu_num_logits_np
        for request, slot in enumerate(batch.idx_mapping_np.tolist()):
            nodes = int(rows[request + 1] - rows[request]) - 1
            num_sampled = int(output.num_sampled[request])
            if nodes > 0 and num_sampled > 0:
                seen.append(
                    {
                        "tokens": memory.trees.tokens[slot, :nodes].tolist(),
                        "parents": memory.trees.parents[slot, :nodes].tolist(),
                        "accepted": (memory.path[slot, 1:num_sampled] - 1).tolist(),
                        "emitted": output.sampled_token_ids[request, :num_sampled].tolist(),
                    }
                )
        return output

    runner.rejection_sampler = watched
    runner.uno_trees = seen
    return True


def _take_trees(worker: Any) -> list[dict[str, list[int]]]:
    runner = getattr(worker, "worker", worker).model_runner
    taken = list(runner.uno_trees)
    runner.uno_trees.clear()
    return taken


def _read_counters(worker: Any, reset: bool) -> dict[str, Any] | None:
    """Runs in the worker's process. A dict, not a DraftStats: it may travel as msgpack."""
    worker = getattr(worker, "worker", worker)
    counters = getattr(getattr(worker.model_runner, "speculator", None), "counters", None)
    if counters is None:
        return None
    stats = dataclasses.asdict(counters.snapshot())
    if reset:
        counters.reset()
    return stats
