"""The `vllm-uno` command: `train`, `eval-adapter` and `draft-vocab`."""

from __future__ import annotations

import sys
from typing import TypeVar

Settings = TypeVar("Settings")

COMMANDS = {
    "train": "train a UNO adapter for a model",
    "eval-adapter": "acceptance of an adapter, offline",
    "draft-vocab": "frequent tokens of a text, for a reduced draft head",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Errors that a user can mend are one line on stderr, without a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in COMMANDS:
        print("usage: vllm-uno COMMAND [--help]\n")
        for name, text in COMMANDS.items():
            print(f"  {name:14} {text}")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        if arguments[0] != "draft-vocab":
            # All of the extra: the last of them is needed after hours of training only.
            import accelerate  # noqa: F401
            import matplotlib  # noqa: F401
            import peft  # noqa: F401
            import tqdm  # noqa: F401
        from transformers import HfArgumentParser

        from vllm_uno.train.data import DataError
        from vllm_uno.train.model import ModelError
        from vllm_uno.train.trainer import SettingsError
    except ImportError as error:
        needs = "pip install '.[train]' in the folder of vllm-uno's repository"
        print(f"vllm-uno {arguments[0]} needs the train extra: {needs} ({error})", file=sys.stderr)
        return 2

    def parse(kind: type[Settings]) -> Settings:
        parser = HfArgumentParser(kind, prog=f"vllm-uno {arguments[0]}", description=kind.__doc__)
        return parser.parse_args_into_dataclasses(arguments[1:])[0]

    try:
        if arguments[0] == "train":
            from vllm_uno.train.settings import TrainSettings
            from vllm_uno.train.trainer import train

            result = train(parse(TrainSettings))
            if result.heldout is not None:
                print(f"held-out text: {result.heldout.line()}")
            print(f"adapter: {result.adapter}" if result.adapter else f"at step {result.steps}")
        elif arguments[0] == "eval-adapter":
            from vllm_uno.train.evaluate import EvalSettings, evaluate

            evaluate(parse(EvalSettings))
        else:
            from vllm_uno.train.draft_vocab import DraftVocabSettings, make_draft_vocab

            settings = parse(DraftVocabSettings)
            print(f"{settings.output}: {make_draft_vocab(settings).line()}")
    except (DataError, ModelError, SettingsError, ValueError) as error:
        print(f"vllm-uno {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
