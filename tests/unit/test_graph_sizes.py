"""Sizes of CUDA graphs: what is covered, what is padded, and that they reach vLLM's own capture."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()

from vllm.config import CompilationConfig, VllmConfig  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils, model_runner, spec_decode  # noqa: E402

from vllm_uno import proposer  # noqa: E402
from vllm_uno.graph_sizes import (  # noqa: E402
    GraphSizes,
    covered_requests,
    draft_graph_sizes,
    graph_sizes,
)
from vllm_uno.vllm_hooks import UnsupportedVllm, cuda_graphs  # noqa: E402


def test_capture_sizes_cover_draft_and_verify_batches() -> None:
    default = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    for block in (1, 4, 8, 16):
        sizes = graph_sizes(512, block, block + 1, 64, 8192).all
        assert covered_requests(sizes, block + 1, 64) == 64
        assert max(draft_graph_sizes(sizes[-1], block, 64)) == 64 * block
    assert max(graph_sizes(512, 8, 9, 1024, 8192).all) <= 2048
    assert max(graph_sizes(128, 8, 9, 64, 256).all) <= 256
    assert covered_requests(default, 9, 256) < 64  # what vLLM's own sizes leave out
    assert covered_requests([], 9, 64) == 0
    # More verify rows than the ceiling holds do not leave drafts without graphs.
    trees = graph_sizes(512, 16, 33, 128, 8192).all
    assert max(draft_graph_sizes(trees[-1], 16, 128)) == 128 * 16


@settings(deadline=None)
@given(
    block=st.integers(1, 17),
    extra=st.integers(1, 112),
    max_num_seqs=st.integers(1, 300),
    max_num_batched_tokens=st.integers(300, 9000),
    ceiling=st.sampled_from([512, 1024]),
)
def test_few_capture_sizes_and_little_padding(
    block: int, extra: int, max_num_seqs: int, max_num_batched_tokens: int, ceiling: int
) -> None:
    rows = block + extra
    largest = min(max_num_seqs * rows * 2, ceiling, max_num_batched_tokens)
    sizes = graph_sizes(largest, block, rows, max_num_seqs, max_num_batched_tokens)
    for each in (sizes.mixed, sizes.verify, sizes.all):
        assert each == sorted(set(each)) and min(each, default=1) > 0
        assert set(each) <= set(sizes.all)
    assert len(sizes.mixed) <= 22  # vLLM's own: 51 and more
    assert len(sizes.verify) <= 33
    for tokens in range(1, min(sizes.mixed[-1], 1024) + 1):
        padding = min(n for n in sizes.mixed if n >= tokens) - tokens
        assert padding < (
            8 if tokens <= 16 else 32 if tokens <= 256 else 64 if tokens <= 512 else 128
        )
    assert sizes.room == max(sizes.mixed + sizes.verify)
    assert not any(size % rows for size in sizes.verify)
    for wanted in range(1, min(max_num_seqs, 2048 // rows, max_num_batched_tokens // rows) + 1):
        whole = min(size // rows for size in sizes.verify if size >= wanted * rows)
        assert whole - wanted <= max(1 if wanted < 16 else 3, wanted // 4)


def target_manager(mode: CUDAGraphMode, sizes: GraphSizes, split: bool) -> Any:
    """vLLM's manager of the target's graphs, with nothing to capture on."""
    manager: Any = cudagraph_utils.ModelCudaGraphManager.__new__(
        cudagraph_utils.ModelCudaGraphManager
    )
    speculative = SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False)
    if split:
        speculative.uno_graph_sizes = sizes
    vars(manager).update(
        vllm_config=SimpleNamespace(
            speculative_config=speculative, cache_config=SimpleNamespace(use_kda_recoverssm=False)
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes.all, max_cudagraph_capture_size=sizes.all[-1]
        ),
        cudagraph_mode=mode,
        decode_query_len=9,
        max_num_reqs=240,
        lora_capture_cases=[0],
        varlen_decode=False,
        ubatch_runner=None,
        _lora_dispatch_map={},
        _max_lora_case=0,
        _candidates={},
        _capture_descs={},
    )
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


@pytest.mark.parametrize("requests", [64, 240])
def test_each_kind_of_graph_has_its_own_sizes(requests: int) -> None:
    """Verify batches run in FULL graphs, others in PIECEWISE ones, by vLLM's own choice."""
    for each in cuda_graphs.HOOKS:
        each.check()
        each.install()
    sizes = graph_sizes(512, 8, 9, requests, 8192)
    manager = target_manager(CUDAGraphMode.FULL_AND_PIECEWISE, sizes, split=True)
    captured = {
        mode: sorted(desc.num_tokens for desc in descs)
        for mode, descs in manager._capture_descs.items()
    }
    assert captured == {
        CUDAGraphMode.FULL: sizes.verify,
        CUDAGraphMode.PIECEWISE: sorted({*sizes.mixed, sizes.room}),
    }
    assert manager.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert manager.compilation_config.cudagraph_capture_sizes == sizes.all
    # The first graph that vLLM captures, a PIECEWISE one, makes the buffer of all outputs.
    first = manager._capture_descs[CUDAGraphMode.PIECEWISE][0].num_tokens
    assert first >= max(captured[CUDAGraphMode.FULL])
    for running in range(1, min(requests, 227) + 1):
        found = manager.dispatch(running, running * 9, 9, 0)
        assert found.cg_mode == CUDAGraphMode.FULL and found.num_reqs >= running
    top = sizes.mixed[-1]
    for tokens in range(1, top + 1):
        found = manager.dispatch(1, tokens, None, 0)
        assert (found.cg_mode, found.num_tokens) == (
            CUDAGraphMode.PIECEWISE,
            min(size for size in sizes.mixed if size >= tokens),
        )
    for tokens in range(top + 1, sizes.all[-1] + 2):
        assert manager.dispatch(1, tokens, None, 0).cg_mode == CUDAGraphMode.NONE
    # Without FULL graphs, or where a user chose the sizes, vLLM's own way.
    for mode, split in ((CUDAGraphMode.PIECEWISE, True), (CUDAGraphMode.FULL_AND_PIECEWISE, False)):
        manager = target_manager(mode, sizes, split)
        piecewise = [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.PIECEWISE]]
        assert sorted(piecewise) == sizes.all
    only_full = target_manager(CUDAGraphMode.FULL_DECODE_ONLY, sizes, split=True)
    assert set(only_full._capture_descs) == {CUDAGraphMode.FULL}


