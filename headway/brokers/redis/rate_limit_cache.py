"""Rate-limit debts that this process has heard of: until when something is owed to each limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.model import Limit

LEAST = 10_000
"""Limits that are remembered before those without debt are dropped."""


class RateLimitCache:
    """Lower bounds on rate-limit debts, on the event loop's clock. Debts only grow, so a bound is never too high."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}
        self._clock: Callable[[], float] | None = None
        self._most = LEAST

    def learn(self, limits: Sequence[Limit], owed: Sequence[float], asked: float) -> None:
        """Note the seconds owed to each of these limits, from a call that was made at instant `asked`."""
        until = self.until
        self._clock = self._clock or asyncio.get_running_loop().time
        for limit, seconds in zip(limits, owed, strict=True):
            until[limit.id] = max(asked + seconds, until.get(limit.id, 0.0))
        if len(until) > self._most:
            self.until = {id: end for id, end in until.items() if end > asked}
            self._most = max(LEAST, 2 * len(self.until))

    def forget(self) -> None:
        """Forget all: the server may have lost its counts."""
        self.until = {}

    def seconds(self, limit: Limit) -> float:
        """Seconds owed to a limit now."""
        until = self.until.get(limit.id)
        if until is None or self._clock is None:
            return 0.0
        owed = until - self._clock()
        return owed if owed > 0.0 else 0.0
