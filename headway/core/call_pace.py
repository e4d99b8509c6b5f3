"""Pace of calls to a remote API that has a quota: so many a second, one after the other."""

from __future__ import annotations

import math


class CallPace:
    """Turns of calls, evenly apart. Slots of one API share it.

    Arguments:
        rate: calls per second; 0: no bound.
    """

    def __init__(self, rate: float) -> None:
        self._gap = 1.0 / rate if rate else 0.0
        self._next = -math.inf

    def take(self, now: float) -> float:
        """Take the next turn; returns the seconds until then."""
        if not self._gap:
            return 0.0
        turn = max(now, self._next)
        self._next = turn + self._gap
        return turn - now
