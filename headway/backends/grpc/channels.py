"""Channels of one slot to a remote API over gRPC.

A channel is given up, and the next call makes another one, when it has been idle, when its calls had no end, and when its
connection has failed: so what comes of a call is never the news of an older one. A server that closes an idle connection
meanwhile says so (GOAWAY), and gRPC by itself sends a call again of which it knows that the server has not looked at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec

IDLE = 30.0
"""Seconds for which an idle channel is kept at most."""
AT_ONCE = 8
"""Most calls of a slot at once, for a batch that has to go in several requests."""


class ChannelsClosed(Exception):
    """Use of channels that were not opened."""


class Generation(msgspec.Struct, eq=False):
    """One channel. `stamp` is of what it was made by; another one means that it is no longer as it should be."""

    channel: Any
    stamp: object
    running: int = 0
    retired: bool = False


class Channels:
    """Channels, of which one is in use; what runs on older ones ends there.

    Arguments:
        make: makes a channel, which connects at its first call.
        stamp: what a channel is made by, such as its certificates, as that is now.
        clock: monotonic seconds.
    """

    def __init__(self, make: Callable[[], Any], stamp: Callable[[], object], clock: Callable[[], float]) -> None:
        self._make, self._stamp, self._clock = make, stamp, clock
        self._generation: Generation | None = None
        self._retired: list[Generation] = []
        self._places = asyncio.Semaphore(AT_ONCE)
        self._opened = False
        self._used_at = 0.0

    def open(self) -> None:
        """Make ready to connect."""
        self._opened = True

    async def close(self) -> None:
        """Close all channels, whatever they do."""
        self._opened = False
        generations = [*self._retired, *([] if self._generation is None else [self._generation])]
        self._generation = None
        self._retired.clear()
        for one in generations:
            await one.channel.close(None)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Generation]:
        """Channel for one call, which waits for a place.

        Raises:
            ChannelsClosed: `open` was not called.
        """
        async with self._places:
            generation = await self._current()
            generation.running += 1
            try:
                yield generation
            finally:
                generation.running -= 1
                self._used_at = self._clock()
                if generation.retired:
                    await self._close_if_unused(generation)

    def give_up(self, generation: Generation) -> None:
        """Have the next call make a channel of its own."""
        if self._generation is generation:
            self._generation = None
            self._retire(generation)

    async def _current(self) -> Generation:
        if not self._opened:
            raise ChannelsClosed
        old, stamp = self._generation, self._stamp()
        if old is not None:
            idle = not old.running and self._clock() - self._used_at > IDLE
            if not idle and old.stamp is stamp:
                return old
            self._retire(old)
        fresh = self._generation = Generation(self._make(), stamp)
        if old is not None:
            await self._close_if_unused(old)
        return fresh

    def _retire(self, generation: Generation) -> None:
        generation.retired = True
        self._retired.append(generation)

    async def _close_if_unused(self, generation: Generation) -> None:
        if not generation.running and generation in self._retired:
            self._retired.remove(generation)
            await asyncio.shield(generation.channel.close(None))


async def connected(channel: Any, within: float) -> bool:
    """Wait until a channel has a connection; False when none comes about, or not within so many seconds."""
    try:
        async with asyncio.timeout(within):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return True
