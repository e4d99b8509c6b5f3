"""Targets of every kind that can be served, and some that can't."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any


def plain(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


def tells_sizes(inputs: list[str]) -> list[str]:
    sys.stdout.write(f"a batch of {len(inputs)}\n")
    sys.stdout.flush()
    return inputs


def takes_few(inputs: list[str]) -> list[str]:
    if len(inputs) > 8:
        raise ValueError("too many")
    return inputs


def dies_of_many(inputs: list[str]) -> list[str]:
    if len(inputs) > 8:
        os._exit(9)
    return inputs


def as_tuple(inputs: list[str]) -> tuple[str, ...]:
    return tuple(inputs)


def with_parameters(inputs: list[str], parameters: list[dict[str, Any]]) -> list[str]:
    return [f"{text} {sorted(given.items())}" for text, given in zip(inputs, parameters, strict=True)]


def with_named_parameters(inputs: list[str], *, parameters: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{text} {len(given)}" for text, given in zip(inputs, parameters, strict=True)]


async def coroutine(inputs: list[str]) -> list[str]:
    await asyncio.sleep(0)
    return [f"{text} {id(asyncio.get_running_loop())}" for text in inputs]


class Model:
    """Shows what it was set up with."""

    made = 0

    def __init__(self) -> None:
        Model.made += 1
        self.device = ""

    def setup(self, device: str) -> None:
        self.device = device

    def __call__(self, inputs: list[str]) -> list[str]:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        return [f"{text} {Model.made} {self.device} {visible}" for text in inputs]


class AsyncModel:
    """A model whose setup, calls and tasks share an event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def setup(self, device: str) -> None:
        self.loop = asyncio.get_running_loop()

    async def __call__(self, inputs: list[str], parameters: list[dict[str, Any]]) -> list[str]:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0)
        if "later" in inputs:
            self.tasks.append(self.loop.create_task(self._later()))
        return [f"{text} {given.get('k')}" for text, given in zip(inputs, parameters, strict=True)]

    async def _later(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0.001)
        sys.stdout.write("done later\n")


class Text(str):
    """A subclass of str, like numpy's."""

    __slots__ = ()


def subclass(inputs: list[str]) -> list[str]:
    return [Text(text) for text in inputs]


def environment(inputs: list[str]) -> list[str]:
    return [os.environ.get(text, "(unset)") for text in inputs]


def inherited(inputs: list[str]) -> list[str]:
    """Return the descriptors that a program started carelessly would inherit."""
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True, text=True)
    return [listed.stdout for _ in inputs]


def standard_library(inputs: list[str]) -> list[str]:
    import http.client

    return [http.client.__name__ for _ in inputs]


def with_child(inputs: list[str]) -> list[str]:
    """Leave a child process behind, and return its pid."""
    process = subprocess.Popen(["sleep", "60"])
    return [str(process.pid)] * len(inputs)


def with_fork(inputs: list[str]) -> list[str]:
    """Return the exit code of a forked process after SIGTERM."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    os.kill(pid, signal.SIGTERM)
    return [str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))] * len(inputs)


def needs_two(inputs: list[str], other: str) -> list[str]:
    return [f"{text}{other}" for text in inputs]


def takes_none() -> list[str]:
    return []


def one_text(text: str) -> str:
    return text.upper()


def one_object(value: dict[str, Any]) -> str:
    return str(value["a"])


class OneText:
    def __call__(self, text: str) -> str:
        return text.upper()


def one_by_one(function: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    @functools.wraps(function)
    def each(inputs: list[str]) -> list[str]:
        return [function(text) for text in inputs]

    return each


@one_by_one
def decorated(text: str) -> str:
    return text.upper()


def unannotated(text):  # type: ignore[no-untyped-def]
    return text.upper()


def refuses_each(inputs: list[str]) -> list[Any]:
    return [ValueError("not my kind of text") for _ in inputs]


def refuses_all(inputs: list[str]) -> list[str]:
    raise ValueError("not my kind of text")


def wants_a_parameter(inputs: list[str], parameters: list[dict[str, Any]]) -> list[str]:
    return [given["temperature"] for given in parameters]


class TakesListForMapping:
    together = ("temperature",)

    def __call__(self, inputs, parameters):  # type: ignore[no-untyped-def]
        return [parameters.get("temperature") for _ in inputs]


def gives_numbers(inputs: list[str]) -> list[str]:
    return [1 for _ in inputs]  # type: ignore[misc]


def gives_none(inputs: list[str]) -> None:
    return None


NOT_CALLABLE = 7


class NoCall:
    """Has no __call__."""


class NeedsArguments:
    def __init__(self, path: str, *, size: int = 1) -> None:
        if not isinstance(path, str):
            raise TypeError("path must be a str")
        self.path, self.size = path, size

    def __call__(self, inputs: list[str]) -> list[str]:
        return [f"{text} {self.path} {self.size}" for text in inputs]


class BadSetup:
    def setup(self, device: str) -> None:
        raise RuntimeError("no GPU here")

    def __call__(self, inputs: list[str]) -> list[str]:
        return inputs


class HangingSetup:
    def setup(self, device: str) -> None:
        import time

        time.sleep(60)

    def __call__(self, inputs: list[str]) -> list[str]:
        return inputs


class DyingSetup:
    def setup(self, device: str) -> None:
        os._exit(7)

    def __call__(self, inputs: list[str]) -> list[str]:
        return inputs
