"""Clock of the server of one queue, as this process knows it.

Each answer tells the server's instant, but takes a while to arrive, so that an estimate made of it is behind by that. What the best of
recent answers tells is behind by a moment, and ahead only for a while after the server's clock was put back by little.

An event loop reads its clock once a turn. While a process is kept from running within a turn, that clock stands still, and an answer
that is held against it would put the server ahead. So the best is found by a clock that is read anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

WINDOW = 60.0
"""Seconds after which other answers are the recent ones, as clocks drift."""
PUT_BACK = 2.0
"""Seconds by which an answer must be behind the best one to show that the server's clock was put back: more than an answer
may take to arrive.
"""


class ServerClock:
    """Estimate of the server's clock.

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
