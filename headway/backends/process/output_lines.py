r"""Converts a child's output into bounded, printable lines for the log.

A child may print anything: partial lines, other encodings, escape sequences, gigabytes. Lines end with \n, or with \r as in
progress bars. Malformed and unprintable characters are escaped, so that nobody can forge a line or control a terminal. Long lines
are truncated. Lines beyond `per_second` are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_END = b"\n"
_FATAL, _THREAD, _FRAME = "Fatal Python error", "Current thread", '  File "'  # How lines of Python's crash dump begin.
_OURS = f"{_FRAME}{Path(__file__).parent}"
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3")


def printable(text: bytes) -> str:
    """Decode UTF-8, escape malformed bytes and unprintable characters, and expand tabs."""
    shown = text.decode("utf-8", "backslashreplace").expandtabs()
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


class Lines:
    """Splits a stream into lines of at most `longest` bytes. Keeps the last `tail` bytes for `last_words`."""

    def __init__(self, longest: int = 2000, per_second: int = 200, tail: int = 16_384) -> None:
        self._longest, self._per_second, self._keep = longest, per_second, tail
        self._rest = b""
        self._skipping = False
        self._second = float("-inf")
        self._left = 0
        self.dropped = 0
        self._tail = b""

    def feed(self, chunk: bytes, now: float) -> list[str]:
        """Return the lines completed by a chunk that was read at time `now`, except for dropped lines."""
        self._tail = (self._tail + chunk)[-self._keep :]
        if now - self._second >= 1.0:
            self._second, self._left = now, self._per_second
        if self._left == 0 and len(chunk) > self._longest:  # Count the lines of a flood without splitting it.
            self.dropped += chunk.count(_END)
            self._rest, self._skipping = b"", not chunk.endswith(_END)
            return []
        pieces = (self._rest + chunk).replace(b"\r", _END).split(_END)
        self._rest = pieces.pop()
        lines = []
        for piece in pieces:
            if self._skipping:
                self._skipping = False
            elif piece:
                lines.append(self._cut(piece))
        if len(self._rest) > self._longest:
            if not self._skipping:
                lines.append(self._cut(self._rest))
            self._rest, self._skipping = b"", True
        elif self._skipping:
            self._rest = b""
        passed = lines[: self._left]
        self._left -= len(passed)
        self.dropped += len(lines) - len(passed)
        return passed

    def finish(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [self._cut(rest)] if rest else []

    def take_dropped(self) -> int:
        dropped, self.dropped = self.dropped, 0
        return dropped

    def last_words(self, count: int) -> list[str]:
        """Return the last `count` lines, including dropped ones. For a Python crash dump, return the target's frames."""
        words = [self._cut(line) for line in self._tail.splitlines() if line]
        return _of_dump(words, count) or words[-count:]

    def _cut(self, line: bytes) -> str:
        text = printable(line[: self._longest])
        return f"{text} … (cut)" if len(line) > self._longest else text


def _of_dump(words: Sequence[str], count: int) -> list[str]:
    """Return a dump's error line, the two lines before it, and up to `count` - 1 frames of the target, or [] without frames."""
    begins = max((place for place, line in enumerate(words) if line.startswith(_FATAL)), default=len(words))
    current = next((place for place in range(begins, len(words)) if words[place].startswith(_THREAD)), len(words))
    stack = takewhile(lambda line: line.startswith(_FRAME), words[current + 1 :])
    frames = [frame for frame in stack if not frame.startswith(_OURS)]
    if len(frames) >= count:
        users = [frame for frame in frames[1:] if _LIBRARY.search(frame) is None]
        frames = [frames[0], *users][
            : count - 1
        ]  # The innermost frame shows what failed, and the others who called it.
    # A C++ library that aborts prints the reason before the dump.
    return [*words[max(0, begins - 2) : begins + 1], *map(str.strip, frames)] if frames else []
