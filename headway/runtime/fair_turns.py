"""Line of work that takes milliseconds of the event loop: one piece per turn, and tenants take turns.

After each piece the loop is left to everything else for as long as that one took. So all that waits here takes at most half of the
process, and a flood of one tenant holds up no other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.tenant_turns import TenantTurns

Begin = Callable[[], None]
"""Piece of work. Raises nothing; whoever wanted it may have left meanwhile."""


class FairTurns:
    """Line of one event loop: tenants take turns, each one's pieces in the order in which they came.

    Arguments:
        clock: monotonic seconds.
        loop: event loop that gives the turns; None: the one that runs when work comes.
    """

    def __init__(self, clock: Callable[[], float], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._clock, self._loop = clock, loop
        self._waiting = TenantTurns[Begin]()
        self._begun = False
        """Whether a piece is under way. What it asks for itself waits until its own cost is known."""
        self._next = 0.0
        """Instant from which the next piece may begin, in seconds."""

    def wait(self, tenant: str, begin: Begin) -> None:
        """Have a piece of work done in a later turn of the loop."""
        if not self._waiting and not self._begun:
            self._schedule()
        self._waiting.add(tenant, begin)

    def _schedule(self) -> None:
        loop, pause = self._loop or asyncio.get_running_loop(), self._next - self._clock()
        if pause > 0.0:
            loop.call_later(pause, self._give)
        else:
            loop.call_soon(self._give)

    def _give(self) -> None:
        begin = self._waiting.take()
        self._begun, before = True, self._clock()
        try:
            begin()
        finally:
            now = self._clock()
            self._begun, self._next = False, now + (now - before)
            if self._waiting:
                self._schedule()