@pytest.mark.parametrize(
    ("took", "draft", "target"),
    [
        ([500, 90, 20], 20, 20),
        ([500, 17, 20], 17, 17),
        ([500, 90, 0], 16, 8),
        ([500, -9, 90], 16, 8),
        ([500, 12, 90], 16, 12),
        ([10, 90, 20], 20, 20),
    ],
)
def test_memory_of_graphs_is_extrapolated(
    monkeypatch: pytest.MonkeyPatch, took: list[int], draft: int, target: int
) -> None:
    """Three of ten graphs of a kind are captured; the rest are counted at what the cheaper later
    one took."""
    free = [1 << 40]
    monkeypatch.setattr(cuda_graphs.torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_graphs.torch.accelerator, "get_memory_info", lambda: (free[0], 0))

    def manager_with(graphs: int) -> Any:
        return SimpleNamespace(
            _capture_descs={
                CUDAGraphMode.FULL: list(range(graphs)),
                CUDAGraphMode.PIECEWISE: list(range(100, 100 + graphs)),
            },
            _max_full_descs_to_capture=2,
            _capture_mem_samples=[],
        )

    def capture(manager: Any, mode: CUDAGraphMode) -> list[int]:
        captured = []
        graphs = manager._capture_descs[mode]
        if mode == CUDAGraphMode.FULL and manager._max_full_descs_to_capture:
            graphs = graphs[: manager._max_full_descs_to_capture]
        for graph, mib in zip(graphs, took + [1] * 10, strict=False):
            captured.append(graph)
            free[0] -= mib << 20
        return captured

    captured: dict[str, list[int]] = {}

    def capture_model(runner: Any, *, profile_only: bool = False) -> int:
        target = runner.cudagraph_manager
        if not profile_only:
            target._max_full_descs_to_capture = None
        captured["piecewise"] = capture(target, CUDAGraphMode.PIECEWISE)
        captured["full"] = capture(target, CUDAGraphMode.FULL)
        ours = getattr(runner.speculator, "graph_profile", None) is not None
        # Or vLLM would swap what they took for its own extrapolation.
        assert (target._capture_mem_samples is None) == ours
        if ours:
            drafts = manager_with(10)
            drafts._max_full_descs_to_capture = None
            runner.speculator.graph_profile.limit_drafts(drafts)
            captured["drafts"] = capture(drafts, CUDAGraphMode.FULL)
        return 1000 << 20

    def runner(speculator: Any, graphs: int = 10) -> Any:
        return SimpleNamespace(
            speculator=speculator,
            cudagraph_manager=manager_with(graphs),
            model_config=SimpleNamespace(get_num_layers=lambda parallel_config: 32),
            parallel_config=None,
        )

    hooked = cuda_graphs._capture_model(capture_model)
    profile = cuda_graphs._profile_cudagraph_memory(lambda self: hooked(self, profile_only=True))
    uno = runner(SimpleNamespace(graph_profile=None))
    assert profile(uno) == (1000 + 7 * draft + 2 * 7 * target) << 20
    assert captured == {"piecewise": [100, 101, 102], "full": [0, 1, 2], "drafts": [0, 1, 2]}
    assert uno.speculator.graph_profile is None
    # All of them when they are to stay, and vLLM's own choice whoever else drafts.
    for other in (uno, runner(object()), runner(None)):
        other.cudagraph_manager = manager_with(10)
        assert hooked(other) == 1000 << 20
        assert len(captured["piecewise"]) == len(captured["full"]) == 10
    for other in (runner(object()), runner(None)):
        assert profile(other) == 1000 << 20
        assert (len(captured["piecewise"]), len(captured["full"])) == (10, 2)
    # Few graphs are all captured.
    for graphs in (0, 1, 3):
        assert profile(runner(uno.speculator, graphs)) == (1000 + 7 * draft) << 20
        assert len(captured["piecewise"]) == len(captured["full"]) == graphs


