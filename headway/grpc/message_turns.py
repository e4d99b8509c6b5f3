"""Turns of the event loop for what has arrived: frames of connections, and messages.

To read what a connection has sent takes some time of the event loop, and to take a message in, from its bytes to the gateway, up to some
milliseconds; a client with many streams has one ready on each of them. So all of it together has a millisecond in one turn of the
loop, however much there is. What is beyond waits here: tenants take turns, and everything else in the process has its own in between.
Nothing further is read for what waits, so that its client is held back by flow control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from headway.core.tenant_turns import TenantTurns
from headway.runtime.fair_turns import give_way

SHARE = 0.001
"""Seconds within one turn of the loop after which nothing further begins."""

T = TypeVar("T")


class MessageTurns:
    """Line of one port: owners take turns, each one's work in the order in which it came.

    Arguments:
        clock: monotonic seconds.

    Attributes:
        clock: the clock.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._waiting = TenantTurns[Callable[[], None]]()
        self._spent = 0.0
        """Seconds that this turn of the loop has spent."""
        self._asked = False
        """Whether the next turn of the loop is asked for."""

    @property
    def free(self) -> bool:
        """Whether work may begin at once."""
        return self._spent < SHARE and not self._waiting

    def wait(self, owner: str, work: Callable[[], None]) -> None:
        """Have work done in a later turn of the loop.

        Arguments:
            owner: name of the owner, for whom it waits behind the owner's others.
            work: raises nothing.
        """
        self._waiting.add(owner, work)
        self._ask()

    def add(self, seconds: float) -> None:
        """Count time that this turn of the loop spends, or the next one will."""
        self._spent += seconds
        self._ask()

    def spend(self, since: float) -> float:
        """Count the time since an instant. Returns the instant that it is now, in seconds."""
        now = self.clock()
        self.add(now - since)
        return now

    async def take(self, owner: str, work: Callable[[float], T]) -> T:
        """Take a message in, at once or in a later turn of the loop. Returns what `work` returns, and raises what it raises.

        A caller that is cancelled may find that the work was done.

        Arguments:
            owner: see `wait`.
            work: takes the message in; gets the seconds for which it has waited.
        """
        if self.free:
            before = self.clock()
            try:
                return work(0.0)
            finally:
                self.spend(before)
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.wait(owner, partial(self._serve, turn, work, self.clock()))
        del work
        try:
            return await turn
        finally:
            del turn  # An error holds what has raised it, and would hold itself.

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn of the loop: serve those who wait, as far as it goes."""
        if self._waiting:
            give_way()
        self._asked, self._spent = False, 0.0
        for _ in range(len(self._waiting)):  # What comes meanwhile has waited for no turn.
            if self._spent >= SHARE:
                break
            self._waiting.take()()
        if self._waiting:
            self._ask()

    def _serve(self, turn: asyncio.Future[Any], work: Callable[[float], Any], since: float) -> None:
        if turn.done():  # Its call has ended.
            return
        before = self.clock()
        try:
            turn.set_result(work(before - since))
        except Exception as exc:
            turn.set_exception(exc)
        finally:
            del turn, work  # Likewise.
            self.spend(before)
