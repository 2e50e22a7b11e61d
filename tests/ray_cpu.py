"""Ray workers on a CPU, for tests: vLLM's CPU platform names no kind of device that Ray counts.

    python tests/ray_cpu.py examples/ray_tp.py --max-tokens 24

runs a script so. It would be refused ("current platform cpu does not support ray"). Here a worker
is counted as one of the GPUs that Ray is told of; all else is vLLM's own Ray executor.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def count_workers_as_gpus() -> None:
    """In the driver, and in each worker before anything else runs there."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def cluster(workers: int = 2) -> Iterator[Any]:
    """A Ray of this machine's own, gone when it closes."""
    import ray

    count_workers_as_gpus()
    ray.init(
        num_cpus=workers,
        num_gpus=workers,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"worker_process_setup_hook": "ray_cpu.count_workers_as_gpus"},
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def main() -> None:
    """Run a script whose engine is in its own process, uncompiled (compiling takes a minute)."""
    import vllm

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)  # type: ignore[misc, assignment]
    sys.argv.pop(0)
    with cluster():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
