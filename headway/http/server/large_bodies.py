"""Line of large bodies that have arrived.

To read one takes up to some tens of milliseconds of the event loop. So they wait here, one is read at a time, and then the loop is
left to everything else for as long as that took. Tenants take turns, so that a flood of one holds up no other's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

LARGE = 1 << 16
"""Bytes of a body from which it waits for its turn."""

Begin = Callable[[], None]
"""Reader of one body. Raises nothing; the connection may have ended meanwhile."""


class LargeBodies:
    """Line of one listener's large bodies: tenants take turns, each one's bodies in the order in which they came.

    Arguments:
        loop: event loop that gives the turns; called within it alone.
        clock: monotonic seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        self._loop, self._clock = loop, clock
        self._lines: dict[str, deque[Begin]] = {}
        self._next = 0.0
        """Instant from which the next one may be read, in seconds."""

    def wait(self, tenant: str, begin: Begin) -> None:
        """Have a body read in a later turn of the loop."""
        if not self._lines:
            self._schedule()
        self._lines.setdefault(tenant, deque()).append(begin)

    def _schedule(self) -> None:
        pause = self._next - self._clock()
        if pause > 0.0:
            self._loop.call_later(pause, self._give)
        else:
            self._loop.call_soon(self._give)

    def _give(self) -> None:
        tenant, line = next(iter(self._lines.items()))
        begin = line.popleft()
        del self._lines[tenant]
        if line:
            self._lines[tenant] = line  # behind the other tenants
        more, begun = bool(self._lines), self._clock()
        begin()
        now = self._clock()
        self._next = now + (now - begun)
        if more:  # Else whoever came to an empty line has asked for the next turn already.
            self._schedule()
