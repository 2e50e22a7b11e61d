"""Sampled text under a grammar is distributed as plain vLLM's.

The grammar allows four letters twice, then two of them only, which drafts do not know. vLLM marks
a draft that breaks it and draws from p in its place: right only where the draft's law is one-hot.
The letters are those for which a law that is not shows most on this model.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch
from engines import Engine, engine
from law import law_test
from law_run import ALPHA
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = [100, 200, 77, 300, 5, 9]
LETTERS = "dlim"
REQUESTS, AT_ONCE = 640, 64


def plains_law(e: Engine, letters: list[int]) -> dict[tuple[int, ...], float]:
    """Of the first three tokens, from plain log-probabilities after every prefix."""
    prefixes = [(), *itertools.product(letters), *itertools.product(letters, repeat=2)]
    one = SamplingParams(temperature=1.0, max_tokens=1, logprobs=512)
    laws = {}
    outputs = e.outputs([PROMPT + list(prefix) for prefix in prefixes], one)
    for prefix, output in zip(prefixes, outputs, strict=True):
        allowed = letters if len(prefix) < 2 else letters[:2]
        weights = {t: math.exp(output.outputs[0].logprobs[0][t].logprob) for t in allowed}
        laws[prefix] = {t: weight / sum(weights.values()) for t, weight in weights.items()}
    return {
        (x, y, z): laws[()][x] * laws[(x,)][y] * laws[(x, y)][z]
        for x, y in itertools.product(letters, repeat=2)
        for z in letters[:2]
    }


def p_value(e: Engine, letters: list[int], law: dict[tuple[int, ...], float]) -> float:
    grammar = f"[{LETTERS}]{{2}}[{LETTERS[:2]}]{{9}}"
    texts: list[tuple[int, ...]] = []
    for start in range(0, REQUESTS, AT_ONCE):
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=3,
                seed=start + i,
                allowed_token_ids=letters,
                ignore_eos=True,
                structured_outputs=StructuredOutputsParams(regex=grammar),
            )
            for i in range(AT_ONCE)
        ]
        texts += [tuple(tokens) for tokens in e.tokens([PROMPT] * AT_ONCE, params)]
    assert set(texts) <= set(law)
    number = {text: i for i, text in enumerate(law)}
    return law_test(
        torch.zeros(REQUESTS, dtype=torch.int64),
        torch.tensor([number[text] for text in texts]),
        torch.tensor(list(law.values())).expand(REQUESTS, -1),
    ).p_value


def test_sampled_text_under_a_grammar_follows_the_law(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", vocab_size=512)
    adapter = write_random_adapter(tmp_path / "adapter", model, mask_token_id=2)
    uno = {"uno_lora_path": str(adapter), "num_speculative_tokens": 2}
    with engine(
        model, uno, max_num_seqs=AT_ONCE, max_num_batched_tokens=1024, max_logprobs=512
    ) as e:
        tokenizer = e.llm.get_tokenizer()
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
        law = plains_law(e, letters)
        assert p_value(e, letters, law) > ALPHA
        # Sabotage: the drafts' own law is tested against.
        e.speculator.one_hot = torch.zeros_like(e.speculator.one_hot)
        assert p_value(e, letters, law) < 1e-3
