"""Line of handshakes.

A step of a TLS handshake costs up to a millisecond of a core. So those that have come together wait here, and between two turns
everything else is read. Addresses take turns, so that a flood from one holds up no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

SEATS = 2
"""Steps of handshakes in one turn of the event loop."""


class Handshake(Protocol):
    """Connection that waits for a step of its handshake."""

    def take_turn(self) -> None:
        """Go on. The connection may have ended meanwhile."""
        ...


class HandshakeLine:
    """Line of handshakes: addresses take turns, each one's connections in the order in which they came.

    Arguments:
        loop: event loop that gives the turns; called within it alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lines: dict[str, deque[Handshake]] = {}

    def wait(self, address: str, handshake: Handshake) -> None:
        """Give a connection a turn later."""
        if not self._lines:
            self._loop.call_soon(self._give)
        self._lines.setdefault(address, deque()).append(handshake)

    def _give(self) -> None:
        served: list[Handshake] = []
        while self._lines and len(served) < SEATS:
            address, line = next(iter(self._lines.items()))
            served.append(line.popleft())
            del self._lines[address]
            if line:
                self._lines[address] = line  # behind the other addresses
        if self._lines:  # Before they are served, since one that comes to an empty line asks for a turn itself.
            self._loop.call_soon(self._give)
        for handshake in served:
            handshake.take_turn()
