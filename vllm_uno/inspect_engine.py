"""Read UNO's counters from a running engine: `draft_stats(llm)`.

vLLM's own speculative counters count placeholder drafts as rejected (see `vllm_uno.metrics`);
these are the real ones. Where the engine runs in a process of its own (vLLM's default), a
function must be sent there, which vLLM admits only with VLLM_ALLOW_INSECURE_SERIALIZATION=1 in
the environment *before* the engine starts; VLLM_ENABLE_V1_MULTIPROCESSING=0 needs nothing.
"""

from __future__ import annotations

import dataclasses
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
