"""Steps of one queue: calls of the library, each of which is done while its caller waits for it, or not at all.

A call without an answer lies in a socket until the server gets to it, which may be after its caller has made it again, acted on
that answer, and told a client. So each tells the instant until which its caller waits, on the server's clock, and the server does nothing
for one that it gets to later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from headway.brokers.redis.connection import Overdue, RedisConnection

WINDOW = 60.0
"""Seconds after which other answers are the recent ones, as clocks drift."""
PUT_BACK = 2.0
"""Seconds by which an answer must be behind the best one to show that the server's clock was put back: more than an answer
may take to arrive.
"""

Head = Callable[[], tuple[object, ...]]
"""Function that returns the arguments that every step begins with, up to that instant."""


class ServerClock:
    """Estimate of the server's clock, as one process makes it of the answers of one queue.

    Each answer tells the server's instant, but takes a while to arrive, so that an estimate made of it is behind by that. What the best
    of recent answers tells is behind by a moment, and ahead only for a while after the server's clock was put back by little.

    An event loop reads its clock once a turn. While a process is kept from running within a turn, that clock stands still, and an answer
    that is held against it would put the server ahead. So the best is found by a clock that is read anew.

    Arguments:
        clock: monotonic seconds of the event loop.
        anew: the same clock, read at each call.
    """

    def __init__(self, clock: Callable[[], float], anew: Callable[[], float] = monotonic) -> None:
        self._clock, self._anew = clock, anew
        self._latest = 0.0
        """Seconds by which the server's clock was ahead of this process's by the last answer. The others: by the best one of this window,
        and of the one before."""
        self._best = self._best_before = -math.inf
        self._window_ends = -math.inf

    def learn(self, instant: float) -> None:
        """Learn of an answer that has just arrived, and of the server's instant that it tells."""
        now = self._anew()
        self._latest, ahead = instant - self._clock(), instant - now
        if ahead < max(self._best, self._best_before) - PUT_BACK:
            self._best = self._best_before = -math.inf
        if now >= self._window_ends:
            self._best_before, self._best = self._best, -math.inf
            self._window_ends = now + WINDOW
        self._best = max(self._best, ahead)

    def now(self) -> float:
        """The server's instant by its last answer; this process's clock before the first one."""
        return self._clock() + self._latest

    def after(self, seconds: float) -> float | None:
        """The server's instant so many seconds from now, or a moment before it; None before its first answer."""
        ahead = max(self._best, self._best_before)
        return None if math.isinf(ahead) else self._clock() + ahead + seconds


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

    def share(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step that only reads, like `join`; all who make it at this moment have one answer."""
        return self._make(self._connection.share, function, *arguments)

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
