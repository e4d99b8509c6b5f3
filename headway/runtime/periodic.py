"""Periodic work at common ticks, because timers that fire together cost a single wake-up.

The ticks of a period are its integer multiples on the event loop's clock. So every one-second tick is also a half-second tick.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from headway.errors import BrokerUnavailable, StoreUnavailable
from headway.runtime.availability import Availability
from headway.runtime.race import heed_cancellation
from headway.runtime.supervisor import Supervisor

PERIOD = 1.0  # Seconds between two calls, by default.
EARLY = 0.1  # In the last tenth before a tick, the tick counts as past, because timers may fire early.
HALF = 0.5  # Seconds between the ticks at which pauses end, except for very short ones.


def until_tick(every: float) -> float:
    """Return the seconds until the next tick of period `every`: 0.1 to 1.1 times the period."""
    now = asyncio.get_running_loop().time()
    return (math.floor(now / every + EARLY) + 1) * every - now


def ending_at_tick(pause: float) -> float:
    """Return a pause of about `pause` seconds that ends at a tick. Very short pauses don't change."""
    now = asyncio.get_running_loop().time()
    if pause >= 1.0 and (at_second := math.floor(now + pause) - now) >= HALF / 2:
        return at_second
    at_tick = math.floor((now + pause) / HALF + EARLY * HALF) * HALF - now
    return at_tick if at_tick >= HALF / 2 else pause


class Periodic:
    """Calls `act` immediately, and then at each tick of `every` seconds, a number or a function that returns one. If the
    broker or store is unreachable, `act` is called again at the next tick. `what` is the name of the broker or store in the
    log; if it is empty, outages aren't logged."""

    def __init__(
        self,
        name: str,
        act: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        what: str = "broker",
        every: float | Callable[[], float] = PERIOD,
    ) -> None:
        self._name, self._act, self._clock, self._every = name, act, clock, every
        self._availability = Availability(name, clock, what) if what else None
        self._stopped = self._hurried = False
        self._pausing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.start(self._name, self._run)

    async def stop(self) -> None:
        """Stop the loop. A call that has begun finishes first."""
        self._stopped = True
        _end(self._pausing)
        if self._task is not None:
            await asyncio.wait({self._task})  # Unlike `await`, this doesn't pass a cancellation on to the loop.

    def soon(self) -> None:
        """Call `act` in the next turn of the event loop, or right after the current call."""
        self._hurried = True
        _end(self._pausing)

    async def _run(self) -> None:
        while not self._stopped:
            began = self._clock()
            try:
                await self._act()
                if self._availability is not None:
                    self._availability.over()
            except (BrokerUnavailable, StoreUnavailable) as exc:
                if self._availability is not None:
                    self._availability.failed(began, exc)
                heed_cancellation()
            await self._pause()

    async def _pause(self) -> None:
        if self._stopped or self._hurried:
            self._hurried = False
            return
        loop = asyncio.get_running_loop()
        self._pausing = pausing = loop.create_future()
        every = self._every() if callable(self._every) else self._every
        timer = loop.call_later(until_tick(every), _end, pausing)
        try:
            await pausing
        finally:
            timer.cancel()
            self._hurried = False


def _end(pausing: asyncio.Future[None] | None) -> None:
    if pausing is not None and not pausing.done():
        pausing.set_result(None)


class BareResource:
    """A resource that does nothing. Subclasses override what they need."""

    async def open(self) -> None:
        """Get ready."""

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops."""

    async def close(self) -> None:
        """Finish the remaining work."""


class PeriodicResource(BareResource):
    """A resource that runs a Periodic."""

    def __init__(self, periodic: Periodic) -> None:
        self._periodic = periodic

    def start(self, supervisor: Supervisor) -> None:
        self._periodic.start(supervisor)
