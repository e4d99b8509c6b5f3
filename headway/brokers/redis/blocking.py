"""Blocking reads of several keys at once, so one connection per server is enough.

Keys that are first awaited during a read get a read of their own. All reads end at the same instant, and the next read has all keys
that are still awaited. A read isn't aborted to add a key, because it may have taken something already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from headway.errors import BrokerUnavailable

T = TypeVar("T")
P = TypeVar("P")

LEAST = 0.001
"""Minimum length of a read in seconds, because 0 means for ever."""
FEW = 2
"""Number of reads under way from which new keys gather."""
GATHERED = 0.02
"""Seconds for which new keys gather. Their data waits in the server meanwhile."""


class _Waiting(Generic[P, T]):
    """Wait for a key from a position on."""

    __slots__ = ("found", "place", "read")

    def __init__(self, place: P) -> None:
        self.place = place
        self.found: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self.read = False
        """True if a read under way includes the key."""


class BlockingReads(Generic[P, T]):
    """Blocking reads of keys that one command may name together.

    Arguments:
        read: reads keys, each from its position on, for at most some seconds. Returns results by key.
        block: returns the seconds after which a wait ends without a result, which may be infinite.
    """

    def __init__(
        self, read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]], block: Callable[[], float]
    ) -> None:
        self._read, self._block = read, block
        self._waiting: dict[str, _Waiting[P, T]] = {}
        self._reading: dict[asyncio.Task[None], Mapping[str, _Waiting[P, T]]] = {}
        self._until = 0.0
        """Instant at which all reads end."""
        self._known: set[str] = set()
        """Recently read keys. Other keys gather first."""
        self._begins: asyncio.Handle | None = None

    async def wait(self, key: str, place: P) -> T | None:
        """Wait for a key, which only one caller may do at a time. None if nothing came for a while. Raises BrokerUnavailable."""
        waiting = self._waiting[key] = _Waiting[P, T](place)
        self._begin_soon(GATHERED if len(self._reading) >= FEW and key not in self._known else 0.0)
        try:
            return await waiting.found
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
                self._cancel_idle()

    def _cancel_idle(self) -> None:
        """Abort the reads that nobody waits for any more."""
        for task, keys in self._reading.items():
            if not any(self._waiting.get(key) is waiting for key, waiting in keys.items()):
                task.cancel()

    def _begin_soon(self, wait: float = 0.0) -> None:
        """Begin a read in `wait` seconds. At 0 it begins when callers that were just answered wait again."""
        loop = asyncio.get_running_loop()
        if self._begins is None:
            self._begins = loop.call_later(wait, self._begin) if wait else loop.call_soon(self._begin)
        elif not wait and isinstance(self._begins, asyncio.TimerHandle):
            self._begins.cancel()
            self._begins = loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._begins = None
        keys = {key: waiting for key, waiting in self._waiting.items() if not waiting.read}
        loop = asyncio.get_running_loop()
        if not keys:
            return
        if loop.time() >= self._until:
            if self._reading:  # These reads end now, and the last of them begins the next read, with all keys.
                return
            self._until = loop.time() + self._block()
            self._known.clear()
        self._known.update(keys)
        for waiting in keys.values():
            waiting.read = True
        task = loop.create_task(self._read_once(keys))
        self._reading[task] = keys
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for waiting in self._reading.pop(task).values():
            waiting.read = False
        self._begin_soon()

    async def _read_once(self, keys: Mapping[str, _Waiting[P, T]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            results = await self._read(
                {key: waiting.place for key, waiting in keys.items()}, max(self._until - loop.time(), LEAST)
            )
        except BrokerUnavailable as exc:
            for key, waiting in keys.items():
                if self._is_waited_for(key, waiting):
                    waiting.found.set_exception(exc)
            return
        over = loop.time() >= self._until
        for key, waiting in keys.items():
            if (key in results or over) and self._is_waited_for(key, waiting):
                waiting.found.set_result(results.get(key))

    def _is_waited_for(self, key: str, waiting: _Waiting[P, T]) -> bool:
        return self._waiting.get(key) is waiting and not waiting.found.done()
