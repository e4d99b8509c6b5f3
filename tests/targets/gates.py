"""A target whose batches, and whose start, wait until a test lets them go on; else it goes wrong as `faults` does.

    gate PATH …    the batch waits at the FIFO at PATH until somebody who had it open for writing closes it
    print …        the rest is printed on both streams
    unless PATH …  the batch fails while there is a file at PATH
    big N          N times `x`
    memory         more memory is asked for than a limit set just before allows
    grow N         N MiB are kept for good
    pid            the process id

`Gated` waits in its setup at the FIFO `setup-gate` in the working directory, if there is one. While there is a file
`broken`, nothing works, the warm-up batch included.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Any

from tests.targets import faults

SETUP_GATE = "setup-gate"
BROKEN = "broken"

_kept: list[bytes] = []


class Gated:
    """Answers each input in capitals, unless it is one of the words above or one of `faults`."""

    def setup(self, device: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(SETUP_GATE).read_bytes()

    def __call__(self, inputs: list[str]) -> Any:
        if Path(BROKEN).exists():
            raise RuntimeError("nothing works any more")
        for text in inputs:
            _act(text)
        outputs = faults.answer(inputs)
        if not isinstance(outputs, list) or len(outputs) != len(inputs):
            return outputs
        return [_output(text, given) for text, given in zip(inputs, outputs, strict=True)]


def _act(text: str) -> None:
    word, _, rest = text.partition(" ")
    match word:
        case "gate":
            Path(rest.split()[0]).read_bytes()
        case "print":
            for stream in (sys.stdout, sys.stderr):
                stream.write(rest + "\n")
                stream.flush()
        case "unless":
            if Path(rest.split()[0]).exists():
                raise RuntimeError("not while it is there")
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
            bytearray(1 << 33)
        case "grow":
            _kept.append(os.urandom(1) * (int(rest) << 20))


def _output(text: str, given: Any) -> Any:
    if text.startswith("big "):
        return "x" * int(text[4:])
    return str(os.getpid()) if text == "pid" else given
