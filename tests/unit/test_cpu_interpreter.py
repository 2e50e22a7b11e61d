"""The interpreter's mends (CPU only)."""

import pytest
import torch

import vllm_uno

vllm_uno.register()

from vllm_uno.vllm_hooks.cpu_interpreter import switched_on  # noqa: E402
from vllm_uno.vllm_hooks.runner_api import tl, triton  # noqa: E402

pytestmark = pytest.mark.skipif(not switched_on(), reason="kernels are compiled here")


@triton.jit
def _mended_kernel(x_ptr, best_ptr, log_ptr, flag_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    _, best = tl.max(x, axis=0, return_indices=True)
    flag = tl.load(flag_ptr)
    # A mask of int1 arithmetic, as vLLM's kernels have.
    tl.store(best_ptr + i, best, mask=(i < 1) & flag)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, float("nan"), 3.0, 2.0], 2),
        ([float("nan")] * 4, 0),
        ([float("-inf"), float("nan"), float("-inf"), float("-inf")], 0),
    ],
)
def test_argmax_survives_nan_and_integer_masks(values: list[float], expected: int) -> None:
    best = torch.full((4,), -5, dtype=torch.int32)
    flag = torch.ones(1, dtype=torch.bool)
    _mended_kernel[(1,)](torch.tensor(values), best, None, flag, N=4)
    assert best.tolist() == [expected, -5, -5, -5]


def test_log1p_also_where_vllms_module_came_first() -> None:
    """In a process of its own: the order of imports matters."""
    import subprocess
    import sys

    code = """
import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as utils
import vllm_uno
vllm_uno.register()
from vllm_uno.vllm_hooks.cpu_interpreter import _Libdevice
print("MENDED", isinstance(utils.tldevice, _Libdevice))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MENDED True" in done.stdout, done.stderr[-2000:]


def test_integer_overflow_is_not_checked() -> None:
    from triton.runtime import interpreter

    assert not interpreter.interpreter_builder.options.sanitize_overflow


def test_top_k_top_p_runs_without_a_compiler() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    kept = apply_top_k_top_p(logits, torch.tensor([2]), None)
    assert kept.isfinite().tolist() == [[False, True, True, False]]
