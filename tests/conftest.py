"""Environment of every test, set before anything imports vLLM, and shared models."""

import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Engines live in the test's own process, so that tests can look inside them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if not torch.cuda.is_available():
    os.environ["UNO_CPU_INTERPRETER"] = "1"
    # Small tensors on a busy machine: a second thread mostly waits for the first.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
pytest.register_assert_rewrite("request_kinds")  # its checks are tests' own
# Twenty times slower otherwise in simulations over small tensors, measured on 2 busy cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Qwen3 whose greedy output varies (vllm_uno/tiny_model.py)."""
    from vllm_uno.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random rank-8 adapter on all projections of `model`; moves logits by more than 1."""
    from vllm_uno.tiny_model import write_random_adapter

    return write_random_adapter(tmp_path_factory.mktemp("adapter"), model)
