"""benchmarks/grading.py: what counts as the right answer."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import grading
from grading import final_answer, is_correct, read_integer

needs_math_verify = pytest.mark.usefixtures("math_verify")


@pytest.fixture(scope="module")
def math_verify() -> Iterator[None]:
    pytest.importorskip("math_verify", reason='needs pip install ".[eval]"')
    yield
    grading._symbolic.stop()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 42.", "42"),
        ("6 * 7 = 42\n#### 42", "42"),
        ("The answer is 7. No: the answer is 42.\n", "42"),
        ("The answer is -3", "-3"),
        ("So it costs \\boxed{1,000}.", "1000"),
        ("#### $1,000.00", "1000"),
        ("**Answer:** 5? The answer is **42**.", "42"),
        ("<think>The answer is 41.</think>The answer is 42.", "42"),
        ("The answer is 41. \\boxed{42}", "42"),
        ("\\boxed{p - q}", "p - q"),
    ],
)
def test_right_without_math_verify(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading._symbolic, "same", None)
    assert is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 43.", "42"),
        ("The answer is 42. Wait, the answer is 24.", "42"),
        ("\\boxed{42} or rather \\boxed{41}", "42"),
        ("We add 40 and 2, which makes 42", "42"),  # cut off: states no answer
        ("<think>The answer is 42.", "42"),  # cut off while thinking
        ("\\boxed{42", "42"),
        ("\\boxed{}", "42"),
        ("The answer is", "42"),
        ("", "42"),
        ("The answer is 42.", ""),
        ("", ""),
    ],
)
def test_wrong_without_math_verify(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading._symbolic, "same", None)
    assert not is_correct(text, answer)


@needs_math_verify
@pytest.mark.parametrize(
    ("stated", "answer"),
    [
        ("0.5", "\\frac{1}{2}"),
        ("1/2", "\\frac{1}{2}"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac12", "1/2"),
        ("50\\%", "0.5"),
        ("50\\%", "50"),
        ("18\\text{ dollars}", "18"),
        ("\\sqrt{18}", "3\\sqrt{2}"),
        ("-q+p", "p - q"),
        ("x=5", "5"),
        ("\\left(3,\\frac{\\pi}{2}\\right)", "(3, \\frac{\\pi}{2})"),
        ("(-\\infty,2) \\cup (3, \\infty)", "(-\\infty, 2)\\cup(3,\\infty)"),
        ("\\text{Evelyn}", "Evelyn"),
    ],
)
def test_equivalent_forms(stated: str, answer: str) -> None:
    assert is_correct(f"Therefore \\boxed{{{stated}}}.", answer)
    assert is_correct(f"The answer is ${stated}$.", answer)


@needs_math_verify
@pytest.mark.parametrize(
    ("stated", "answer"),
    [
        ("-\\frac{1}{2}", "\\frac{1}{2}"),
        ("0.333", "\\frac{1}{3}"),
        ("\\frac{1}{", "\\frac{1}{2}"),
        ("\\frac{1}{0}", "\\frac{1}{2}"),
        ("}{", "\\frac{1}{2}"),
        ("\\left(\\right", "5"),
        ("words, only words", "5"),
        ("\x00", "5"),
        ("\\binom{100000}{50000}", "\\frac{1}{2}"),  # more digits than Python prints
    ],
)
def test_wrong_and_malformed(stated: str, answer: str) -> None:
    assert not is_correct(f"The answer is ${stated}$.", answer)


@needs_math_verify
def test_an_endless_comparison_is_wrong_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grading, "LIMIT_S", 1.0)
    assert not is_correct("\\boxed{9^{9^{9}}}", "\\frac{1}{2}")
    monkeypatch.undo()
    assert is_correct("\\boxed{0.5}", "\\frac{1}{2}")


@needs_math_verify
def test_works_in_threads() -> None:
    right: list[bool] = []
    threads = [
        threading.Thread(target=lambda: right.append(is_correct("\\boxed{0.5}", "\\frac{1}{2}")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is 3.5.", "3.5"),
        ("The answer is 3.5. It is.", "3.5"),
        ("Answer: (1, 2)\nDone", "(1, 2)"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {a}", "a"),
        ("The answer is $\\frac{1}{2}$.", "\\frac{1}{2}"),
        ("**Answer**: 5. The answer is: **\\$5**\n", "\\$5"),
        ("The answer is", ""),
        ("nothing", None),
    ],
)
def test_final_answer(text: str, stated: str | None) -> None:
    assert final_answer(text) == stated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),
        ("1000.", 1000),
        ("1000.00", 1000),
        ("\\$ 1,000", 1000),
        ("11,\\! 111", 11111),
        ("+5", 5),
        ("-5", -5),
        ("1,00", None),
        ("1.5", None),
        ("5x", None),
        ("", None),
        ("9" * 5000, None),  # int() itself refuses that many digits
    ],
)
def test_read_integer(text: str, value: int | None) -> None:
    assert read_integer(text) == value
