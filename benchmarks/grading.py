"""Is the final answer of a model's text the right one? `is_correct(text, answer)`.

An answer must be stated: in the last \\boxed{}, after the last "####", or after the last "answer
is". A number that merely stands last in a text that was cut off is no answer. Integers are
compared as integers; everything else is left to the package math-verify.

math-verify can hang (9^{9^9} is computed before it is compared), and its own time limit is a
signal, which works in the main thread only and does not stop a long multiplication. It therefore
runs in a process of its own, which is ended where an answer takes too long:

    python benchmarks/grading.py        that process; reads and writes lines of JSON
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import select
import subprocess
import sys
import threading
from typing import Any

LIMIT_S = 10.0  # for one comparison
_START_S = 120.0  # for the import of sympy and math-verify on a busy machine
_MEMORY_BYTES = 4 << 30

_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKER = re.compile(r"####|\banswer\s+is\b:?|\banswer\*{0,2}:", re.I)
_SENTENCE_END = re.compile(r"\.?\s*\n|\.\s|\.?\s*$")  # the point of 3.5 is none
_MARKUP = re.compile(r"^(?:\*\*|\$|\\\()|(?:\*\*|(?<!\\)\$|\\\))$")


def is_correct(text: str, answer: str, *, integers: bool = False) -> bool:
    """Whether the final answer of `text` equals `answer`.

    Args:
        text: what the model wrote, its thinking included.
        answer: the right answer: an integer or LaTeX, without \\boxed{}.
        integers: the answer must be written as an integer; math-verify is not asked.

    False for a text without an answer, one that cannot be read, and a comparison that takes longer
    than `LIMIT_S`; raises nothing. May be called from any thread.

    Raises:
        RuntimeError: math-verify is needed and does not run.

    """
    stated = final_answer(text)
    if not stated or not answer.strip():
        return False
    if stated == answer.strip():
        return True
    ours, gold = read_integer(stated), read_integer(answer)
    if integers or (ours is not None and gold is not None):
        return ours is not None and ours == gold
    return _symbolic.same(answer, stated)


def start() -> None:
    """Start math-verify where it does not run yet: some seconds.

    Raises:
        RuntimeError: it does not run; says how to install it.

    """
    _symbolic.start()


def final_answer(text: str) -> str | None:
    """The answer stated last in `text`, or None. Thinking (<think>...</think>) does not count."""
    text = text.rsplit("</think>", 1)[-1]
    if "<think>" in text:  # cut off while thinking
        return None
    boxed = list(_BOXED.finditer(text))
    if boxed:
        return _until_closed(text, boxed[-1].end())
    markers = list(_MARKER.finditer(text))
    if not markers:
        return None
    rest = text[markers[-1].end() :].lstrip("* \t")
    end = _SENTENCE_END.search(rest)
    return _MARKUP.sub("", rest[: end.start() if end else None].strip()).strip()


def read_integer(text: str) -> int | None:
    """1,000 and $42.00 as integers; None where `text` is anything else than one integer."""
    bare = re.sub(r"\\[$!,]|[$\s]", "", text).removesuffix(".")
    if not _INTEGER.fullmatch(bare) or len(bare) > 100:
        return None
    return int(bare.split(".")[0].replace(",", ""))


def _until_closed(text: str, start: int) -> str | None:
    """What stands from `start` to the brace that closes it; None where none does."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return None


class _Symbolic:
    """math-verify in a process of its own, started with the first comparison at the latest."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def same(self, answer: str, stated: str) -> bool:
        with self.lock:
            self._start()
            assert self.process is not None and self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps([answer, stated]) + "\n")
                self.process.stdin.flush()
                reply = self._read(LIMIT_S)
            except BrokenPipeError:
                reply = None
            if reply is None:  # too long, or too much memory; the next comparison starts afresh
                self.stop()
            return bool(reply)

    def start(self) -> None:
        with self.lock:
            self._start()

    def _start(self) -> None:
        if self.process is not None:
            return
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._read(_START_S) != "ready":
            self.stop()
            raise RuntimeError(
                "math-verify does not start (see above); pip install math-verify, which "
                "pip install '.[eval]' in the repository's folder brings too"
            )

    def _read(self, limit_s: float) -> Any:
        """The process's next line, or None where there is none within `limit_s`."""
        assert self.process is not None and self.process.stdout is not None
        # One line answers one line, so nothing waits in the file object's buffer.
        if not select.select([self.process.stdout], [], [], limit_s)[0]:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an unsent line
                    pipe.close()
        self.process = None


_symbolic = _Symbolic()
atexit.register(_symbolic.stop)


def _serve() -> None:
    import logging
    import resource

    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # it warns that its time limit is off, which is meant
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        answer, stated = json.loads(line)
        try:
            gold = parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)
            ours = parse(f"$\\boxed{{{stated.strip('$')}}}$", parsing_timeout=None)
            same = bool(verify(gold, ours, timeout_seconds=None))
        except Exception:  # whatever sympy makes of a model's text
            same = False
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve()
