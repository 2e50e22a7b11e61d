"""The warm-up reads sampling state and laws and changes neither; its jobs run side by side."""

import os
import threading
import types

import pytest
import torch

import vllm_uno

vllm_uno.register()

from vllm_uno.warmup import run_at_once, sampling_jobs  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("probabilistic", [True, False])
def test_runs_every_variant_and_leaves_the_state_alone(
    monkeypatch: pytest.MonkeyPatch, probabilistic: bool
) -> None:
    import vllm_uno.warmup as module

    seen = []
    verify, filters = module.rejection_sample, module.apply_top_k_top_p

    def watched_verify(logits: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(("verify", logits.dtype))
        return verify(logits, *args, **kwargs)

    def watched_filters(logits: torch.Tensor, k: object, p: object) -> object:
        seen.append(("filter", k is not None, p is not None, len(logits) > 64))
        return filters(logits, k, p)

    monkeypatch.setattr(module, "rejection_sample", watched_verify)
    monkeypatch.setattr(module, "apply_top_k_top_p", watched_filters)
    state = types.SimpleNamespace(
        temperature=types.SimpleNamespace(gpu=torch.ones(3, device=DEVICE)),
        seeds=types.SimpleNamespace(gpu=torch.arange(3, device=DEVICE)),
    )
    sampler = types.SimpleNamespace(sampling_states=state, use_fp64_gumbel=False)
    laws = torch.randn(3, 4, 50, device=DEVICE) if probabilistic else None
    before = None if laws is None else laws.clone()
    jobs = sampling_jobs(sampler, laws, 4, 50, torch.bfloat16, DEVICE)  # type: ignore[arg-type]
    for job in jobs:
        job()
    kinds = {(k, p) for k, p in ((True, False), (False, True), (True, True))}
    want = {("verify", torch.bfloat16), ("verify", torch.float32)}
    want |= {("filter", *kind, many) for kind in kinds for many in (False, True)}
    assert set(seen) == want
    assert laws is None or torch.equal(laws, before)
    assert state.temperature.gpu.tolist() == [1, 1, 1] and state.seeds.gpu.tolist() == [0, 1, 2]


def test_jobs_run_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a thread with its own device and mode; one that fails is not lost."""
    devices = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    # Neither passes before the other has come: one after the other they would not end well.
    meet = threading.Barrier(2, timeout=60)
    modes = []

    def job() -> None:
        meet.wait()
        modes.append(torch.is_inference_mode_enabled())

    def fails() -> None:
        raise RuntimeError("no such kernel")

    device = torch.device("cuda", 1)
    run_at_once([job, job], device)
    assert modes == [True, True] and devices == [device, device]
    with pytest.raises(RuntimeError, match="no such kernel"):
        run_at_once([job, fails, job], device)
    assert len(modes) == 4
