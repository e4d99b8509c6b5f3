"""Line on standard error while a command works and has nothing to show yet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

SILENT = 2.0
"""Seconds of silence before the first line."""
EVERY = 0.5
"""Seconds between two lines on a terminal, where each replaces the one before."""
_CLEAR = "\r\x1b[K"


class Waiting:
    """Work of a command, which `waiting` shows with the seconds since it began.

    Attributes:
        text: what it does, as the line says it.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def tell(self, text: str) -> None:
        """Note what it does from now on."""
        self.text = text


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Waiting]:
    """Show what a command does, until the block ends, once it has been silent for SILENT seconds.

    A terminal has one line, which is taken away at the end. Elsewhere lines come at growing intervals.
    """
    found, ended = Waiting(text), threading.Event()
    thread = threading.Thread(target=_show, args=(found, ended), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _show(found: Waiting, ended: threading.Event) -> None:
    began, live = time.monotonic(), sys.stderr.isatty()
    pause, shown = SILENT, False
    while not ended.wait(pause):
        seconds = time.monotonic() - began
        shown = True
        _write(f"{_CLEAR}{found.text} … {seconds:.0f} s" if live else f"{found.text} … {seconds:.0f} s\n")
        pause = EVERY if live else seconds  # 2, 4, 8 … seconds after the beginning.
    if live and shown:
        _write(_CLEAR)


def _write(text: str) -> None:
    """Write, if the stream takes anything: a command goes on without its progress."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
