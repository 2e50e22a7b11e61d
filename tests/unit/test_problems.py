"""The bundled model's text: right sums, clean splits, and the law of the answers; and the bound of
benchmarks/drafting_bound.py on laws small enough to work out by hand."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from vllm_uno.bundled import problems
from vllm_uno.bundled.problems import Content, Event, continuations, extract_final, generate

ROOT = Path(__file__).parents[2]
EQUATION = re.compile(r"(\d+)(?: [a-z]+)? ([-+*/]) (\d+) = (\d+)")


def wrong_equations(answer: str) -> list[str]:
    wrong = []
    for match in EQUATION.finditer(answer):
        left, right, result = (int(match[i]) for i in (1, 3, 4))
        law = {"+": left + right, "-": left - right, "*": left * right}
        # A division leaves no rest.
        right_result = law[match[2]] if match[2] in law else left / right
        if right_result != result:
            wrong.append(match[0])
    return wrong


def test_same_seed_same_text_in_any_process() -> None:
    code = (
        "from vllm_uno.bundled.problems import generate\n"
        "for split in ('train', 'test'):\n"
        "    for p in generate(split, 20, 3): print(p)"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0].splitlines())) == 40


def test_splits_are_disjoint_and_about_one_in_32() -> None:
    train = set(problems.contents("train", 5000))
    test = list(problems.contents("test", 300))
    assert len(set(test)) == len(test)
    assert not train & set(test)
    # Whatever the seed, a content is on its side.
    rng = random.Random(0)
    drawn = [problems._draw_content(rng).split for _ in range(8000)]
    assert 0.7 / 32 < drawn.count("test") / len(drawn) < 1.3 / 32


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("wording", ["varied", "fixed"])
def test_sums_are_right(split: problems.Split, wording: problems.Wording) -> None:
    for problem in generate(split, 1000, 11, wording):
        assert not wrong_equations(problem.answer), problem
        # No sum in a form that the test does not read.
        assert len(EQUATION.findall(problem.answer)) == problem.answer.count("="), problem
        assert extract_final(problem.answer) == problem.final
        assert re.search(rf"answer is {problem.final}\.$", problem.answer)
        # The last sum gives the final number.
        assert int(EQUATION.findall(problem.answer)[-1][-1]) == problem.final


def test_numbers_stay_in_range() -> None:
    for problem in generate("train", 2000, 5):
        numbers = [int(n) for n in re.findall(r"-?\d+", problem.question + problem.answer)]
        assert all(0 <= n <= problems.LARGEST for n in numbers), problem
        for left, operator, right, result in EQUATION.findall(problem.answer):
            if operator == "*":
                small, large = sorted((int(left), int(right)))
                assert small <= 9 and large <= 20
                assert int(result) <= problems.LARGEST_PRODUCT
            if operator == "/":
                assert int(right) <= 9 and int(result) <= 20


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("He has 3 + 4 = 7. The answer is 7.", 7),
        ("So the answer is 120", 120),
        ("The answer is 5. No, the answer is 6.", 6),
        ("Answer: 12", 12),
        ("the answer is 0.", 0),
        ("The answer is -3.", -3),
        ("The answer is 4.5.", None),
        ("The answer is", None),
        ("He has 7.", None),
        ("", None),
    ],
)
def test_extract_final(text: str, final: int | None) -> None:
    assert extract_final(text) == final


def test_continuations_start_with_the_prefix_and_are_right() -> None:
    for number, content in enumerate(problems.contents("test", 10, 2)):
        whole = continuations(content, "", 1, number)[0]
        for cut in range(0, len(whole) + 1, 17):
            drawn = continuations(content, whole[:cut], 8, number)
            assert all(text.startswith(whole[:cut]) for text in drawn)
            assert not any(wrong_equations(text) for text in drawn)
            assert all(extract_final(text) == content.final for text in drawn)
        assert continuations(content, whole, 3, number) == [whole] * 3
    with pytest.raises(ValueError, match="no answer"):
        continuations(content, "Once upon a time", 1, 0)


def test_continuations_have_the_law_of_whole_answers_with_the_prefix() -> None:
    events = (Event("gain", "finds", 1, 5, ""), Event("bags", "buys", 2, 4, "bags"))
    content = Content("Mia", "she", "coins", 10, events, None)
    prefix = "Mia has 10 coins at first. She"
    rest = [
        text[len(prefix) :].split(",")[0].split(":")[0]
        for text in continuations(content, "", 20_000, 0)
        if text.startswith(prefix)
    ]
    direct = Counter(rest)
    drawn = Counter(
        text[len(prefix) :].split(",")[0].split(":")[0]
        for text in continuations(content, prefix, 5000, 1)
    )
    assert len(rest) > 1000
    for beginning in direct | drawn:
        p, n = drawn[beginning] / 5000, direct[beginning] / len(rest)
        assert abs(p - n) < 4 * (p * (1 - p) / 5000 + n * (1 - n) / len(rest)) ** 0.5 + 2e-3


def test_answers_vary_and_their_steps_change_places() -> None:
    events = (Event("loss", "loses", 1, 8, ""), Event("gain", "finds", 1, 5, ""))
    content = Content("Mia", "she", "coins", 10, events, None)
    drawn = continuations(content, "", 64, 0)
    assert len(set(drawn)) >= 50
    gain_first = sum(text.index("finds") < text.index("loses") for text in drawn)
    assert 5 < gain_first < 40


def test_a_total_never_goes_below_zero_nor_a_step_past_a_share() -> None:
    events = (
        Event("gain", "finds", 1, 8, ""),
        Event("loss", "loses", 1, 6, ""),
        Event("share", "gives half to Tom", 2, 0, ""),
        Event("loss", "sells", 1, 1, ""),
    )
    content = Content("Mia", "she", "coins", 4, events, None)
    for text in continuations(content, "", 200, 0):
        assert text.index("finds") < text.index("loses") < text.index("half") < text.index("sells")


def test_fixed_wording_says_each_thing_in_one_way() -> None:
    for varied, fixed, again in zip(
        generate("test", 50, 1),
        generate("test", 50, 1, "fixed"),
        generate("test", 50, 1, "fixed"),
        strict=True,
    ):
        assert fixed == again
        assert fixed.final == varied.final
        assert "do not" not in fixed.answer
    content = next(problems.contents("test", 1))
    answers = {problems.write(content, random.Random(n), "fixed") for n in range(20)}
    assert len(answers) == 1


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "test.jsonl"
    monkeypatch.setattr(sys, "argv", ["problems", "--count", "3", "--out", str(out)])
    problems.main()
    lines = out.read_text().splitlines()
    assert len(lines) == 3
    problem = next(generate("test", 1))
    assert problem.question in lines[0] and f'"answer": "{problem.final}"' in lines[0]


def load(path: str) -> ModuleType:
    """A script of this repository as a module."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tokenizer_of_the_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    train_base = load("examples/bundled_model/train_base.py")
    train_base.make_tokenizer(train_base.render_plain(1500)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1024 and tokenizer.mask_token_id == 1023
    rng = random.Random(0)
    blocks = (range(32, 127), range(0xA0, 0x3000), range(0x1F300, 0x1F600), range(9, 11))
    for _ in range(200):
        text = "".join(chr(rng.choice(rng.choice(blocks))) for _ in range(rng.randrange(30)))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    problem = next(generate("test", 1))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.answer},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == train_base.render(problem)
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt) and prompt.endswith("<|assistant|>")
    tokens = tokenizer.tokenize("The answer is 117.")
    assert [token for token in tokens if token.isdigit()] == ["1", "1", "7"]


