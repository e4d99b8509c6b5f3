"""Progress line on standard error while a command works and has nothing to show yet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

SILENT = 2.0
"""Seconds of silence before the first line."""
EVERY = 0.5
"""Seconds between updates on a terminal, where each line replaces the last."""
_CLEAR = "\r\x1b[K"


class Waiting:
    """Work that `waiting` shows. `text` is what the line says."""

    def __init__(self, text: str) -> None:
        self.text = text

    def tell(self, text: str) -> None:
        """Change the text."""
        self.text = text


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Waiting]:
    """Show what a command does while the block runs, once it has been silent for SILENT seconds.

    A terminal has one line, which disappears at the end. Elsewhere, lines come at growing intervals.
    """
    work, ended = Waiting(text), threading.Event()
    thread = threading.Thread(target=_show, args=(work, ended), daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


def _show(work: Waiting, ended: threading.Event) -> None:
    began, live = time.monotonic(), sys.stderr.isatty()
    pause, shown = SILENT, False
    while not ended.wait(pause):
        seconds = time.monotonic() - began
        shown = True
        _write(f"{_CLEAR}{work.text} … {seconds:.0f} s" if live else f"{work.text} … {seconds:.0f} s\n")
        pause = EVERY if live else seconds  # So at 2, 4, 8 … seconds.
    if live and shown:
        _write(_CLEAR)


def _write(text: str) -> None:
    """Write if possible: a command doesn't fail for want of a progress line."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
