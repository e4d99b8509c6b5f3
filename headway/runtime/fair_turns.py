"""Line of work for one event loop: each turn of the loop does a little of it, and tenants take turns.

So a flood from one tenant doesn't hold up another's work, and all of it together holds up nothing else for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import TypeVar

from headway.core.json_pages import Steps
from headway.core.tenant_turns import TenantTurns

T = TypeVar("T")
Begin = Callable[[], None]
"""Piece of work. It must not raise; whoever wanted it may have left by then."""
MILLISECOND = 0.001
"""Seconds per turn of the loop for small pieces such as steps of handshakes."""


def give_way() -> None:
    """Let other processes on this core, such as those that run batches, go first.

    Otherwise a process whose loop is never idle keeps the core for its whole time slice of milliseconds each time
    that another one wakes up. The price: a program on this core that never sleeps gets a turn each time, too.
    """
    os.sched_yield()


async def in_turns(steps: Steps[T]) -> T:
    """Do steps, and give everything else in the loop a turn after each."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: T = stop.value
            return found
        await asyncio.sleep(0)


class FairTurns:
    """Line of one event loop: tenants take turns; the pieces of each are done in order.

    Arguments:
        clock: monotonic seconds.
        loop: event loop that gives the turns; None: the one that runs when work comes.
        budget: seconds into a turn of the loop after which no further piece begins; 0: one piece a turn.
        rests: whether the loop is then left to everything else for as long as the pieces took, so that they
            take at most half of the process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        budget: float = 0.0,
        rests: bool = True,
    ) -> None:
        self._clock, self._loop = clock, loop
        self._budget, self._rests = budget, rests
        self._waiting = TenantTurns[Begin]()
        self._begun = False
        """True while pieces are being done. What they ask for themselves waits for a later turn."""
        self._next = 0.0
        """Instant from which the next piece may begin, in seconds."""

    def wait(self, tenant: str, begin: Begin) -> None:
        """Do a piece of work in a later turn of the loop."""
        if not self._waiting and not self._begun:
            self._schedule()
        self._waiting.add(tenant, begin)

    def _schedule(self) -> None:
        loop, pause = self._loop or asyncio.get_running_loop(), self._next - self._clock() if self._rests else 0.0
        if pause > 0.0:
            loop.call_later(pause, self._give)
        else:
            loop.call_soon(self._give)

    def _give(self) -> None:
        give_way()
        before, left, self._begun = self._clock(), len(self._waiting), True
        try:
            while left:
                left -= 1
                self._waiting.take()()
                if not self._budget or self._clock() >= before + self._budget:
                    break
        finally:
            now = self._clock()
            self._begun, self._next = False, now + (now - before)
            if self._waiting:
                self._schedule()


class FairSlots:
    """Places for work that a process does at the same time: tenants take turns, each in its own order.

    Arguments:
        count: most places in use at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = TenantTurns[asyncio.Future[None]]()
        """Futures of waiting tasks. None waits while a place is free."""

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place while the context lasts."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give()

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # It had its place already.
                self._give()
            raise

    def _give(self) -> None:
        """Give a place to the next task that still waits."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
