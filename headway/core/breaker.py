"""The circuit breaker towards a failing backend (Nygard, "Release It!", ch. 5).

closed ──threshold failures in a row──▶ half open ──success──▶ closed
   │                                      │    ▲
   │                               failure▼    │cooldown (doubles each time, up to a cap), or the rest asked for
   └──────the backend asks for rest─────▶ open─┘

Failures in a row may be the fault of the inputs. So the first probe comes at once, before any rest, and should use an input that is
known to work. A failure that is certainly not the inputs' fault, such as a missing connection, counts without others in a row.

While the breaker is half open, one run at a time has a permit to be the probe. A permit expires, so that a lost probe doesn't keep
others out for good."""

from __future__ import annotations

from enum import IntEnum

COOLDOWN_CAP = 30.0  # Longest cooldown, seconds.
REST_CAP = 3600.0  # Longest rest that a backend can ask for, seconds.


class State(IntEnum):
    """States of a breaker, with the values of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Counter of failures in a row. An open breaker lets nothing through, and a half-open one lets one probe through at a time.
    After `threshold` failures in a row a probe decides. After its first failure the breaker stays open for `cooldown` seconds."""

    def __init__(self, threshold: int, cooldown: float) -> None:
        self._threshold = threshold
        self._first = cooldown
        self._cooldown = 0.0
        self._failures = 0
        self._open_until: float | None = None
        self._rest_until = float("-inf")
        self._permit_until: float | None = None
        self._silent_since: float | None = None

    def state(self, now: float) -> State:
        if self._open_until is None:
            return State.CLOSED
        return State.HALF_OPEN if now >= self._open_until else State.OPEN

    def allow(self, now: float, within: float) -> bool:
        """Return True if another run may start. If half open, this run is the probe, and keeps others out for `within` seconds."""
        state = self.state(now)
        if state is State.CLOSED:
            return True
        if state is State.OPEN or (self._permit_until is not None and now < self._permit_until):
            return False
        self._permit_until = now + within
        return True

    def retry_at(self, now: float) -> float:
        """Return the instant at which asking again makes sense."""
        return now if self._open_until is None else max(now, self._open_until)

    def rest_left(self, now: float) -> float:
        """Return the seconds left of a rest that the backend asked for."""
        return max(self._rest_until - now, 0.0)

    def success(self, now: float) -> None:
        """Note a successful run. A rest that the backend asked for stays, since the run may have begun before."""
        self._failures = 0
        if now >= self._rest_until:
            self._open_until = self._permit_until = None

    def failure(self, now: float, *, certain: bool = False) -> None:
        """Note a failed run. If `certain`, the inputs are not at fault."""
        self._failures += 1
        if self._open_until is not None:
            if self._permit_until is not None:
                self._cooldown = min(max(self._cooldown * 2, self._first), COOLDOWN_CAP)
                self._open_until = max(now + self._cooldown, self._rest_until)
                self._permit_until = None
        elif certain or self._failures >= self._threshold:
            self._open_until = now
            self._cooldown = 0.0

    def rest(self, now: float, seconds: float) -> None:
        """Grant the backend a rest of `seconds`, at most REST_CAP."""
        if seconds <= 0.0:
            return
        self._rest_until = max(self._rest_until, now + min(seconds, REST_CAP))
        if self._open_until is None:
            self._cooldown = 0.0
        self._open_until = max(self._rest_until, self._open_until or self._rest_until)

    def lost(self, now: float) -> None:
        """Note that the backend doesn't answer properly. Only the first such instant counts."""
        if self._silent_since is None:
            self._silent_since = now

    def regained(self, now: float) -> float | None:
        """Note that the backend answered. Returns the seconds since `lost`; None if that wasn't called."""
        since, self._silent_since = self._silent_since, None
        return None if since is None else now - since

    def forget(self) -> None:
        """Give up the probe before it ran, so that another run may take its place."""
        self._permit_until = None
