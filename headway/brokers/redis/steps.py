"""Steps of one queue: library calls that the server skips once their callers have stopped waiting.

A delayed call may reach the server after its caller has repeated it and answered the client. So each call states at
which time, by the server's clock, its caller stops waiting. After that time the server skips the call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from headway.brokers.redis.connection import Overdue, RedisConnection

WINDOW = 60.0  # Seconds for which answers count as recent, because clocks drift.
PUT_BACK = 2.0  # If an answer lags this many seconds behind the best one, the server's clock was set back.


class ServerClock:
    """Estimate of the server's clock, based on the answers from one queue.

    Each answer contains the server's time but takes a while to arrive, so an estimate based on it is late. The best recent answer is
    hardly late. It is ahead only for a while after the server's clock was set back a little.

    The event loop reads `clock` once per turn. If the process stalls during a turn, an answer compared with that clock would seem to
    be ahead. So the best answer is determined with `precise`, which is the same clock but is read on each call.
    """

    def __init__(self, clock: Callable[[], float], precise: Callable[[], float] = monotonic) -> None:
        self._clock, self._precise = clock, precise
        # Seconds by which the server's clock is ahead of this process's, according to the last answer.
        self._latest = 0.0
        # The same according to the best answer of this window, and of the window before.
        self._best = self._best_before = -math.inf
        self._window_ends = -math.inf

    def learn(self, server_time: float) -> None:
        """Learn from an answer that has just arrived and contains the server's time."""
        now = self._precise()
        self._latest, ahead = server_time - self._clock(), server_time - now
        if ahead < max(self._best, self._best_before) - PUT_BACK:
            self._best = self._best_before = -math.inf
        if now >= self._window_ends:
            self._best_before, self._best = self._best, -math.inf
            self._window_ends = now + WINDOW
        self._best = max(self._best, ahead)

    def now(self) -> float:
        """Return the server's time according to its last answer. Before the first answer, return this process's own time."""
        return self._clock() + self._latest

    def after(self, seconds: float) -> float | None:
        """Return what the server's clock will show `seconds` from now, or slightly less. None before the server's first answer."""
        ahead = max(self._best, self._best_before)
        return None if math.isinf(ahead) else self._clock() + ahead + seconds


class Steps:
    """Steps of one queue. `head` returns the first arguments of each call."""

    def __init__(self, connection: RedisConnection, key: str, head: Callable[[], tuple[object, ...]]) -> None:
        self.clock = ServerClock(lambda: asyncio.get_running_loop().time())
        self._connection, self._key, self._head = connection, key, head

    def call(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a call. The server may have carried it out even if this raises BrokerUnavailable."""
        return self._make(self._connection.call, function, *arguments)

    def join(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a call that is batched with others. See `RedisConnection.join`."""
        return self._make(self._connection.join, function, *arguments)

    def share(self, function: str, *arguments: object) -> Awaitable[Any]:
        """Make a read-only call, batched with others as in `join`. Identical concurrent calls share one answer."""
        return self._make(self._connection.share, function, *arguments)

    def claim(self, function: str, *arguments: object) -> Awaitable[Any]:
        return self._make(self._connection.claim, function, *arguments)

    async def _make(self, ask: Callable[..., Awaitable[Any]], function: str, *arguments: object) -> Any:
        try:
            return await ask(function, self._key, *self._head(), self._until(), *arguments)
        except Overdue as exc:  # The server's clock was set forward, or this process was stalled.
            self.clock.learn(exc.now)
            return await ask(function, self._key, *self._head(), self._until(), *arguments)

    def _until(self) -> str:
        """Return the server's time until which the caller of a new call waits, or an empty string if unknown."""
        until = self.clock.after(self._connection.timeout)
        return "" if until is None or math.isinf(until) else repr(until)