def test_rows_hold_whole_documents() -> None:
    train_base = load("examples/bundled_model/train_base.py")
    rng = random.Random(0)
    documents = [[n] * rng.randint(1, 60) for n in range(300)]
    rows = list(train_base.pack(iter(documents), 64))
    packed = []
    for ids, sizes in rows:
        assert len(ids) == sum(sizes) <= 64
        for size in sizes:
            packed.append(ids[:size])
            ids = ids[size:]
    assert sorted(packed) == sorted(documents)
    with pytest.raises(ValueError, match="65 tokens"):
        list(train_base.pack([[0] * 65], 64))


@pytest.fixture(scope="module")
def drafting_bound() -> ModuleType:
    return load("benchmarks/drafting_bound.py")


END = 0


def test_bound_of_two_branches(drafting_bound: ModuleType) -> None:
    """One of two branches of equally likely tokens: each token behind the fork is a coin toss."""
    rng = random.Random(0)
    draws = drafting_bound.Draws([[1 + rng.randrange(2)] * 5 for _ in range(4000)])
    accepted, emitted = drafting_bound.cycle(draws, 4, END, rng)
    assert accepted == pytest.approx([1, 0.5, 0.25, 0.125], abs=0.03)
    assert len(emitted) in (1, 2, 3, 4, 5) and len(set(emitted)) == 1


def test_bound_with_given_chances_and_an_uneven_fork(drafting_bound: ModuleType) -> None:
    """w = 0.8 / 0.2: P(k accepted) = w ** k + (1 - w) ** k, the fork itself being exact."""
    rng = random.Random(0)
    tokens, chances = [], []
    for _ in range(8000):
        token = 1 if rng.random() < 0.8 else 2
        tokens.append([token] * 4)
        chances.append([0.8 if token == 1 else 0.2, 1.0, 1.0, 1.0])
    accepted, _ = drafting_bound.cycle(drafting_bound.Draws(tokens, chances), 3, END, rng)
    assert accepted == pytest.approx([1, 0.68, 0.52], abs=0.02)


def test_bound_without_chance_and_at_the_end(drafting_bound: ModuleType) -> None:
    """A certain text is accepted whole; what lies behind the end token does not count."""
    text = [5, 6, 7, 8, 9, 10, END]

    def source(answer: list[int], length: int) -> object:
        return drafting_bound.Draws([text[len(answer) : len(answer) + length]] * 8)

    result = drafting_bound.bound([source], 4, END)
    # The prefill emits the first token, one cycle the next 5; the last, of the end token alone,
    # does not count.
    assert (result.cycles, result.tau) == (1, 5.0)
    assert result.accepted == [1.0] * 4
    assert result.low == result.high == 5.0
