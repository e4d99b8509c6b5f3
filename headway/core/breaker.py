"""The circuit breaker towards a failing backend (Nygard, "Release It!", ch. 5).

closed ──threshold failures in a row──▶ half open ──success──▶ closed
                                          │    ▲
                                   failure▼    │cooldown (doubles each time, up to a cap)
                                          open─┘

Failures in a row may be the fault of what was asked. So the first probe comes at once, before any rest, and is
to be made with something that is known to work.
"""

from __future__ import annotations

from enum import IntEnum

COOLDOWN_CAP = 30.0
"""Longest cooldown, seconds."""


class State(IntEnum):
    """As exported in the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Counts failures in a row; open, it lets nothing through; half open, one probe at a time.

    Arguments:
        threshold: failures in a row after which a probe has to tell what they mean.
        cooldown: seconds it stays open when the first probe has failed.
    """

    def __init__(self, threshold: int, cooldown: float) -> None:
        self._threshold = threshold
        self._first = cooldown
        self._cooldown = 0.0
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    def state(self, now: float) -> State:
        """Closed, half open or open at instant `now`."""
        if self._opened_at is None:
            return State.CLOSED
        return State.HALF_OPEN if now >= self._opened_at + self._cooldown else State.OPEN

    def allow(self, now: float) -> bool:
        """Whether one more run may start. Half open, the first that asks becomes the probe."""
        state = self.state(now)
        if state is State.CLOSED:
            return True
        if state is State.OPEN or self._probing:
            return False
        self._probing = True
        return True

    def retry_at(self, now: float) -> float:
        """The instant at which asking again makes sense."""
        if self._opened_at is None:
            return now
        return max(now, self._opened_at + self._cooldown)

    def success(self) -> None:
        """A run came to an end as it should."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failure(self, now: float) -> None:
        """A run failed."""
        self._failures += 1
        if self._opened_at is not None:
            if self._probing:
                self._cooldown = min(max(self._cooldown * 2, self._first), COOLDOWN_CAP)
                self._opened_at = now
                self._probing = False
        elif self._failures >= self._threshold:
            self._opened_at = now
            self._cooldown = 0.0

    def forget(self) -> None:
        """The probe was given up before it ran: let another be the probe."""
        self._probing = False
