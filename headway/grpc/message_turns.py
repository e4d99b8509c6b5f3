"""Turns of the event loop for messages that have arrived.

To take a message in, from its bytes to the gateway, takes up to some milliseconds of the event loop, and a client with many streams has
one ready on each of them. So in one turn of the loop messages are taken in for a few milliseconds only, however many there are. Those
beyond wait here: tenants take turns, and everything else in the process has its own in between. A call that waits reads nothing
further, so that its client is held back by HTTP/2's flow control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from headway.core.tenant_turns import TenantTurns

SHARE = 0.002
"""Seconds for which messages are taken in within one turn of the loop; the last one may take longer."""

T = TypeVar("T")

_Waiting = tuple[asyncio.Future[Any], Callable[[float], Any], float]
"""Turn that is waited for, the work, and since when, in monotonic seconds."""


class MessageTurns:
    """Line of one port's messages: owners take turns, each one's messages in the order in which they came.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._waiting = TenantTurns[_Waiting]()
        self._spent = 0.0
        """Seconds that this turn of the loop has spent on messages."""
        self._asked = False
        """Whether the next turn of the loop is asked for."""

    async def take(self, owner: str, work: Callable[[float], T]) -> T:
        """Take a message in, at once or in a later turn of the loop. Returns what `work` returns, and raises what it raises.

        A caller that is cancelled may find that the work was done.

        Arguments:
            owner: name of the owner, for whom it waits behind the owner's others.
            work: takes the message in; gets the seconds for which it has waited.
        """
        if not self._waiting and self._spent < SHARE:
            before = self._clock()
            try:
                return work(0.0)
            finally:
                self._count(before)
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.add(owner, (turn, work, self._clock()))
        self._ask()
        return await turn

    def _count(self, before: float) -> None:
        self._spent += self._clock() - before
        self._ask()

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn of the loop: serve those who wait, as far as it goes."""
        self._asked, self._spent = False, 0.0
        while self._waiting and self._spent < SHARE:
            turn, work, since = self._waiting.take()
            if not turn.done():  # Else its call has ended.
                self._serve(turn, work, since)
        if self._waiting:
            self._ask()

    def _serve(self, turn: asyncio.Future[Any], work: Callable[[float], Any], since: float) -> None:
        before = self._clock()
        try:
            turn.set_result(work(before - since))
        except Exception as exc:
            turn.set_exception(exc)
        finally:
            self._count(before)
