"""`UnoSpeculativeConfig`: settings, errors, and what it tells the rest of vLLM."""

import copy
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.config.speculative import SpeculativeConfig

from vllm_uno import adapter_source
from vllm_uno import config as module
from vllm_uno.config import UnoSpeculativeConfig

VOCAB = 100


@dataclasses.dataclass
class TargetModel:
    """What the config reads of vLLM's ModelConfig."""

    model: str = "/my/model"
    revision: str | None = None
    vocab_size: int = VOCAB

    def get_vocab_size(self):
        return self.vocab_size


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "uno"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    metadata = {"noise_low": 2, "mask_token_id": 50, "block_sizes": [2, 8]}
    (folder / "uno_config.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture
def make(adapter):
    def make(**settings):
        defaults = {"uno_lora_path": str(adapter), "target_model_config": TargetModel()}
        return UnoSpeculativeConfig(**{**defaults, **settings})

    return make


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *args: found.append(text % args)
    )
    return found


def error_of(make, **settings):
    with pytest.raises(ValueError) as error:
        make(**settings)
    return str(error.value)


def test_defaults(make, adapter):
    config = make()
    assert isinstance(config, SpeculativeConfig)
    assert config.method == "uno"
    assert config.num_speculative_tokens == module.DEFAULT_BLOCK_SIZE == 8
    assert config.draft_sample_method == "probabilistic"
    assert config.rejection_sample_method == "standard"
    assert config.uno_noise_seed == 0


def test_holds_what_was_resolved(make, adapter, monkeypatch):
    config = make()
    assert (config.uno_lora_path, config.uno_lora_revision) == (str(adapter), None)
    assert (config.uno_noise_low, config.uno_mask_token_id) == (2, 50)
    # Found, not given.
    (adapter.parent / "model").mkdir()
    adapter.rename(adapter.parent / "model" / "adapter")
    model = TargetModel(model=str(adapter.parent / "model"))
    config = make(uno_lora_path=None, target_model_config=model)
    assert config.uno_lora_path == f"{model.model}/adapter"


def test_a_hub_adapter_is_pinned_to_its_commit(make, adapter, monkeypatch):
    snapshot = adapter.parent / "models--a--b" / "snapshots" / "c0ffee" / "sub"
    snapshot.parent.mkdir(parents=True)
    adapter.rename(snapshot)
    monkeypatch.setattr(adapter_source, "_download", lambda source, hint: snapshot.parent)
    config = make(uno_lora_path="a/b:sub", uno_lora_revision="main")
    assert (config.uno_lora_path, config.uno_lora_revision) == ("a/b:sub", "c0ffee")


def test_the_adapter_is_sought_with_the_targets_data(make, adapter, monkeypatch):
    asked = []

    def find_adapter(*args):
        asked.append(args)
        return adapter_source.AdapterSource(str(adapter))

    monkeypatch.setattr(adapter_source, "find_adapter", find_adapter)
    model = TargetModel(model="a/b", revision="r1")
    make(uno_lora_path=None, uno_lora_revision="r2", target_model_config=model)
    assert asked == [("a/b", "r1", None, "r2")]
    assert "vocabulary [0, 40)" in error_of(make, target_model_config=TargetModel(vocab_size=40))


def test_no_adapter_found(make, tmp_path):
    text = error_of(make, uno_lora_path=None, target_model_config=TargetModel(str(tmp_path)))
    assert "no UNO adapter found" in text
    assert "Set uno_lora_path" in text
    assert "does not exist" in error_of(make, uno_lora_path="/no/such/folder")


def test_no_noise_range(make, adapter):
    (adapter / "uno_config.json").unlink()
    assert "Set uno_mask_token_id" in error_of(make)
    config = make(uno_mask_token_id=60, uno_noise_low=3)
    assert (config.uno_noise_low, config.uno_mask_token_id) == (3, 60)


def test_what_the_rest_of_vllm_reads(make):
    config = make()
    assert config.max_num_new_slots_for_drafting == 0
    assert config.uses_draft_kv_cache() is False
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (0, 0)
    assert config.model is None
    assert config.draft_model_config is None
    assert config.draft_parallel_config is None
    assert not config.use_eagle()
    assert not config.uses_draft_model()
    assert not config.uses_dynamic_speculative_decoding()
    assert config.compute_hash() == make(num_speculative_tokens=4).compute_hash()
    assert repr(config) == (
        f"UnoSpeculativeConfig(num_speculative_tokens=8, uno_lora_path={config.uno_lora_path!r}, "
        "noise=[2, 50), draft_sample_method='probabilistic', rejection_sample_method='standard')"
    )