def test_a_profile_that_does_not_fit_vllm_says_so() -> None:
    profile = cuda_graphs.GraphProfile(36)
    manager: Any = SimpleNamespace()
    with pytest.raises(UnsupportedVllm, match="_capture_descs"):
        profile.limit_drafts(manager)
    with pytest.raises(UnsupportedVllm, match="_max_full_descs_to_capture"):
        profile.limit_target(manager)
    for taken in ([], [1] * 2, [1] * 4):
        sample = cuda_graphs.GraphSample(10, 1)
        sample.taken = taken
        with pytest.raises(UnsupportedVllm, match=f"captured {len(taken)} of 10"):
            sample.left_out()

    def fails(runner: Any) -> int:
        raise MemoryError

    uno = SimpleNamespace(
        speculator=SimpleNamespace(graph_profile=None),
        model_config=SimpleNamespace(get_num_layers=lambda parallel_config: 36),
        parallel_config=None,
    )
    with pytest.raises(MemoryError):
        cuda_graphs._profile_cudagraph_memory(fails)(uno)
    assert uno.speculator.graph_profile is None


@settings(deadline=None)
@given(largest=st.integers(0, 3000), block=st.integers(1, 17), max_num_seqs=st.integers(1, 300))
def test_few_draft_graphs_and_little_padding(largest: int, block: int, max_num_seqs: int) -> None:
    sizes = draft_graph_sizes(largest, block, max_num_seqs)
    most = min(max_num_seqs, largest // block)
    assert sizes == sorted(set(sizes)) and not any(size % block for size in sizes)
    assert len(sizes) <= 36
    counts = [size // block for size in sizes]
    assert set(counts) >= {n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, most) if 0 < n <= most}
    for wanted in range(1, most + 1):
        graph = min(n for n in counts if n >= wanted)
        assert graph - wanted <= max(3 if block <= 8 else 1, wanted // 4)


def configured(
    performance_mode: str = "balanced", schedule: Any = None, **compilation: Any
) -> tuple[CompilationConfig, Any]:
    """vLLM's own choice of sizes, hooked, for 64 requests of 9 verify rows."""
    compiling = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **compilation)
    speculative = SimpleNamespace(
        uno_noise_seed=0,
        block_size=8,
        num_speculative_tokens=8,
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
    )
    whole = SimpleNamespace(
        compilation_config=compiling,
        speculative_config=speculative,
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192),
        uniform_decode_query_len=9,
        num_speculative_tokens=8,
        performance_mode=performance_mode,
    )
    VllmConfig._set_cudagraph_sizes(whole)  # type: ignore[arg-type]
    return compiling, speculative


