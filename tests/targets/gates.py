"""A target whose start and batches wait until a test lets them continue. It also fails on the words in `faults`.

    gate PATH …    the batch waits at the FIFO PATH until whatever opened it for writing closes it
    print …        prints the rest on both streams
    unless PATH …  the batch fails while the file PATH exists
    big N          returns N times `x`
    memory         sets a memory limit, and tries to exceed it
    grow N         keeps N MiB for good
    pid            returns the process id

The setup waits at the FIFO `setup-gate`, if it exists. While the file `broken` exists, even the warm-up batch fails.
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
    """Returns each input in upper case, unless it is one of the words above or in `faults`."""

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