def test_unknown_settings(make):
    text = error_of(make, uno_lora="x", block_size=4)
    assert "unknown setting(s)" in text
    assert "block_size, uno_lora." in text
    for name in UnoSpeculativeConfig.settings:
        assert name in text
    fields = {field.name for field in dataclasses.fields(UnoSpeculativeConfig)}
    assert set(UnoSpeculativeConfig.settings) <= fields


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "at least 1", "default of 8"]),
        ({"num_speculative_tokens": -3}, ["num_speculative_tokens", "got -3"]),
        ({"num_speculative_tokens": "x"}, ["num_speculative_tokens", "valid integer"]),
        ({"uno_noise_seed": -1}, ["uno_noise_seed", "between 0 and 2147483647"]),
        ({"uno_noise_seed": 2**31}, ["uno_noise_seed", "between 0 and 2147483647"]),
        ({"draft_sample_method": "gready"}, ["draft_sample_method", "'probabilistic'"]),
        (
            {"rejection_sample_method": "block"},
            ["not lossless over several cycles", "Use rejection_sample_method='standard'"],
        ),
        ({"rejection_sample_method": "x"}, ["rejection_sample_method"]),
        ({"method": "ngram"}, ["method", "'uno'"]),
        (
            {"synthetic_acceptance_length": 2.0},
            ["only valid with rejection_sample_method='synthetic'"],
        ),
        ({"target_model_config": None}, ["target_model_config is missing"]),
    ],
)
def test_values_that_break(make, settings, texts):
    message = error_of(make, **settings)
    for text in texts:
        assert text in message


SENSELESS = {
    "model": "x",
    "revision": "x",
    "code_revision": "x",
    "quantization": "fp8",
    "max_model_len": 128,
    "draft_tensor_parallel_size": 1,
    "tensor_parallel_size": 1,
    "enforce_eager": True,
    "moe_backend": "triton",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_dtype": "fp8",
    "use_heterogeneous_vocab": True,
    "parallel_drafting": True,
    "disable_padded_drafter_batch": True,
    "disable_eagle_block_drop": True,
    "use_local_argmax_reduction": True,
    "enable_adaptive_verification": True,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "suffix_decoding_max_tree_depth": 3,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.5,
    "index_share_for_mtp_iteration": True,
    "dspark_draft_topk": 4,
    "draft_load_config": {},
}


@pytest.mark.parametrize("name", SENSELESS)
def test_settings_of_other_methods_are_refused(make, name):
    text = error_of(make, **{name: SENSELESS[name]})
    assert f"{name}=" in text
    assert "is refused for speculative method 'uno': " in text
    assert "Leave it out." in text


def test_their_defaults_are_not(make):
    for field in dataclasses.fields(SpeculativeConfig):
        if field.name in SENSELESS:
            make(**{field.name: UnoSpeculativeConfig._default_of(field)})


def test_every_field_of_the_parent_is_accounted_for():
    """A field that a later vLLM adds must be looked at."""
    derived = {"draft_model_config", "draft_parallel_config"}
    targets = {"target_model_config", "target_parallel_config"}
    known = {*SENSELESS, *UnoSpeculativeConfig.settings, *derived, *targets}
    assert {field.name for field in dataclasses.fields(SpeculativeConfig)} - known == set()


def test_schedule_by_batch_size(make):
    schedule = [(1, 4, 8), (5, 64, 2), (65, 256, 0)]
    config = make(num_speculative_tokens=8, num_speculative_tokens_per_batch_size=schedule)
    assert config.num_speculative_tokens_per_batch_size == schedule
    assert config.uses_dynamic_speculative_decoding()
    assert config.block_size == 8
    assert dataclasses.replace(config).num_speculative_tokens_per_batch_size == schedule


