"""Functions that look inside a running engine, to be sent with `llm.collective_rpc(function)`.

Each takes the worker first. Sending a function needs VLLM_ALLOW_INSECURE_SERIALIZATION=1 in the
environment of the process that starts the engine.
"""

from typing import Any


def find_speculator(worker: Any) -> Any:
    """The draft proposer of `worker`, which is the worker itself or vLLM's wrapper around it."""
    worker = getattr(worker, "worker", worker)
    return worker.model_runner.speculator
