"""Targets that take and return large values, and some that misuse the shared memory that carries them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.core.arena import Place


def echo(inputs: list[str]) -> list[str]:
    return inputs


def arenas() -> list[int]:
    """Return this process's descriptors for the memory that it shares with its host."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "headway-arena" in str(link.readlink()):
                found.append(int(link.name))
        except OSError:
            continue
    return found


def attacks(inputs: list[str]) -> list[str]:
    """Try to change the shared memory in several ways, and return the results."""
    [fd] = arenas()
    told = []
    attempts: dict[str, Callable[[], object]] = {
        "shrink": lambda: os.ftruncate(fd, 0),
        "grow": lambda: os.ftruncate(fd, 1 << 30),
        "seal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        "punch": lambda: _punch(fd),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            told.append(f"{name} done")
        except OSError as exc:
            told.append(f"{name} {type(exc).__name__}")
    return [" ".join(told)] * len(inputs)


def _punch(fd: int) -> None:
    """Remove the arena's pages. It keeps its size, and reads as zeros."""
    keep_size, punch_hole = 1, 2
    size = os.fstat(fd).st_size
    if ctypes.CDLL(None, use_errno=True).fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(size)):
        raise OSError(ctypes.get_errno(), "no hole")


def lies(inputs: list[str]) -> list[str]:
    """Answer with impossible places in the shared memory. The input is OFFSET LENGTH GENERATION POSITION."""
    child = sys.modules["__main__"]
    asked = inputs[0].split()
    if len(asked) == 4:
        offset, length, generation, position = map(int, asked)

        def place_outputs(arena: Any, batch: Any, word: Any) -> None:
            now = batch.number if generation == 0 else generation
            word.placed[position] = Place(offset, length, now)
            word.outputs[0] = None

        child.place_outputs = place_outputs  # type: ignore[attr-defined]
    return inputs


def scribbles(inputs: list[str]) -> list[str]:
    """Answer with a place that holds invalid UTF-8."""
    _scribble(inputs)
    return inputs


def _scribble(inputs: list[Any]) -> None:
    child = sys.modules["__main__"]

    def place_outputs(arena: Any, batch: Any, word: Any) -> None:
        place = Place(64, 100_000, batch.number)
        arena.write(place, b'"' + b"\xff" * 99_999)
        word.placed[0], word.outputs[0] = place, None

    if "scribble" in inputs:
        child.place_outputs = place_outputs  # type: ignore[attr-defined]


def dies(inputs: list[str]) -> list[str]:
    """Die while holding large values."""
    if inputs[0].startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return inputs


def reverse(inputs: list[bytes]) -> list[bytes]:
    return [octets[::-1] for octets in inputs]


def growing(inputs: list[bytearray]) -> list[bytearray]:
    for octets in inputs:
        octets.append(0)
    return inputs


def sizes(inputs: list[memoryview]) -> list[str]:
    return [f"{view.nbytes} {view.readonly} {bytes(view[:2]).hex()}" for view in inputs]


class Keeps:
    """Keeps a view of its first input, or with `made` a slice of it, and answers with what the view shows now."""

    def __init__(self, made: bool) -> None:
        self.made = made
        self.kept: memoryview | None = None

    def __call__(self, inputs: list[memoryview]) -> list[bytes]:
        if self.kept is None:
            self.kept = inputs[0][:3] if self.made else inputs[0]
        return [_look(self.kept) for _ in inputs]


def _look(view: memoryview) -> bytes:
    try:
        return bytes(view[:3])
    except ValueError:
        return b"released"