@pytest.mark.parametrize(
    ("schedule", "more", "text"),
    [
        ([(1, 4, 9)], {}, "asks for 9 drafts, num_speculative_tokens .* is 8"),
        ([(4, 1, 2)], {}, "range start must be <= end"),
        ([], {}, "must not be empty"),
        ([(1, 4, -1)], {}, "must be >= 0"),
        ([(1, 4, 2)], {"uno_tree_top_k": 4}, "refused with uno_mode 'tree'"),
    ],
)
def test_schedules_that_break(make, schedule, more, text):
    message = error_of(
        make, num_speculative_tokens=8, num_speculative_tokens_per_batch_size=schedule, **more
    )
    assert "num_speculative_tokens_per_batch_size" in message
    assert re.search(text, message)


def test_synthetic(make, warnings):
    config = make(
        num_speculative_tokens=4,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=3.5,
    )
    assert config.synthetic_acceptance_rates == [1.0, 1.0, 0.5, 0.0]
    assert config.synthetic_acceptance_length is None
    assert len(warnings) == 1
    assert "NOT lossless" in warnings[0]
    assert "benchmarks" in warnings[0]
    rates = [0.9, 0.5]
    config = make(
        num_speculative_tokens=2,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
    )
    assert config.synthetic_acceptance_rates == rates
    assert dataclasses.replace(config).synthetic_acceptance_rates == rates
    text = error_of(make, rejection_sample_method="synthetic")
    assert "requires exactly one of synthetic_acceptance_rates" in text


def test_a_block_wider_than_trained_is_warned_about(make, warnings):
    make(num_speculative_tokens=8)
    assert not warnings
    make(num_speculative_tokens=9)
    assert len(warnings) == 1
    assert "num_speculative_tokens=9 is more than the largest block size" in warnings[0]
    assert "(8)" in warnings[0]


@pytest.mark.parametrize(
    "clone",
    [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy, dataclasses.replace],
    ids=["pickle", "copy", "deepcopy", "replace"],
)
def test_survives(make, clone):
    config = make(uno_noise_seed=7, num_speculative_tokens=5)
    again = clone(config)
    assert type(again) is UnoSpeculativeConfig
    assert again is not config
    assert again == config
    assert repr(again) == repr(config)
    assert again.uno_noise_seed == 7
    assert dataclasses.replace(again, num_speculative_tokens=3).num_speculative_tokens == 3


def test_unpickles_without_search_or_files(make, adapter):
    data = pickle.dumps(make())
    (adapter / "adapter_config.json").unlink()
    assert pickle.loads(data).uno_mask_token_id == 50


def test_unpickles_with_no_plugin_loaded(make):
    """vLLM's child processes unpickle it before they load plugins."""
    code = (
        "import pickle, sys\n"
        "config = pickle.load(sys.stdin.buffer)\n"
        "loaded = [n for n in sys.modules if n.startswith('vllm_uno.')]\n"
        "print(loaded, 'vllm.engine.arg_utils' in sys.modules, config.uno_mask_token_id)"
    )
    config = make()
    config.target_model_config = None  # a class of this test file, unknown over there
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(config),
        env={**os.environ, "VLLM_PLUGINS": ""},
        cwd=Path(module.__file__).parent.parent,
        capture_output=True,
        check=True,
    )
    assert result.stdout.decode().splitlines()[-1] == "['vllm_uno.config'] False 50"


