"""FP8 weights and a part of the context in the draft: tokens and law stay plain vLLM's.

That the draft is what the settings say is in test_draft.py, against transformers and PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, engine
from law_run import ALPHA, SETTINGS, law_engine, run_setting, write_models
from prompts import make_prompts
from safetensors.torch import load_file
from vllm import SamplingParams

from vllm_uno.bundled import as_chat, bundled_model
from vllm_uno.bundled.problems import generate
from vllm_uno.draft_fp8 import quantise_rows

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
COARSE = {"uno_draft_quantization": "fp8", "uno_draft_context": 40}


def prompts(running: Engine) -> list[list[int]]:
    tokenizer = running.llm.get_tokenizer()
    return [tokenizer.encode(as_chat(p.question)) for p in generate("test", 8, 0)]


@pytest.fixture(scope="module")
def random_plain(model: Path) -> list[list[int]]:
    with engine(model) as e:
        return e.tokens(make_prompts(2048), GREEDY)


class TestTrained:
    @pytest.fixture(scope="class")
    def plain(self) -> list[list[int]]:
        with engine(bundled_model()) as e:
            return e.tokens(prompts(e), GREEDY)

    def test_greedy_is_plains_with_drafts_nearly_as_good(self, plain: list[list[int]]) -> None:
        with engine(bundled_model(), {"uno_draft_quantization": "fp8"}) as e:
            assert e.tokens(prompts(e), GREEDY) == plain
            stats = e.speculator.counters.snapshot()
        assert stats.acceptance[0] > 0.95  # exact drafts: 1.0
        assert stats.tokens_per_cycle > 6.0


class TestRandom:
    @pytest.fixture(scope="class")
    def uno(self, model: Path, adapter: Path, random_plain: list[list[int]]) -> Iterator[Engine]:
        settings = {"uno_lora_path": str(adapter), "num_speculative_tokens": 4, **COARSE}
        with engine(model, settings, num_gpu_blocks_override=24) as e:
            yield e

    def test_greedy_is_plains(self, uno: Engine, random_plain: list[list[int]]) -> None:
        """Under preemption, too."""
        assert uno.tokens(make_prompts(2048), GREEDY) == random_plain
        assert uno.preemptions
        # Of contexts that are seen whole nearly every row 0 is right; of the others few.
        assert 0.05 < uno.speculator.counters.snapshot().acceptance[0] < 0.95

    def test_reloaded_weights_are_quantised_again(self, uno: Engine, model: Path) -> None:
        """And read where graphs read them."""
        name = "model.layers.0.mlp.down_proj"
        layer = uno.speculator.model.get_submodule(name)
        before, address = layer.uno_wq.float(), layer.uno_wq.data_ptr()
        weights = load_file(model / "model.safetensors")
        weights[f"{name}.weight"] = weights[f"{name}.weight"].flip(0)
        uno.runner.reload_weights(weights_iterator=iter(weights.items()))
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        uno.tokens(make_prompts(2048, 2), short)
        wq, scale = quantise_rows(weights[f"{name}.weight"])
        assert layer.uno_wq.data_ptr() == address
        assert torch.equal(layer.uno_wq.float(), wq.float()) and torch.equal(layer.uno_sw, scale)
        assert not torch.equal(layer.uno_wq.float(), before)
        # A transfer of weights that goes past `load_weights`: the runner alone is told.
        layer.uno_wq.zero_()
        uno.runner.reset_lora_state()
        uno.tokens(make_prompts(2048, 2), short)
        assert torch.equal(layer.uno_wq.float(), wq.float())


class TestTrees:
    def test_greedy_is_plains(
        self, model: Path, adapter: Path, random_plain: list[list[int]]
    ) -> None:
        tree = {"uno_mode": "tree", "uno_block_size": 4, "uno_tree_top_k": 4}
        settings = {"uno_lora_path": str(adapter), "num_speculative_tokens": 8, **tree, **COARSE}
        with engine(model, settings) as e:
            assert e.tokens(make_prompts(2048), GREEDY) == random_plain
            assert 0.05 < e.speculator.counters.snapshot().acceptance[0] < 0.95


class TestSampledLaw:
    @pytest.fixture(scope="class")
    def law(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
        folder = tmp_path_factory.mktemp("law") / "models"
        write_models(folder)
        with law_engine(folder, SETTINGS["t1"], max_num_seqs=64, **COARSE) as e:
            yield e, folder

    @pytest.mark.parametrize("name", [pytest.param("t0.7", marks=pytest.mark.slow), "top_k-top_p"])
    def test_continuations_follow_the_law(self, law: tuple[Engine, Path], name: str) -> None:
        running, folder = law
        report = run_setting(running, SETTINGS[name], folder, requests=120, tokens=7)
        assert report.impossible == 0
        assert report.p_value > ALPHA
        assert 0.5 < report.acceptance[0] < 1.0 and min(report.acceptance) > 0.02, report.acceptance
