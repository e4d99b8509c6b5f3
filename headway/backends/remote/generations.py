"""Connections of one slot to a remote API, in generations: those in use, and older ones on which something still runs.

A generation is given up, and the next use makes another one, when it has been idle, when what it was made by has changed, and
when who uses it says so. What runs on it ends there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec

AT_ONCE = 8
"""Most uses of a slot's connections at once, for a batch that has to go in several requests."""

T = TypeVar("T")


class NotStarted(Exception):
    """Use of connections that were not opened."""


class Generation(msgspec.Struct, Generic[T], eq=False):
    """Connections that are given up together. `stamp` is of what they were made by; another one means that they are too old."""

    content: T
    stamp: object
    running: int = 0


class Generations(Generic[T]):
    """Generations of connections.

    Arguments:
        make: makes connections, of which each connects when it is used first.
        end: closes connections.
        stamp: what connections are made by, such as certificates, as that is now.
        clock: monotonic seconds.
        idle: seconds for which idle connections are kept at most.

    Attributes:
        idle: as given; to be changed by who knows better.
        current: generation that is used next; None: one is made then.
        retired: former ones on which something still runs.
    """

    def __init__(
        self,
        make: Callable[[], T],
        end: Callable[[T], Awaitable[None]],
        stamp: Callable[[], object],
        clock: Callable[[], float],
        idle: float,
    ) -> None:
        self._make, self._end, self._stamp, self._clock, self.idle = make, end, stamp, clock, idle
        self.current: Generation[T] | None = None
        self.retired: list[Generation[T]] = []
        self._places = asyncio.Semaphore(AT_ONCE)
        self._opened = False
        self._used_at = 0.0

    def open(self) -> None:
        """Make ready to connect."""
        self._opened = True

    async def close(self) -> None:
        """Close all connections, whatever they do."""
        self._opened = False
        all = [*self.retired, *([] if self.current is None else [self.current])]
        self.current = None
        self.retired.clear()
        for one in all:
            await self._end(one.content)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Generation[T]]:
        """Connections for one request, which waits for a place.

        Raises:
            NotStarted: `open` was not called.
        """
        async with self._places:
            generation, former = self._next()
            generation.running += 1  # Before anything is waited for: what nothing runs on may be closed.
            try:
                if former is not None:
                    await self._end_unused(former)
                yield generation
            finally:
                generation.running -= 1
                self._used_at = self._clock()
                await self._end_unused(generation)

    def give_up(self, generation: Generation[T]) -> None:
        """Have the next use make connections of its own."""
        if self.current is generation:
            self.current = None
            self.retired.append(generation)

    def _next(self) -> tuple[Generation[T], Generation[T] | None]:
        """Return the generation for the next use, and the former one, if that has just been given up."""
        if not self._opened:
            raise NotStarted
        former, stamp = self.current, self._stamp()
        if former is not None:
            idle = not former.running and self._clock() - self._used_at > self.idle
            if not idle and former.stamp is stamp:
                return former, None
            self.give_up(former)
        self.current = Generation(self._make(), stamp)
        return self.current, former

    async def _end_unused(self, generation: Generation[T]) -> None:
        """Close a retired generation on which nothing runs."""
        if not generation.running and generation in self.retired:
            self.retired.remove(generation)
            await asyncio.shield(self._end(generation.content))
