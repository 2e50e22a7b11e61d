"""One change to one of vLLM's private targets, with a check of its shape."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUPPORTED_VLLM = ("0.32",)
"""Release series whose private parts these hooks were written and tested for."""


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one that this plugin can hook into."""


def installed_vllm() -> str:
    import vllm

    return vllm.__version__


def _supported_text() -> str:
    return ", ".join(f"{series}.x" for series in SUPPORTED_VLLM)


def check_version() -> None:
    """Raise `UnsupportedVllm` unless the installed vLLM is of a supported series."""
    version = installed_vllm()
    if not any(version == s or version.startswith(s + ".") for s in SUPPORTED_VLLM):
        raise UnsupportedVllm(
            f"vllm-uno supports vLLM {_supported_text()}, but vLLM {version} is installed. "
            "Install a supported vLLM, or a vllm-uno made for this one."
        )


@dataclass(frozen=True)
class Hook:
    """Replace `target` by `make(original)`.

    Args:
        target: "module:Class.attribute" or "module:function".
        parameters: names of the target's parameters, in order; None for a property.
        reason: why the target must change.
        removable: when the hook can go.
        make: original -> replacement.
    """

    target: str
    parameters: tuple[str, ...] | None
    reason: str
    removable: str
    make: Callable[[Any], Any]

    def _locate(self) -> tuple[Any, str]:
        module_name, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def _misfit(self, found: str) -> UnsupportedVllm:
        expected = "a property" if self.parameters is None else f"{self.parameters}"
        return UnsupportedVllm(
            f"vllm-uno cannot hook {self.target} of vLLM {installed_vllm()} (supported: "
            f"{_supported_text()}): expected {expected}, found {found}. Needed because: "
            f"{self.reason}"
        )

    def check(self) -> None:
        """Raise `UnsupportedVllm` if the target is missing or has another shape."""
        try:
            owner, name = self._locate()
            current = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise self._misfit(str(error)) from error
        current = getattr(current, "__uno_original__", current)
        if self.parameters is None:
            if not isinstance(current, property):
                raise self._misfit(type(current).__name__)
            return
        if not callable(current):
            raise self._misfit(type(current).__name__)
        found = tuple(inspect.signature(current).parameters)
        if found != self.parameters:
            raise self._misfit(str(found))

    def install(self) -> None:
        owner, name = self._locate()
        current = inspect.getattr_static(owner, name)
        marked: Any = current.fget if isinstance(current, property) else current
        if hasattr(marked, "__uno_original__"):
            return
        replacement = self.make(current)
        marked = replacement.fget if isinstance(replacement, property) else replacement
        marked.__uno_original__ = current
        setattr(owner, name, replacement)
