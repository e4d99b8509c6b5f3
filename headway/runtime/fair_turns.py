"""Fair shares of an event loop: each turn does a little work, and tenants take turns, so no tenant's flood of work delays the rest."""

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
Begin = Callable[[], None]  # A piece of work. It must not raise, and must cope with its request being gone.
MILLISECOND = 0.001  # Seconds per turn of the loop for small pieces such as handshake steps.


def give_way() -> None:
    """Yield this CPU core to other processes, such as workers, which a busy loop would delay by milliseconds."""
    os.sched_yield()


async def in_turns(steps: Steps[T]) -> T:
    """Run steps, one in each turn of the event loop, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        await asyncio.sleep(0)


class FairTurns:
    """Work queue for one event loop. Tenants take turns, and the pieces of each tenant run in order.

    Arguments:
        loop: event loop; None for the loop that is running when work arrives.
        budget: seconds in one turn of the loop after which no further piece starts; 0 for one piece per turn.
        rests: True to pause after each turn for as long as its pieces took, so that they use at most half of the process's time.
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
        self._begun = False  # True while pieces run. Work that they add waits for a later turn.
        self._next = 0.0  # Time after which the next piece may start.

    def wait(self, tenant: str, begin: Begin) -> None:
        """Run a piece of work in a later turn of the loop."""
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
    """Semaphore with `count` places, for which tenants take turns."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = TenantTurns[asyncio.Future[None]]()  # Empty while a place is free.

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
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
            if not turn.cancelled():  # The task already had its place.
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
