"""Line of handshakes.

A step of a TLS handshake costs a tenth of a millisecond to several, as the key of the certificate is. So those that have come together wait
here, and between two turns everything else is read. Addresses take turns, so that a flood from one holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from headway.core.tenant_turns import TenantTurns

TURN = 0.001
"""Seconds after which no further step begins in a turn of the event loop."""


class Handshake(Protocol):
    """Connection that waits for a step of its handshake."""

    def take_turn(self) -> None:
        """Go on. The connection may have ended meanwhile."""
        ...


class HandshakeLine:
    """Line of handshakes: addresses take turns, each one's connections in the order in which they came.

    Arguments:
        loop: event loop that gives the turns; called within it alone.
        clock: monotonic seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        self._loop, self._clock = loop, clock
        self._waiting: TenantTurns[Handshake] = TenantTurns()
        """Handshakes by address."""
        self._begun = False
        """Whether steps are under way, after which the next turn is asked for."""

    def wait(self, address: str, handshake: Handshake) -> None:
        """Give a connection a turn later."""
        if not self._waiting and not self._begun:
            self._loop.call_soon(self._give)
        self._waiting.add(address, handshake)

    def _give(self) -> None:
        end, left, self._begun = self._clock() + TURN, len(self._waiting), True
        try:
            while left and self._clock() < end:
                left -= 1
                self._waiting.take().take_turn()
        finally:
            self._begun = False
            if self._waiting:
                self._loop.call_soon(self._give)
