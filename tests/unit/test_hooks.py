"""Hooks: shape checks, refusal on other versions, graph sizes, draft rows of inert requests."""

import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_uno

vllm_uno.register()

from vllm_uno.draft_graphs import covered_requests, draft_graph_sizes  # noqa: E402
from vllm_uno.vllm_hooks import HOOKS, Hook, UnsupportedVllm, hook  # noqa: E402
from vllm_uno.vllm_hooks.vllm_config import extra_capture_sizes  # noqa: E402


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_hook_fits_the_installed_vllm_and_says_why() -> None:
    for one in HOOKS:
        one.check()
        assert one.reason and one.removable


def test_installing_twice_changes_nothing() -> None:
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_speculative_config
    vllm_uno.register()
    assert EngineArgs.create_speculative_config is before


@pytest.mark.parametrize(
    ("target", "parameters", "found"),
    [
        ("vllm.sampling_params:SamplingParams._validate_spec_decode", ("self",), "found"),
        ("vllm.sampling_params:SamplingParams.gone", ("self",), "no attribute|gone"),
        ("vllm.sampling_params:SamplingParams._validate_spec_decode", None, "a property"),
        ("vllm.config.vllm:VllmConfig.num_lookahead_tokens", ("self",), "property"),
        ("vllm.no_such_module:f", ("self",), "No module"),
    ],
)
def test_check_names_what_does_not_fit(
    target: str, parameters: tuple[str, ...] | None, found: str
) -> None:
    one = Hook(target, parameters, reason="r", removable="never", make=lambda f: f)
    with pytest.raises(UnsupportedVllm, match=found) as error:
        one.check()
    assert target in str(error.value) and "supported: 0.32.x" in str(error.value)


UNSUPPORTED = """
import vllm_uno, vllm_uno.vllm_hooks.hook as hook
hook.installed_vllm = lambda: "0.99.1"
vllm_uno.register()
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs.__new__(EngineArgs)
args.speculative_config = {"method": "uno"}
args.spec_method = args.spec_model = args.spec_tokens = None
try:
    args.create_speculative_config(None, None)
except RuntimeError as error:
    print("REFUSED", error)
args.speculative_config = None
print("PLAIN", args.create_speculative_config(None, None))
from vllm.config import VllmConfig
print("HOOKED", hasattr(VllmConfig.num_lookahead_tokens.fget, "__uno_original__"))
"""


def test_unsupported_version_refuses_uno_only() -> None:
    out = run(UNSUPPORTED).stdout
    assert "REFUSED vllm-uno supports vLLM 0.32.x, but vLLM 0.99.1 is installed" in out
    assert "PLAIN None" in out
    assert "HOOKED False" in out


WITHOUT_PLUGINS = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.engine.arg_utils import EngineArgs
print("HOOKED", hasattr(EngineArgs.create_speculative_config, "__uno_original__"))
"""


def test_plugin_is_found_by_its_entry_point_and_can_be_left_out() -> None:
    assert "HOOKED True" in run(WITHOUT_PLUGINS).stdout
    assert "HOOKED False" in run(WITHOUT_PLUGINS, VLLM_PLUGINS="").stdout


def test_version_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fits in (
        ("0.32.0", True),
        ("0.32.5", True),
        ("0.320.0", False),
        ("0.31.9", False),
    ):
        monkeypatch.setattr(hook, "installed_vllm", lambda v=version: v)
        if fits:
            hook.check_version()
        else:
            with pytest.raises(UnsupportedVllm, match=version):
                hook.check_version()


def test_capture_sizes_cover_draft_and_verify_batches() -> None:
    default = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    for block in (1, 4, 8, 16):
        extra = extra_capture_sizes(512, block, block + 1, 64, 8192)
        assert len(extra) <= 2 or block == 16
        sizes = sorted({*default, *extra})
        assert covered_requests(sizes, block + 1, 64) == 64
        assert max(draft_graph_sizes(sizes[-1], block, 64)) == 64 * block
    # The ceiling, and a token limit below it.
    assert max(extra_capture_sizes(512, 8, 9, 1024, 8192)) <= 2048
    assert max(extra_capture_sizes(128, 8, 9, 64, 256)) <= 256
    assert not extra_capture_sizes(576, 8, 9, 64, 8192)
    assert covered_requests(default, 9, 256) < 64  # what vLLM's own sizes leave out
    assert covered_requests([], 9, 64) == 0
    # More verify rows than the ceiling holds do not leave drafts without graphs.
    trees = sorted({*default, *extra_capture_sizes(512, 16, 33, 128, 8192)})
    assert max(draft_graph_sizes(trees[-1], 16, 128)) == 128 * 16


@given(largest=st.integers(0, 3000), block=st.integers(1, 17), max_num_seqs=st.integers(1, 300))
def test_few_draft_graphs_and_little_padding(largest: int, block: int, max_num_seqs: int) -> None:
    sizes = draft_graph_sizes(largest, block, max_num_seqs)
    most = min(max_num_seqs, largest // block)
    assert sizes == sorted(set(sizes)) and not any(size % block for size in sizes)
    assert len(sizes) <= 32
    counts = [size // block for size in sizes]
    assert set(counts) >= {n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, most) if 0 < n <= most}
    for wanted in range(1, most + 1):
        graph = min(n for n in counts if n >= wanted)
        assert graph - wanted <= max(3, wanted // 4)


def test_default_limits_are_fitted_to_the_draft_rows() -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs.__new__(EngineArgs)
    args.speculative_config = {"method": "uno", "num-speculative-tokens": 16}
    args.spec_tokens = None
    args.enable_lora = False
    args.max_num_seqs = None
    args.max_num_batched_tokens = 1000
    args.performance_mode = "balanced"
    args.enable_chunked_prefill = True
    args.pipeline_parallel_size = args.tensor_parallel_size = 1
    parallel = types.SimpleNamespace(use_batched_dp_moe=False)
    model = types.SimpleNamespace(max_model_len=4096, is_multimodal_model=False)
    args._set_default_max_num_seqs_and_batched_tokens_args(None, model, parallel)
    assert args.max_num_seqs == 1000 // 16
    args.max_num_seqs, args.max_num_batched_tokens = 100, None
    args._set_default_max_num_seqs_and_batched_tokens_args(None, model, parallel)
    assert args.max_num_seqs == 100 and args.max_num_batched_tokens >= 1600
    # Trees are wider than their block: the rows of a verify pass count.
    args.speculative_config = {"method": "uno", "uno_mode": "tree"}
    args.max_num_seqs, args.max_num_batched_tokens = None, 1000
    args._set_default_max_num_seqs_and_batched_tokens_args(None, model, parallel)
    assert args.max_num_seqs == 1000 // 33