def test_the_engines_config_has_our_sizes() -> None:
    compiling, speculative = configured()
    sizes = graph_sizes(512, 8, 9, 64, 8192)
    assert speculative.uno_graph_sizes == sizes
    assert compiling.cudagraph_capture_sizes == sizes.all
    assert compiling.max_cudagraph_capture_size == sizes.all[-1] == 1024
    assert pickle.loads(pickle.dumps(sizes)) == sizes  # to workers
    # Where a user chose, vLLM's own way.
    for chosen in ({"cudagraph_capture_sizes": [9, 18]}, {"max_cudagraph_capture_size": 256}):
        compiling, speculative = configured(**chosen)
        assert not hasattr(speculative, "uno_graph_sizes")
        assert compiling.max_cudagraph_capture_size in (18, 256)
    compiling, speculative = configured("interactivity")
    assert set(range(1, 33)) <= set(speculative.uno_graph_sizes.mixed)
    compiling, speculative = configured(compile_sizes=["cudagraph_capture_sizes", 77])
    assert compiling.compile_sizes == sorted({77, *speculative.uno_graph_sizes.mixed})


def test_a_schedule_keeps_the_sizes_of_all_its_widths() -> None:
    plain = configured(schedule=[(1, 15, 8), (16, 64, 4)])
    assert not hasattr(plain[1], "uno_graph_sizes")
    assert {64 * 5, 15 * 9, *graph_sizes(512, 8, 9, 64, 8192).all} <= set(
        plain[0].cudagraph_capture_sizes
    )


def test_a_worker_of_uno_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(proposer, "UnoProposer", lambda *args: made.append(args))
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="uno", uno_mode="linear"))
    spec_decode.init_speculator(config, None, None)
    assert made == [(config, None, None)]
    for owner, name in (
        (cudagraph_utils.ModelCudaGraphManager, "_init_candidates"),
        (model_runner.GPUModelRunner, "profile_cudagraph_memory"),
        (model_runner.GPUModelRunner, "capture_model"),
    ):
        assert hasattr(vars(owner)[name], "__uno_original__")


def test_a_profiled_capture_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    for name in ("capture_draft_graphs", "capture_sampling_graphs"):
        monkeypatch.setattr(
            proposer, name, lambda manager, *args, **kwargs: limits.append(manager.limit) or []
        )
    speculator = proposer.UnoProposer.__new__(proposer.UnoProposer)
    vars(speculator).update(
        cudagraph_manager=SimpleNamespace(limit=None),
        sampling_graphs=SimpleNamespace(limit=None),
        graph_profile=SimpleNamespace(limit_drafts=lambda manager: vars(manager).update(limit=2)),
        supports_decode_metadata_update=False,
        input_buffers=None,
        rows=SimpleNamespace(slots=None),
        block_tables=None,
        attn_groups=None,
        kv_cache_config=None,
        max_model_len=0,
    )
    monkeypatch.setattr(proposer.torch.accelerator, "get_memory_info", lambda: (0, 0))
    speculator.capture()
    assert limits == [2, None]  # the draft's forward; sampling graphs are small
