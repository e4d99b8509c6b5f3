"""Clients of a crowd over gRPC, by calls or streams; those who leave cancel what they have sent."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.promises.calls import Answered, Stream, begin, channel
from tests.promises.ways_in import WayIn

if TYPE_CHECKING:
    from bench.promises.crowd import Crowd

PATIENCE = 15.0
"""Seconds after which a request counts as never answered."""
CLOSING = 1.0
"""Seconds in which gRPC closes connections after it has said that they are closed."""
CONNECTIONS = 8
"""Connections that the clients share."""


class Calls:
    """Connections of the callers of a crowd."""

    def __init__(self, crowd: Crowd, port: int) -> None:
        self.crowd = crowd
        self._port = port
        self._channels: list[Any] = []
        self._next = 0

    def connection(self) -> Any:
        self._next += 1
        if len(self._channels) < CONNECTIONS:
            self._channels.append(channel(self._port))
        return self._channels[self._next % len(self._channels)]

    async def close(self) -> None:
        """Close all; returns when they have gone."""
        for connection in self._channels:
            await connection.close()
        if self._channels:
            self._channels.clear()
            gc.collect()  # A connection lives as long as a call on it that nobody has let go of.
            await asyncio.sleep(CLOSING)


class Caller:
    """A client with a request at a time."""

    def __init__(self, calls: Calls, way: WayIn) -> None:
        self.idle = False
        self._crowd = calls.crowd
        self._way = way
        self._connection = calls.connection()
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None

    def connect(self) -> None:
        self._task = self._crowd.loop.create_task(self._go())

    def lose_patience(self, now: float) -> None:
        """Each request has a time-out of its own."""

    def close(self) -> None:
        self._connection = self._stream = None
        if self._task is not None:
            self._task.cancel()
            self._task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _go(self) -> None:
        crowd = self._crowd
        while crowd.left_to_send > 0:
            await self._ask()
            if crowd.manners.pause > 0.0:
                await asyncio.sleep(crowd.rng.expovariate(1.0 / crowd.manners.pause))
        if self._stream is not None:
            await self._stream.close()
        crowd.rest(self)

    async def _ask(self) -> None:
        crowd, way, rng = self._crowd, self._way, self._crowd.rng
        asked = crowd.draw(way)
        sent, id = way.write(asked.texts), asked.texts[0]
        crowd.counters.sent += len(asked.texts)
        leaves = rng.random() < crowd.manners.leave
        cancel: Callable[[], object] | None = None
        if way.wire == "stream" and not leaves:
            if self._stream is None or self._stream.ended is not None:
                self._stream = Stream(self._connection.stream_stream(sent.path)())
            began: Any = self._stream.ask(sent, id)
        else:
            began, cancel = begin(way, self._connection, sent, (), id, PATIENCE + 1.0)
        answer: asyncio.Future[Answered] = asyncio.ensure_future(began)
        stay = max(0.001, rng.expovariate(1.0 / crowd.manners.stay)) if leaves else PATIENCE
        await asyncio.wait([answer], timeout=stay)
        if not answer.done():
            crowd.count("left" if leaves else "silent", len(asked.texts))
            if cancel is not None:
                crowd.counters.unsure += len(asked.texts)
                cancel()
                await asyncio.wait([answer])
            return
        result = answer.result()
        if result.status:
            crowd.judge(asked, result.told.outputs, result.code, result.blamed, result)
        else:
            crowd.count("cut", len(asked.texts))
            crowd.counters.violation(f"cut: {asked} got {result}")
