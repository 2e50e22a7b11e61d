"""The `vllm-uno` command: `train` and `eval-adapter`."""

from __future__ import annotations

import sys

COMMANDS = {
    "train": "train a UNO adapter for a model",
    "eval-adapter": "acceptance of an adapter, offline",
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
        needs = "pip install 'vllm-uno[train]'"
        print(f"vllm-uno {arguments[0]} needs the train extra: {needs} ({error})", file=sys.stderr)
        return 2
    try:
        if arguments[0] == "train":
            from vllm_uno.train.settings import TrainSettings
            from vllm_uno.train.trainer import train

            (settings,) = HfArgumentParser(
                TrainSettings, prog="vllm-uno train", description=TrainSettings.__doc__
            ).parse_args_into_dataclasses(arguments[1:])
            result = train(settings)
            if result.heldout is not None:
                print(f"held-out text: {result.heldout.line()}")
            print(f"adapter: {result.adapter}" if result.adapter else f"at step {result.steps}")
        else:
            from vllm_uno.train.evaluate import EvalSettings, evaluate

            (settings,) = HfArgumentParser(
                EvalSettings, prog="vllm-uno eval-adapter", description=EvalSettings.__doc__
            ).parse_args_into_dataclasses(arguments[1:])
            evaluate(settings)
    except (DataError, ModelError, SettingsError, ValueError) as error:
        print(f"vllm-uno {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
