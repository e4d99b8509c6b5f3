"""Rate-limit debts that this process has heard of: until when something is owed to each limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.core.ratelimit import RateDebts
from headway.model import Limit


class RateLimitCache:
    """Lower bounds on rate-limit debts, on the event loop's clock. Debts only grow, so a bound is never too high."""

    def __init__(self) -> None:
        self._debts = RateDebts()
        self._clock: Callable[[], float] | None = None

    def learn(self, limits: Sequence[Limit], owed: Sequence[float], asked: float) -> None:
        """Note the seconds owed to each of these limits, from a call that was made at instant `asked`."""
        until = self._debts.tats
        self._clock = self._clock or asyncio.get_running_loop().time
        for limit, seconds in zip(limits, owed, strict=True):
            until[limit.id] = max(asked + seconds, until.get(limit.id, 0.0))
        self._debts.tidy(asked)

    def forget(self) -> None:
        """Forget all: the server may have lost its counts."""
        self._debts = RateDebts()

    def seconds(self, limit: Limit) -> float:
        """Seconds owed to a limit now."""
        until = self._debts.tats.get(limit.id)
        if until is None or self._clock is None:
            return 0.0
        owed = until - self._clock()
        return owed if owed > 0.0 else 0.0
