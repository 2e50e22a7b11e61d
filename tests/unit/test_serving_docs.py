"""docs/serving.md names tests that exist, one at least in every row of its tables."""

import ast
import re
from pathlib import Path

import pytest
from gpu.serving_report import CHECKS

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/serving.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| feature", "|---"))
]
LINK = re.compile(r"`(tests/\S+?\.py)::(\w+)(?:\[([\w-]+)\])?`")


def functions(file: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


def missing(row: str) -> list[str]:
    """What is wrong with the last column of a row."""
    named = LINK.findall(row.rsplit("|", 2)[1])
    if not named:
        return ["no test"]
    return [
        f"{file}::{name}" + (f"[{case}]" if case else "")
        for file, name, case in named
        if not (ROOT / file).is_file()
        or name not in functions(ROOT / file)
        or ((name == "test_one_gpu" or case) and case not in CHECKS)
    ]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:40] for row in ROWS])
def test_the_named_tests_exist(row: str) -> None:
    assert not missing(row)
    assert len(row.strip("| ").split(" | ")) == 4 or "| |" in row


def test_there_are_rows() -> None:
    assert len(ROWS) > 40


def test_what_is_missing_is_seen() -> None:
    assert missing("| a | works | works | none |") == ["no test"]
    assert missing("| a | | | `tests/unit/test_serving_docs.py::test_nothing` |") == [
        "tests/unit/test_serving_docs.py::test_nothing"
    ]
    assert missing("| a | | | `tests/unit/no_file.py::test_there_are_rows` |") == [
        "tests/unit/no_file.py::test_there_are_rows"
    ]
    assert not missing("| a | | | `tests/unit/test_serving_docs.py::test_there_are_rows` |")
    # One function, many cases: the row says which.
    one = "tests/gpu/test_serving_gpu.py::test_one_gpu"
    assert not missing(f"| a | | | `{one}[greedy-awq]` |")
    assert missing(f"| a | | | `{one}[greedy-no]` |") == [f"{one}[greedy-no]"]
    assert missing(f"| a | | | `{one}` |") == [one]
