"""Turns of the event loop in which replies are passed on: to write a large one holds the loop for about a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from headway.model import Reply

LARGE = 1 << 16
"""Bytes of an output from which its reply has a turn of its own."""
_OUTPUT = attrgetter("output")


def in_turns(replies: Sequence[Reply]) -> Sequence[Sequence[Reply]]:
    """Replies of each turn: first all small ones, then the large ones, one at a time."""
    if sum(map(len, filter(None, map(_OUTPUT, replies)))) < LARGE:  # Mostly.
        return [replies]
    large = [reply for reply in replies if reply.output is not None and len(reply.output) >= LARGE]
    if not large:
        return [replies]
    small = [reply for reply in replies if reply.output is None or len(reply.output) < LARGE]
    return [*([small] if small else []), *([reply] for reply in large)]
