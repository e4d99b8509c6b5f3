"""Steps of one queue: library calls that the server makes only while their callers wait.

The server may get to an unanswered call after its caller has repeated it, acted on that answer, and told a client. So each call names the
instant on the server's clock until which its caller waits, and the server skips it after that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from headway.brokers.redis.connection import Overdue, RedisConnection

WINDOW = 60.0
"""Seconds for which answers count as recent, because clocks drift."""
PUT_BACK = 2.0
"""Seconds by which an answer must be behind the best one to show that the server's clock was put back. No answer takes so long to arrive."""

Head = Callable[[], tuple[object, ...]]
"""Function that returns the arguments at the beginning of every step."""


class ServerClock:
    """Estimate of the server's clock, made from the answers of one queue.

    Each answer names the server's instant but takes a while to arrive, so an estimate made of it is behind. The best of recent answers is
    hardly behind, and ahead only for a while after a small step back of the server's clock.

    An event loop reads its clock once per turn. If the process stalls within a turn, that clock stands still, and an answer compared with it
    would put the server ahead. So the best answer is found with a clock that is read each time.

    Arguments:
        clock: monotonic seconds of the event loop.
        anew: the same clock, read at each call.
    """

    def __init__(self, clock: Callable[[], float], anew: Callable[[], float] = monotonic) -> None:
        self._clock, self._anew = clock, anew
        self._latest = 0.0
        """Seconds that the server's clock is ahead of this process's, by the last answer."""
        self._best = self._best_before = -math.inf
        """The same by the best answer of this window, and of the previous window."""
        self._window_ends = -math.inf

    def learn(self, instant: float) -> None:
        """Learn from an answer that has just arrived with the server's instant."""
        now = self._anew()
        self._latest, ahead = instant - self._clock(), instant - now
        if ahead < max(self._best, self._best_before) - PUT_BACK:
            self._best = self._best_before = -math.inf
        if now >= self._window_ends:
            self._best_before, self._best = self._best, -math.inf
            self._window_ends = now + WINDOW
        self._best = max(self._best, ahead)

    def now(self) -> float:
        """The server's instant by its last answer, or by this process's clock before the first answer."""
        return self._clock() + self._latest

    def after(self, seconds: float) -> float | None:
        """The server's instant in this many seconds, or slightly less; None before its first answer."""
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
        """Make a step. Raises BrokerUnavailable if no answer comes in time. The step may have been done."""
        return self._make(self._connection.call, function, *arguments)

    def join(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step like `call`, batched with others joined at this moment."""
        return self._make(self._connection.join, function, *arguments)

    def share(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a read-only step like `join`. Equal calls of this moment share one answer."""
        return self._make(self._connection.share, function, *arguments)

    def claim(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a step like `call`, over the connections for claims."""
        return self._make(self._connection.claim, function, *arguments)

    async def _make(self, ask: Callable[..., Awaitable[Any]], function: str, *arguments: object) -> Any:
        try:
            return await ask(function, self._key, *self._head(), self._until(), *arguments)
        except Overdue as exc:  # The server's clock was put forward, or this process stood still.
            self.clock.learn(exc.now)
            return await ask(function, self._key, *self._head(), self._until(), *arguments)

    def _until(self) -> str:
        """Instant on the server's clock until which the caller of a new call waits; empty if unknown."""
        until = self.clock.after(self._connection.timeout)
        return "" if until is None or math.isinf(until) else repr(until)
