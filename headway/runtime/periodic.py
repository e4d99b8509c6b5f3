"""Something that a process does again and again until it is told to stop, whether the broker, or a store, answers or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headway.errors import BrokerUnavailable, StoreUnavailable
from headway.runtime.availability import Availability
from headway.runtime.supervisor import Supervisor

PULSE = 1.0
"""Seconds between two beats, unless told otherwise."""


class Periodic:
    """Calls `act` at once and then every so many seconds.

    Arguments:
        name: of the loop, for the log.
        act: what is done; a broker or a store that does not answer is told of once, and asked again with the next beat.
        clock: monotonic seconds.
        what: `act` asks, as the log names it.
        every: seconds between two calls.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        what: str = "broker",
        every: float = PULSE,
    ) -> None:
        self._name = name
        self._act = act
        self._clock = clock
        self._every = every
        self._outage = Availability(name, clock, what)
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        """Begin."""
        self._task = supervisor.start(self._name, self._beat_on)

    async def stop(self) -> None:
        """Return once it beats no more. A beat that is under way comes to its end."""
        self._stopped.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat_on(self) -> None:
        while not self._stopped.is_set():
            began = self._clock()
            try:
                await self._act()
                self._outage.over()
            except (BrokerUnavailable, StoreUnavailable) as exc:
                self._outage.failed(began, exc)
            pause = max(self._every - (self._clock() - began), self._every / 10)
            try:
                await asyncio.wait_for(self._stopped.wait(), pause)
            except TimeoutError:
                continue
