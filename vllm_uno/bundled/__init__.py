"""The small model with its UNO adapter that comes with the package, and the text it was made of."""

from __future__ import annotations

from pathlib import Path


def bundled_model() -> Path:
    """The folder of the bundled model; its `adapter/` folder holds the UNO adapter."""
    folder = Path(__file__).parent / "model"
    needed = ("config.json", "model.safetensors", "adapter/adapter_model.safetensors")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the bundled model's weights are not there: {folder} lacks {', '.join(missing)}. "
            "Install the package again, or make them with examples/bundled_model/."
        )
    return folder


def as_chat(question: str) -> str:
    """A question as the bundled model's chat template writes it, ready for the answer."""
    return f"<|user|>{question}<|end|><|assistant|>"
