"""Hooks: shape checks, refusal on other versions, graph sizes, draft rows of inert requests."""

import subprocess
import sys
import types

import pytest

import vllm_uno

vllm_uno.register()

from vllm_uno.vllm_hooks import HOOKS, Hook, UnsupportedVllm, hook  # noqa: E402


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
