"""A model function that records its runs in a journal. Each output can be traced to its run.

An output is the input in upper case, `|`, the run, and the position in it: `HELLO|4e1a.18f.7.0`. The journal is the
file PROMISES_JOURNAL, by default `journal` in the working directory. It gets a JSON array as a line when a batch begins
(name, time, inputs, version, model, host, and the call's parameters, if any) and when it ends (name, time).
PROMISES_MS is how long a batch takes in milliseconds, MODEL_VERSION is the version of the model, and PROMISES_HOST the
process that runs it. An input that starts with `slow` makes its batch take SLOW seconds longer, `reject` fails alone,
`poison` fails its batch, and `vector` is answered with the code points of its output, as a JSON array.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

SLOW = 0.4
FILLED, READ = 25_000, 2_000


class Marked:
    model = ""
    """Name of the model in the journal; empty for the one that is meant by those who name none."""

    def __init__(self) -> None:
        self._seconds = float(os.environ.get("PROMISES_MS", "10")) / 1000.0
        self._name = f"{os.getpid():x}.{time.monotonic_ns():x}"
        self._numbers = itertools.count()
        self._what = os.environ.get("MODEL_VERSION", ""), self.model, os.environ.get("PROMISES_HOST", "")
        path = Path(os.environ.get("PROMISES_JOURNAL", "journal"))
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, inputs: list[str]) -> list[str | ValueError]:
        return self._run(inputs)

    def _run(self, inputs: list[str], *parameters: Mapping[str, Any]) -> list[str | ValueError]:
        name = f"{self._name}.{next(self._numbers)}"
        self._note(name, time.monotonic(), inputs, *self._what, *parameters)
        time.sleep(self._time(inputs))
        if any(text.startswith("poison") for text in inputs):
            raise RuntimeError("a poisonous input")
        self._note(name, time.monotonic())
        return [
            ValueError("rejected") if text.startswith("reject") else _output(text, f"{name}.{place}")
            for place, text in enumerate(inputs)
        ]

    def _time(self, inputs: list[str]) -> float:
        """Return how many seconds a call takes."""
        return self._seconds + SLOW * any(text.startswith("slow") for text in inputs)

    def _note(self, *line: object) -> None:
        os.write(self._journal, json.dumps(line).encode() + b"\n")


class Fitted(Marked):
    """Pads its inputs, and takes one value of the parameter `t` per call. A call takes a tenth of PROMISES_MS, plus
    PROMISES_MS for every FILLED characters after padding. Like models that truncate, it reads READ characters at most."""

    together = ("t",)

    def __call__(self, inputs: list[str], parameters: Mapping[str, Any]) -> list[str | ValueError]:  # type: ignore[override]
        return self._run(inputs, parameters)

    def _time(self, inputs: list[str]) -> float:
        return self._seconds * (0.1 + len(inputs) * min(max(map(len, inputs)), READ) / FILLED)


class Rows(Marked):
    """Does the same with tensors of strings, one per row. A rejected row fails its request."""

    inputs: ClassVar[Mapping[str, Any]] = {"text": ("BYTES", [])}
    outputs: ClassVar[Mapping[str, Any]] = {"text": ("BYTES", [])}

    def __call__(self, inputs: Mapping[str, Any]) -> list[str | ValueError]:  # type: ignore[override]
        return super().__call__([row.decode() for row in inputs["text"].tolist()])


class Numbers(Marked):
    """Does the same with the bytes of a string, padded with zeros, and their sum. A wrong sum makes the batch fail."""

    inputs: ClassVar[Mapping[str, Any]] = {"codes": ("UINT8", [-1]), "sum": ("INT64", [])}
    outputs: ClassVar[Mapping[str, Any]] = {"codes": ("UINT8", [-1])}
    pad = 0

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:  # type: ignore[override]
        import numpy as np

        sums = inputs["codes"].sum(axis=1, dtype=np.int64)
        if (sums != inputs.get("sum", sums)).any():
            raise RuntimeError("numbers of two requests")
        told = super().__call__([row.tobytes().rstrip(b"\0").decode() for row in inputs["codes"]])
        octets = [b"" if isinstance(one, ValueError) else one.encode() for one in told]
        rows = [np.frombuffer(one.ljust(max(map(len, octets)), b"\0"), np.uint8) for one in octets]
        return [one if isinstance(one, ValueError) else row for one, row in zip(told, rows, strict=True)]


class Codes(Numbers):
    """Does the same with only the bytes."""

    inputs: ClassVar[Mapping[str, Any]] = {"codes": ("UINT8", [-1])}


def _output(text: str, mark: str) -> str:
    output = f"{text.upper()}|{mark}"
    return json.dumps(list(map(ord, output))) if text.startswith("vector") else output
