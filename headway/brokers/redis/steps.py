"""Steps of one queue: library calls that the server skips once their callers have stopped waiting.

A delayed call may reach the server after its caller has repeated it and answered the client. So each call names the instant, on the
server's clock, until which its caller waits. After that instant the server skips the call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from headway.brokers.redis.connection import Overdue, RedisConnection

WINDOW = 60.0  # Seconds for which answers count as recent, because clocks drift.
PUT_BACK = 2.0
"""An answer that is so many seconds behind the best shows that the server's clock was put back. No answer takes so long."""


class ServerClock:
    """Estimate of the server's clock, made from the answers of one queue.

    Each answer names the server's instant but takes a while to arrive, so an estimate from it lags behind. The best recent answer
    hardly lags. It runs ahead only for a while after the server's clock was put back a little.

    The event loop reads `clock` once per turn. If the process stalls within a turn, an answer compared with that clock would seem
    to be ahead. So the best answer is found with `anew`, which is the same clock but read at each call.
    """

    def __init__(self, clock: Callable[[], float], anew: Callable[[], float] = monotonic) -> None:
        self._clock, self._anew = clock, anew
        self._latest = 0.0  # Seconds that the server's clock is ahead of this process's, by the last answer.
        # The same number by the best answer of this window, and of the window before.
        self._best = self._best_before = -math.inf
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
        """Return the server's instant by its last answer, or this process's own before the first answer."""
        return self._clock() + self._latest

    def after(self, seconds: float) -> float | None:
        """Return the server's instant `seconds` from now, or a slightly earlier one. None before the first answer."""
        ahead = max(self._best, self._best_before)
        return None if math.isinf(ahead) else self._clock() + ahead + seconds


class Steps:
    """Steps of one queue. `head` returns the first arguments of every call."""

    def __init__(self, connection: RedisConnection, key: str, head: Callable[[], tuple[object, ...]]) -> None:
        self.clock = ServerClock(lambda: asyncio.get_running_loop().time())
        self._connection, self._key, self._head = connection, key, head

    def call(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a call. The server may have run it even if this raises BrokerUnavailable."""
        return self._make(self._connection.call, function, *arguments)

    def join(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a call like `call`, but batched with others. See `RedisConnection.join`."""
        return self._make(self._connection.join, function, *arguments)

    def share(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a read-only call like `join`. Concurrent equal calls share one answer."""
        return self._make(self._connection.share, function, *arguments)

    def claim(self, function: str, *arguments: object) -> Awaitable[Any]:
        return self._make(self._connection.claim, function, *arguments)

    async def _make(self, ask: Callable[..., Awaitable[Any]], function: str, *arguments: object) -> Any:
        try:
            return await ask(function, self._key, *self._head(), self._until(), *arguments)
        except Overdue as exc:  # The server's clock was put forward, or this process stood still.
            self.clock.learn(exc.now)
            return await ask(function, self._key, *self._head(), self._until(), *arguments)

    def _until(self) -> str:
        """Return the instant on the server's clock until which the caller of a new call waits, or empty if unknown."""
        until = self.clock.after(self._connection.timeout)
        return "" if until is None or math.isinf(until) else repr(until)
