"""Turns of the event loop for connections that have sent many requests at once.

A request that is answered at once, such as a refused one, gives the event loop back only with the last of those that its client
sent in one go. So a connection is served a handful at a time, and then waits in line here. A few of those that wait are served
per turn of the loop, however many there are: what others have sent meanwhile is read in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

REQUESTS_PER_TURN = 4
"""Requests of one connection that are begun in one turn of the event loop."""

SEATS = 4
"""Connections in line that are served in one turn of the event loop."""


class TurnWaiter(Protocol):
    """Connection that waits in line."""

    def take_turn(self) -> None:
        """Go on. The connection may have ended meanwhile."""
        ...


class Turns:
    """Line of one listener's connections: first come, first served.

    Arguments:
        loop: event loop that gives the turns; called within it alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[TurnWaiter] = deque()

    def wait(self, waiter: TurnWaiter) -> None:
        """Let a connection go on in a later turn of the loop, behind those that wait already."""
        if not self._line:
            self._loop.call_soon(self._give)
        self._line.append(waiter)

    def _give(self) -> None:
        line = self._line
        served = [line.popleft() for _ in range(min(len(line), SEATS))]
        if line:  # Before they are served, since those who come back to an empty line ask for the next turn themselves.
            self._loop.call_soon(self._give)
        for waiter in served:
            waiter.take_turn()
