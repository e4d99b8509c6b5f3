"""Blocking reads of several keys at once, so that one connection of a server waits for all that is waited for.

Keys for which somebody begins to wait during a read get a read of their own at first. All reads end by one instant, and
what is still waited for then goes into one. Nothing is broken off for that, as a read may have taken something already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from headway.errors import BrokerUnavailable

T = TypeVar("T")
P = TypeVar("P")

LEAST = 0.001
"""Least seconds of a read: 0 would be for ever."""
FEW = 2
"""Reads at once beyond which new keys gather."""
GATHERED = 0.02
"""Seconds for which they do so. What comes for them meanwhile waits in the server."""


class _Waiting(Generic[P, T]):
    """Wait for a key, from a place in it on. `read`: whether a read that is under way has the key."""

    __slots__ = ("found", "place", "read")

    def __init__(self, place: P) -> None:
        self.place = place
        self.found: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self.read = False


class BlockingReads(Generic[P, T]):
    """Blocking reads of keys that lie on one server, and that one command may name together.

    Arguments:
        read: reads the keys, each from its place on, for so many seconds at most; returns what it found by key.
        block: returns the seconds after which a wait ends with nothing; infinite for never.
    """

    def __init__(
        self, read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]], block: Callable[[], float]
    ) -> None:
        self._read, self._block = read, block
        self._waiting: dict[str, _Waiting[P, T]] = {}
        self._reading: dict[asyncio.Task[None], Mapping[str, _Waiting[P, T]]] = {}
        self._until = 0.0
        """Instant by which all reads end."""
        self._known: set[str] = set()
        """Keys that were read lately, beside which new ones gather."""
        self._begins: asyncio.Handle | None = None

    async def wait(self, key: str, place: P) -> T | None:
        """Wait for a key, alone; None when nothing came for a while. Raises BrokerUnavailable."""
        waiting = self._waiting[key] = _Waiting[P, T](place)
        self._begin_soon(GATHERED if len(self._reading) >= FEW and key not in self._known else 0.0)
        try:
            return await waiting.found
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
                self._cancel_idle()

    def _cancel_idle(self) -> None:
        """Break off the reads for which nobody waits any more."""
        for task, keys in self._reading.items():
            if not any(self._waiting.get(key) is one for key, one in keys.items()):
                task.cancel()

    def _begin_soon(self, wait: float = 0.0) -> None:
        """Begin a read in `wait` seconds; at once means once all that has just been answered is waited for again."""
        loop = asyncio.get_running_loop()
        if self._begins is None:
            self._begins = loop.call_later(wait, self._begin) if wait else loop.call_soon(self._begin)
        elif not wait and isinstance(self._begins, asyncio.TimerHandle):
            self._begins.cancel()
            self._begins = loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._begins = None
        keys = {key: one for key, one in self._waiting.items() if not one.read}
        loop = asyncio.get_running_loop()
        if not keys:
            return
        if loop.time() >= self._until:
            if self._reading:  # They end by now, and the last one begins the next, with all keys.
                return
            self._until = loop.time() + self._block()
            self._known.clear()
        self._known.update(keys)
        for one in keys.values():
            one.read = True
        task = loop.create_task(self._read_once(keys))
        self._reading[task] = keys
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for one in self._reading.pop(task).values():
            one.read = False
        self._begin_soon()

    async def _read_once(self, keys: Mapping[str, _Waiting[P, T]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await self._read(
                {key: one.place for key, one in keys.items()}, max(self._until - loop.time(), LEAST)
            )
        except BrokerUnavailable as exc:
            for key, one in keys.items():
                if self._is_waited_for(key, one):
                    one.found.set_exception(exc)
            return
        over = loop.time() >= self._until
        for key, one in keys.items():
            if (key in found or over) and self._is_waited_for(key, one):
                one.found.set_result(found.get(key))

    def _is_waited_for(self, key: str, one: _Waiting[P, T]) -> bool:
        return self._waiting.get(key) is one and not one.found.done()
