"""A target that returns its inputs in upper case, except for the words that make it fail."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import threading
import time
from typing import Any

import msgspec

from headway.backends.process import frames

NO_TEXT: dict[str, Any] = {
    "none": None,
    "number": 7,
    "bytes": b"seven",
    "exception": ValueError("no good"),
    "huge": "x" * (16 * 1024 * 1024 + 1),
    "large": "x" * (9 * 1024 * 1024),
    "surrogate": "\ud800",
}
"""Inputs that get this in their place."""


def answer(inputs: list[str]) -> Any:
    """Any input can make the whole batch fail."""
    for text in inputs:
        match text:
            case "raise":
                raise ValueError("what is\nthis")
            case "system-exit":
                sys.exit(4)
            case "interrupt":
                raise KeyboardInterrupt
            case "unprintable":
                raise Unprintable
            case "unreadable":
                return Unreadable(inputs)
            case "exit":
                os._exit(3)
            case "last-words":
                os.write(2, b"out of\x1b[31m luck\n")
                os._exit(9)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                ctypes.PyDLL(None).sleep(60)
            case "sleep":
                time.sleep(60)
            case "short":
                return ["one"] * (len(inputs) - 1)
            case "long":
                return ["one"] * (len(inputs) + 1)
            case "dict":
                return dict.fromkeys(inputs, "one")
            case "text":
                return "x" * len(inputs)
            case "scribble":
                scribble(b"this is no frame at all")
            case "babble":
                scribble(bytes(1 << 16))  # The size of a single read.
            case "flood":
                sys.stdout.write("flood\n" * 200_000)
            case "noise":
                sys.stdout.write("\ud800 😀\n")
                os.write(1, b"caf\xe9 \x1b[2J ok\nhalf a line")
            case "close":
                close_pipe()
                time.sleep(60)
            case "forge":
                forge()
            case "forge-later":
                threading.Timer(0.001, forge).start()
    return [NO_TEXT.get(text, text.upper()) for text in inputs]


class Unreadable(list[str]):
    """A list whose length can't be read."""

    def __len__(self) -> int:
        raise SystemExit(5)

    __iter__ = __len__  # type: ignore[assignment]


class Unprintable(Exception):
    """An exception that can't be printed."""

    def __str__(self) -> str:
        raise RuntimeError("nor this")


def sockets() -> list[int]:
    return [fd for fd in range(3, 1024) if _is_socket(fd)]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def scribble(nonsense: bytes) -> None:
    for fd in sockets():
        os.write(fd, nonsense)


def forge() -> None:
    """Answer a batch that was never sent."""
    content = msgspec.msgpack.encode(["outputs", 999, "text", ["FORGED", "FORGED"], {}])
    for fd in sockets():
        os.write(fd, frames.framed(content))


def close_pipe() -> None:
    for fd in sockets():
        os.close(fd)
