"""What the draft's CUDA graphs hold, and that no step of an engine waits for the GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Engine, engine
from prompts import make_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 3
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7},
    {"seed": 3, "top_k": 20, "top_p": 0.9},
    {"seed": 4, "min_p": 0.1, "temperature": 1.3},
    {"seed": 5, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def uno(model: Path, adapter: Path) -> Iterator[Engine]:
    settings = {"uno_lora_path": str(adapter), "num_speculative_tokens": BLOCK_SIZE}
    with engine(
        model, settings, enforce_eager=False, dtype="float32", attention_backend="TRITON_ATTN"
    ) as running:
        yield running


def test_replayed_sampling_is_the_eager_one(uno: Engine) -> None:
    """Also where a slot's parameters change between replays: other batches come and go."""
    prompts = make_prompts(2048, len(PLAIN))
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **p) for p in PLAIN]
    graphs = uno.speculator.sampling_graphs
    assert graphs.graphs
    with mock.patch.object(graphs, "run_fullgraph", wraps=graphs.run_fullgraph) as replayed:
        first = uno.tokens(prompts, params)
        backwards = uno.tokens(prompts[::-1], params[::-1])[::-1]
    assert replayed.call_count >= 16
    with mock.patch.object(uno.speculator, "sampling_graphs", None):
        eager = uno.tokens(prompts, params)
    assert first == backwards == eager


def test_processors_replay_the_forward_graph_alone(uno: Engine) -> None:
    graphs, forward = uno.speculator.sampling_graphs, uno.speculator.cudagraph_manager
    params = SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    with (
        mock.patch.object(graphs, "run_fullgraph") as sampled,
        mock.patch.object(forward, "run_fullgraph", wraps=forward.run_fullgraph) as ran,
    ):
        uno.tokens(make_prompts(2048, 2), params)
    assert ran.call_count >= 3 and not sampled.called


def test_a_captured_launch_serves_any_plain_batch() -> None:
    """One capture, replayed for other parameters, logits and slots; outputs poisoned before."""
    from vllm_uno.draft_law import LawRows, sample_draft_rows
    from vllm_uno.vllm_hooks.runner_api import filter_scratch

    device, slots, vocab = torch.device("cuda"), 40, 5000
    num_rows = slots * BLOCK_SIZE  # more than one part of the filter's, and one of few rows
    g = torch.Generator(device).manual_seed(0)
    rows = LawRows.allocate(
        BLOCK_SIZE,
        vocab,
        request=torch.full((num_rows,), -1, device=device),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        drafting=torch.zeros(slots, dtype=torch.bool, device=device),
    )
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(slots, BLOCK_SIZE, vocab, device=device)
    out = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def launch() -> None:
        sample_draft_rows(logits, rows, cache, out, filters=True)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    kept = filter_scratch()
    assert kept

    def pick(values: list[float], dtype: torch.dtype) -> SimpleNamespace:
        chosen = torch.randint(0, len(values), (slots,), generator=g, device=device)
        return SimpleNamespace(gpu=torch.tensor(values, dtype=dtype, device=device)[chosen])

    for _ in range(50):
        states = SimpleNamespace(
            vocab_size=vocab,
            temperature=pick([0.0, 0.7, 1.0], torch.float32),
            min_p=pick([0.0, 0.1], torch.float32),
            top_k=pick([vocab, 20], torch.int32),
            top_p=pick([1.0, 0.9], torch.float32),
            seeds=pick(list(range(9)), torch.int64),
        )
        idx = torch.randperm(slots, generator=g, device=device)[:33]
        rows.request.fill_(-1)
        rows.request[: 33 * BLOCK_SIZE] = idx.repeat_interleave(BLOCK_SIZE)
        rows.positions.random_(0, 4096, generator=g)
        rows.drafting.copy_(torch.rand(slots, generator=g, device=device) < 0.9)
        one_hot = torch.rand(slots, generator=g, device=device) < 0.2
        rows.gather(idx, states, one_hot, slots)  # type: ignore[arg-type]
        logits.normal_(generator=g).mul_(4)
        made = []
        for run in (launch, graph.replay):
            cache.fill_(-77.0)
            out.fill_(-77)
            poison = torch.full_like(logits, float("nan"))
            del poison
            run()
            made.append((cache.clone(), out.clone()))
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


@pytest.mark.parametrize("mode", [[], ["--tree", "8/8/16"]], ids=["linear", "tree"])
def test_no_step_waits_for_the_gpu(tmp_path: Path, mode: list[str]) -> None:
    """vLLM's own check, over the worker's `execute_model` and `sample_tokens` with the draft in
    it, raises at any synchronising call and at copies that wait in the driver. Greedy decoding,
    then every kind of sampling parameter."""
    script = Path(__file__).parents[1] / "run_engine.py"
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            "--work",
            str(tmp_path),
            "--name",
            "sync",
            "--sampled",
            *mode,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_GPU_SYNC_CHECK": "error"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