def test_draft_vocabulary_is_checked_at_once_and_made_absolute(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.json").write_text(json.dumps(list(range(40))))
    config = make(uno_draft_vocab="v.json")
    assert config.uno_draft_vocab == str(tmp_path / "v.json")
    assert pickle.loads(pickle.dumps(config)).uno_draft_vocab == config.uno_draft_vocab
    assert dataclasses.replace(config).uno_draft_vocab == config.uno_draft_vocab
    assert make().uno_draft_vocab is None
    assert "uno_draft_vocab: no.json does not exist" in error_of(make, uno_draft_vocab="no.json")
    (tmp_path / "v.json").write_text(json.dumps([*range(40), VOCAB]))
    assert "outside the model's vocabulary" in error_of(make, uno_draft_vocab="v.json")


@pytest.mark.parametrize("mode", [{}, {"uno_mode": "tree"}])
def test_coarse_drafts(make, mode):
    assert make(**mode).uno_draft_quantization is None and make(**mode).uno_draft_context is None
    config = make(uno_draft_quantization="fp8", uno_draft_context=1024, **mode)
    again = dataclasses.replace(pickle.loads(pickle.dumps(config)))
    assert (again.uno_draft_quantization, again.uno_draft_context) == ("fp8", 1024)
    assert "uno_draft_context must be at least 1" in error_of(make, uno_draft_context=0, **mode)
    assert "uno_draft_quantization" in error_of(make, uno_draft_quantization="int4", **mode)


def test_tree_defaults(make, warnings):
    config = make(uno_mode="tree")
    assert (config.block_size, config.uno_tree_top_k, config.num_speculative_tokens) == (16, 32, 32)
    assert config.draft_sample_method == "greedy"  # no draft law is kept
    assert config.uno_mode == "tree"
    assert "uno_mode='tree', uno_block_size=16, uno_tree_top_k=32" in repr(config)
    assert "uno_block_size=16 is more than the largest block size" in warnings[0]


def test_top_k_turns_tree_mode_on(make):
    config = make(uno_tree_top_k=4, uno_block_size=6, num_speculative_tokens=20)
    assert config.uno_mode == "tree"
    assert (config.block_size, config.uno_tree_top_k, config.num_speculative_tokens) == (6, 4, 20)
    assert make(uno_tree_top_k=1).uno_mode == "linear"
    # Of one candidate a position: a chain, if it is asked for.
    assert make(uno_mode="tree", uno_tree_top_k=1, num_speculative_tokens=8).uno_mode == "tree"


def test_linear_block_size(make):
    for settings in (
        {"num_speculative_tokens": 4},
        {"uno_block_size": 4},
        {"uno_block_size": 4, "num_speculative_tokens": 4, "uno_mode": "linear"},
    ):
        config = make(**settings)
        assert config.uno_mode == "linear"
        assert config.block_size == config.num_speculative_tokens == 4
        assert config.uno_tree_top_k == 1


def test_tree_survives_replace_and_pickle(make):
    config = make(uno_mode="tree", num_speculative_tokens=20)
    for again in (pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert (again.uno_mode, again.block_size, again.uno_tree_top_k) == ("tree", 16, 32)
        assert again.num_speculative_tokens == 20


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"num_speculative_tokens": 1}, ["(the tree's nodes V) must be 2 to 128", "got 1 nodes"]),
        ({"num_speculative_tokens": 129, "uno_tree_top_k": 4}, ["must be 2 to 128", "got 129"]),
        ({"uno_block_size": 1}, ["uno_block_size (B) must be at least 2"]),
        ({"uno_tree_top_k": 0}, ["uno_tree_top_k", "must be 1 to 128"]),
        ({"uno_tree_top_k": 129, "num_speculative_tokens": 4}, ["must be 1 to 128"]),
        (
            {"uno_tree_top_k": 65, "num_speculative_tokens": 64},
            ["(V * K) must be at most 4096", "Lower uno_tree_top_k to at most 64"],
        ),
        (
            {"uno_tree_top_k": 3, "uno_block_size": 3, "num_speculative_tokens": 14},
            ["cannot be filled", "give 13 nodes"],
        ),
        ({"uno_tree_top_k": 101, "num_speculative_tokens": 4}, ["vocabulary of 100 tokens"]),
        ({"draft_sample_method": "probabilistic"}, ["draft_sample_method", "no draft law"]),
        ({"uno_draft_vocab": "ids.json"}, ["uno_draft_vocab is refused with uno_mode 'tree'"]),
        ({"rejection_sample_method": "block"}, ["'block' is not lossless"]),
        ({"uno_mode": "linear", "uno_tree_top_k": 4}, ["uno_tree_top_k=4 with uno_mode 'linear'"]),
        (
            {"uno_mode": "linear", "uno_block_size": 4, "num_speculative_tokens": 8},
            ["uno_block_size=4 with num_speculative_tokens=8", "they are the same"],
        ),
    ],
)
def test_refused_trees(make, settings, texts):
    message = error_of(make, **{"uno_mode": "tree", **settings})
    for text in texts:
        assert text in message


def test_tree_of_every_candidate_is_filled(make):
    assert (
        make(uno_tree_top_k=3, uno_block_size=3, num_speculative_tokens=13).num_speculative_tokens
        == 13
    )
