"""Timer for a reap that is due before the next regular reap."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from headway.runtime.race import end

GRAIN = 0.01  # Minimum delay in seconds, so that entries with similar deadlines are reaped together.


class ReapTimer:
    """Timer for the reaps of one broker that are due between two regular ones. `reap` returns when the next reap is due,
    and the current time. `at` is when the next reap is due."""

    def __init__(self, reap: Callable[[], Awaitable[tuple[float, float]]]) -> None:
        self.at = -math.inf
        self._reap = reap
        self._regular_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def tell(self, at: float) -> None:
        """Set the time of the next regular reap."""
        self._cancel()
        self.at = self._regular_at = at

    def move_up(self, at: float, now: float) -> None:
        """Reap at the time `at`, unless a reap is due earlier."""
        if at < self.at:
            self._cancel()
            self.at = at
            self._timer = asyncio.get_running_loop().call_later(max(at - now, GRAIN), self._fire)

    async def close(self) -> None:
        self._cancel()
        self.at = self._regular_at = -math.inf
        await end(self._task)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._reap_early(), name="early reap")

    async def _reap_early(self) -> None:
        due, now = await self._reap()
        self.at = self._regular_at
        self.move_up(due, now)
