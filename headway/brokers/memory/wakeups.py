"""Wake-ups of idle workers, in one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TIMER_GRAIN = 0.001
"""Least seconds for which a timer is set, as event loops count in milliseconds."""


class Wakeups:
    """Idle workers of one model, first come first woken, and the timer that wakes the next.

    A woken worker is `coming` until it claims. Meanwhile no other worker is woken: its claim wakes one for what it
    leaves.
    """

    def __init__(self) -> None:
        self.idle: dict[str, asyncio.Future[None]] = {}
        self.coming: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.looks_at = math.inf
        self.looks_soon = False

    def wake(self, worker: str) -> None:
        """Wake an idle worker, which is `coming` from then on."""
        sleeper = self.idle.pop(worker, None)
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)
            self.coming.add(worker)

    def arm(self, at: float, now: float, look: Callable[[], None]) -> None:
        """Call `look` at instant `at`, or before: a timer that is set for earlier is left, as it asks again."""
        if at < self.looks_at:
            if self.timer is not None:
                self.timer.cancel()
            self.looks_at = at
            self.timer = asyncio.get_running_loop().call_later(max(at - now, TIMER_GRAIN), self._look, look)

    def look_soon(self, look: Callable[[], None]) -> None:
        """Call `look` on a later turn of the loop; `looks_soon` until then."""
        self.looks_soon = True
        asyncio.get_running_loop().call_soon(self._look_now, look)

    def _look_now(self, look: Callable[[], None]) -> None:
        self.looks_soon = False
        look()

    def _look(self, look: Callable[[], None]) -> None:
        self.timer, self.looks_at = None, math.inf
        look()
