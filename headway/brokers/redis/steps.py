"""Steps of one queue: calls of the library, each of which is done while its caller waits for it, or not at all.

A call without an answer lies in a socket until the server gets to it, which may be after its caller has made it again, acted on
that answer, and told a client. So each tells the instant until which its caller waits, on the server's clock, and the server does nothing
for one that it gets to later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from headway.brokers.redis.connection import Overdue, RedisConnection
from headway.brokers.redis.server_clock import ServerClock

Head = Callable[[], tuple[object, ...]]
"""Function that returns the arguments that every step begins with, up to that instant."""


class Steps:
    """Steps of one queue.

    Arguments:
        connection: connection to the server.
        key: prefix of the queue's keys.
        head: see Head.

    Attributes:
        clock: clock of the server.
    """

    def __init__(self, connection: RedisConnection, key: str, head: Head) -> None:
        self.clock = ServerClock(lambda: asyncio.get_running_loop().time())
        self._connection, self._key, self._head = connection, key, head

    def call(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step. Raises BrokerUnavailable when there is no answer in time; then it may have been done."""
        return self._make(self._connection.call, function, *arguments)

    def join(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step like `call`, in one call with all others that are joined at this moment."""
        return self._make(self._connection.join, function, *arguments)

    def claim(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step like `call`, over the connections for claims."""
        return self._make(self._connection.claim, function, *arguments)

    async def _make(self, ask: Callable[..., Awaitable[Any]], function: str, *arguments: object) -> Any:
        try:
            return await ask(function, self._key, *self._head(), self._until(), *arguments)
        except Overdue as exc:  # As this is heard, the server's clock was put forward, or this process stood still.
            self.clock.learn(exc.now)
            return await ask(function, self._key, *self._head(), self._until(), *arguments)

    def _until(self) -> str:
        """Instant on the server's clock until which a call that begins now is waited for; empty where that is not known."""
        until = self.clock.after(self._connection.timeout)
        return "" if until is None or math.isinf(until) else repr(until)
