"""The problems of the task, from a local file."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def load_problems(problems: str = "", **_: Any) -> dict[str, Dataset]:
    """The test split: {"question", "answer"} of every line {"messages", "answer"} of a file.

    lm-eval passes all of its --metadata and --model_args here.
    """
    if not problems:
        raise ValueError(
            "uno_bundled has no problems: make a file with python -m vllm_uno.bundled.problems "
            '--split test --count 500 --out F.jsonl and add --metadata \'{"problems": "F.jsonl"}\''
        )
    rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
    return {
        "test": Dataset.from_list(
            [{"question": r["messages"][0]["content"], "answer": str(r["answer"])} for r in rows]
        )
    }
