"""Blocking reads of lists and streams. One command waits for as many keys as possible, so few connections are needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from headway.brokers.redis.link import Ask, Client
from headway.errors import BrokerUnavailable

T = TypeVar("T")
P = TypeVar("P")

LEAST = 0.001  # Minimum length of a read in seconds, because 0 means for ever.
FEW = 2  # While at least this many reads are running, new keys gather before they are read.
GATHERED = 0.02  # Seconds for which new keys gather. Their data stays in the server for that time.


class _Waiting(Generic[P, T]):
    """A caller that waits for data at a key, after a position."""

    __slots__ = ("place", "read", "result")

    def __init__(self, place: P) -> None:
        self.place = place
        self.result: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self.read = False  # True if a running read includes the key.


class BlockingReads(Generic[P, T]):
    """Combines blocking reads of several keys into one command. All keys must be allowed in the same command.

    Arguments:
        read: reads keys, each from its position, blocking for at most the given number of seconds. Returns results by key.
        block: returns the number of seconds after which a wait ends without a result. May be infinite."""

    def __init__(
        self, read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]], block: Callable[[], float]
    ) -> None:
        self._read, self._block = read, block
        self._waiting: dict[str, _Waiting[P, T]] = {}
        self._reading: dict[asyncio.Task[None], Mapping[str, _Waiting[P, T]]] = {}
        self._until = 0.0  # Time at which all reads end.
        self._known: set[str] = set()  # Recently read keys. Other keys gather first.
        self._begins: asyncio.Handle | None = None

    async def wait(self, key: str, place: P) -> T | None:
        """Wait for data at a key. There may be one caller per key. Returns None if the read ends without data. Raises BrokerUnavailable."""
        waiting = self._waiting[key] = _Waiting[P, T](place)
        self._begin_soon(GATHERED if len(self._reading) >= FEW and key not in self._known else 0.0)
        try:
            return await waiting.result
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
                self._cancel_idle()

    def _cancel_idle(self) -> None:
        for task, keys in self._reading.items():
            if not any(self._waiting.get(key) is waiting for key, waiting in keys.items()):
                task.cancel()

    def _begin_soon(self, wait: float = 0.0) -> None:
        """Begin a read in `wait` seconds. If `wait` is 0, begin once the callers that were just answered wait again."""
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
            if self._reading:  # These reads end now, and the last one to end begins the next read, with all keys.
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
                    waiting.result.set_exception(exc)
            return
        over = loop.time() >= self._until
        for key, waiting in keys.items():
            if (key in results or over) and self._is_waited_for(key, waiting):
                waiting.result.set_result(results.get(key))

    def _is_waited_for(self, key: str, waiting: _Waiting[P, T]) -> bool:
        return self._waiting.get(key) is waiting and not waiting.result.done()


class KeyReads:
    """Blocking reads of one process. `tag_of` returns the part of a key that all keys of a command must share. `block` is the maximum
    number of seconds of a read, or infinite."""

    def __init__(self, client: Client, ask: Ask, tag_of: Callable[[str], str], block: float) -> None:
        self._client, self._ask, self._tag_of, self.block = client, ask, tag_of, block
        self._pops: dict[str, BlockingReads[None, bytes]] = {}
        self._streams: dict[str, BlockingReads[bytes, list[Any]]] = {}

    async def pop(self, key: str) -> bytes | None:
        """Wait for the first element of a list. Returns None after `block` seconds."""
        return await self._shared(self._pops, self._pop, key).wait(key, None)

    async def stream(self, key: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Wait for stream entries after an id. Returns an empty list after `block` seconds."""
        entries = await self._shared(self._streams, self._read_streams, key).wait(key, after)
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in entries or ()]

    def _shared(
        self,
        reads: dict[str, BlockingReads[P, T]],
        read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]],
        key: str,
    ) -> BlockingReads[P, T]:
        """Return the BlockingReads for `key`, which all keys with the same tag share."""
        tag = self._tag_of(key)
        if (shared := reads.get(tag)) is None:
            shared = reads[tag] = BlockingReads(read, lambda: self.block)
        return shared

    async def _pop(self, keys: Mapping[str, None], wait: float) -> Mapping[str, bytes]:
        seconds = 0 if math.isinf(wait) else wait
        element = await self._ask(lambda: self._client.call(next(iter(keys)), "BLPOP", *keys, seconds), wait)
        return {} if element is None else {element[0].decode(): element[1]}

    async def _read_streams(self, keys: Mapping[str, bytes], wait: float) -> Mapping[str, list[Any]]:
        block = 0 if math.isinf(wait) else math.ceil(wait * 1000)
        command = "XREAD", "BLOCK", block, "STREAMS", *keys, *keys.values()
        streams = await self._ask(lambda: self._client.call(next(iter(keys)), *command), wait)
        return {key.decode(): entries for key, entries in streams or ()}
