"""Progress of a load test while it runs: one line on standard error, again and again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from headway.load.record import Record

EVERY_ON_TERMINAL = 0.5
"""Seconds between two lines on a terminal, where each replaces the one before."""
EVERY = 5.0
"""Seconds between two lines in a file or a pipe."""

_CLEAR = "\r\033[K"


def line(record: Record, seconds: float, duration: float) -> str:
    """Describe what a record holds `seconds` after the start of a load of `duration` seconds."""
    sent = sum(record.sent)
    answered = sum(len(stream.answered) for stream in record.streams)
    refused = sum(len(stream.refused) for stream in record.streams)
    failed = sum(stream.failed.total() for stream in record.streams) - refused
    waiting = sent - answered - refused - failed
    words = [f"{sent:,} sent", f"{answered:,} answered"]
    words += [f"{count:,} {what}" for count, what in ((refused, "refused"), (failed, "failed")) if count]
    return f"{min(seconds, duration):.0f} of {duration:g} s: {', '.join(words)}, {waiting:,} in flight"


async def report_on(record: Record, elapsed: Callable[[], float], duration: float, every: float | None = None) -> None:
    """Write the line again and again, until cancelled. A terminal is left without it, a stream that fails as it is.

    Arguments:
        record: record of the load.
        elapsed: returns the seconds since its start; below 0 before.
        duration: seconds of load in all.
        every: seconds between two lines; None: by the kind of stream.
    """
    live = sys.stderr.isatty()
    before, after = (_CLEAR, "") if live else ("", "\n")
    try:
        while True:
            await asyncio.sleep((EVERY_ON_TERMINAL if live else EVERY) if every is None else every)
            if (seconds := elapsed()) >= 0.0:
                _write(f"{before}{line(record, seconds, duration)}{after}")
    finally:
        if live:
            _write(_CLEAR)


def _write(text: str) -> None:
    """Write to standard error, if it takes anything: a load goes on without its progress."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return
