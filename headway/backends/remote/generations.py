"""Connections of one slot to a remote API, in generations: the current one, and older ones that still run requests.

A generation is retired after a long idle time, when its certificates change, and on request. Its running requests finish on
it, and the next use makes a new generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec

AT_ONCE = 8
"""Concurrent requests of a slot for one batch."""

T = TypeVar("T")


class NotStarted(Exception):
    """Connections were used before they were opened."""


class Generation(msgspec.Struct, Generic[T], eq=False):
    """Connections that are retired together when the current stamp isn't theirs any more."""

    content: T
    stamp: object
    running: int = 0


class Generations(Generic[T]):
    """Generations of connections: the current one, and retired ones that still run requests. `stamp` returns an object that
    changes with the certificates. Idle connections are kept for `idle` seconds, which may change later."""

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
        self._opened = True

    async def close(self) -> None:
        self._opened = False
        all = [*self.retired, *([] if self.current is None else [self.current])]
        self.current = None
        self.retired.clear()
        for generation in all:
            await self._end(generation.content)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Generation[T]]:
        """Yield connections for one request, once fewer than AT_ONCE requests run. Raises NotStarted before `open`."""
        async with self._places:
            generation, former = self._next()
            generation.running += 1  # Before any await, because a generation without requests may be closed.
            try:
                if former is not None:
                    await self._end_unused(former)
                yield generation
            finally:
                generation.running -= 1
                self._used_at = self._clock()
                await self._end_unused(generation)

    def give_up(self, generation: Generation[T]) -> None:
        """Retire a generation, so that the next use makes new connections."""
        if self.current is generation:
            self.current = None
            self.retired.append(generation)

    def _next(self) -> tuple[Generation[T], Generation[T] | None]:
        """Return the generation for the next use, and the previous generation if it was just retired."""
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
        """Close a retired generation once it runs no request."""
        if not generation.running and generation in self.retired:
            self.retired.remove(generation)
            await asyncio.shield(self._end(generation.content))
