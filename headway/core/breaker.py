"""The circuit breaker towards a failing backend (Nygard, "Release It!", ch. 5).

closed ──threshold failures in a row──▶ half open ──success──▶ closed
   │                                      │    ▲
   │                               failure▼    │cooldown (doubles each time, up to a cap), or the rest asked for
   └──────the backend asks for rest─────▶ open─┘

Failures in a row may be the fault of what was asked. So the first probe comes at once, before any rest, and is
to be made with something that is known to work.

Half open, one run at a time has the permit to be the probe. A permit ends by itself: a probe that is never heard of
again keeps nobody out for good.
"""

from __future__ import annotations

from enum import IntEnum

COOLDOWN_CAP = 30.0
"""Longest cooldown, seconds."""
REST_CAP = 3600.0
"""Longest rest that a backend can ask for, seconds."""


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
        self._open_until: float | None = None
        self._rest_until = float("-inf")
        self._permit_until: float | None = None

    def state(self, now: float) -> State:
        """Closed, half open or open at instant `now`."""
        if self._open_until is None:
            return State.CLOSED
        return State.HALF_OPEN if now >= self._open_until else State.OPEN

    def allow(self, now: float, within: float) -> bool:
        """Whether one more run may start. Half open, the first that asks becomes the probe.

        Arguments:
            now: the instant.
            within: seconds after which the probe, if that is what the run becomes, keeps others out no more.
        """
        state = self.state(now)
        if state is State.CLOSED:
            return True
        if state is State.OPEN or (self._permit_until is not None and now < self._permit_until):
            return False
        self._permit_until = now + within
        return True

    def retry_at(self, now: float) -> float:
        """The instant at which asking again makes sense."""
        return now if self._open_until is None else max(now, self._open_until)

    def rest_left(self, now: float) -> float:
        """Seconds of the rest that the backend has asked for; 0 when it has asked for none, or that is over."""
        return max(self._rest_until - now, 0.0)

    def success(self, now: float) -> None:
        """A run came to an end as it should. It ends no rest that was asked for: the run may have begun before."""
        self._failures = 0
        if now >= self._rest_until:
            self._open_until = self._permit_until = None

    def failure(self, now: float) -> None:
        """A run failed."""
        self._failures += 1
        if self._open_until is not None:
            if self._permit_until is not None:
                self._cooldown = min(max(self._cooldown * 2, self._first), COOLDOWN_CAP)
                self._open_until = max(now + self._cooldown, self._rest_until)
                self._permit_until = None
        elif self._failures >= self._threshold:
            self._open_until = now
            self._cooldown = 0.0

    def rest(self, now: float, seconds: float) -> None:
        """The backend asks to be left alone for `seconds`, at most REST_CAP of which are granted."""
        if seconds <= 0.0:
            return
        self._rest_until = max(self._rest_until, now + min(seconds, REST_CAP))
        if self._open_until is None:
            self._cooldown = 0.0
        self._open_until = max(self._rest_until, self._open_until or self._rest_until)

    def forget(self) -> None:
        """The probe was given up before it ran: let another be the probe."""
        self._permit_until = None
