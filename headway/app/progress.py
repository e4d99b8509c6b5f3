"""Line on a terminal that says what a start waits for. Where standard error is no terminal, the log tells it now and then.

The cursor stays at the line's beginning, so that a line of the log takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from headway.runtime.logger import get_logger

if TYPE_CHECKING:
    from headway.worker.pools import Workers

log = get_logger(__name__)

WRITE_LINE_EVERY = 0.5
"""Seconds between two writings of the line."""
SILENT = 2.0
"""Seconds before the log tells of it where there is no terminal; the next ones are twice as far apart each time."""
MOST_NAMED = 4
"""Most workers that are named in it."""
_CLEAR = "\x1b[2K"


class Progress:
    """Writer of the line.

    Arguments:
        pool: workers that load.
        stream: the terminal; None for standard error.
        clock: monotonic seconds, those of the workers.
    """

    def __init__(
        self, pool: Workers, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._terminal = stream or sys.stderr
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        self._pause = WRITE_LINE_EVERY

    def begin(self) -> None:
        """Write the line now and then, until `end`."""
        live = self._terminal.isatty()
        self._pause = WRITE_LINE_EVERY if live else SILENT
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._tick if live else self._log)

    def end(self) -> None:
        """Take the line away. Safe to call more than once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._shown:
            self._shown = False
            self._write(_CLEAR)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WRITE_LINE_EVERY, self._tick)
        loading = {
            batcher.slot.worker: batcher.starting.since
            for batcher in self._pool.batchers
            if batcher.starting.since is not None
        }
        if loading:
            names = ", ".join(list(loading)[:MOST_NAMED])
            more = f" and {len(loading) - MOST_NAMED} more" if len(loading) > MOST_NAMED else ""
            self._shown = True
            self._write(f"{_CLEAR}loading {names}{more} … {self._clock() - min(loading.values()):.0f} s\r")

    def _log(self) -> None:
        """Log who loads, at growing intervals."""
        self._pause *= 2
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._log)
        since = [found for batcher in self._pool.batchers if (found := batcher.starting.since) is not None]
        if since:
            log.info("still loading", workers=len(since), seconds=round(self._clock() - min(since), 1))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # A terminal that has gone needs no line.
            self._terminal.write(text)
            self._terminal.flush()
