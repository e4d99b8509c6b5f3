"""Circuit breaker for a failing backend (Nygard, "Release It!", ch. 5).

closed ──threshold failures in a row──▶ half open ──success──▶ closed
   │                                      │    ▲
   │                               failure▼    │cooldown (doubles each time, up to a cap), or the pause asked for
   └────the backend asks for a pause────▶ open─┘

Failures in a row may be the inputs' fault. So the first probe starts immediately, without a cooldown, and should use an input that is known
to work. If a failure can't be the inputs' fault, such as a missing connection, a single one is enough.

While the breaker is half open, one run at a time has a permit to be the probe. A permit expires, so that a lost probe doesn't keep
others out for good."""

from __future__ import annotations

from enum import IntEnum

COOLDOWN_CAP = 30.0  # Longest cooldown in seconds.
REST_CAP = 3600.0  # Longest rest in seconds that a backend can ask for.


class State(IntEnum):
    """States of a breaker. The metric shows these values."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Counts failures in a row. An open breaker lets nothing through; a half-open one lets one probe through at a time.
    After `threshold` failures in a row, the breaker is half open. If the first probe fails, it opens for `cooldown` seconds."""

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
        """Return True if another run may start. If half open, that run is the probe; others must wait for `within` seconds."""
        state = self.state(now)
        if state is State.CLOSED:
            return True
        if state is State.OPEN or (self._permit_until is not None and now < self._permit_until):
            return False
        self._permit_until = now + within
        return True

    def retry_at(self, now: float) -> float:
        """Return the earliest time at which `allow` may return True."""
        return now if self._open_until is None else max(now, self._open_until)

    def rest_left(self, now: float) -> float:
        return max(self._rest_until - now, 0.0)

    def success(self, now: float) -> None:
        """Record a successful run. A pause that the backend asked for continues, because the run may have started before the pause."""
        self._failures = 0
        if now >= self._rest_until:
            self._open_until = self._permit_until = None

    def failure(self, now: float, *, certain: bool = False) -> None:
        """Record a failed run. If `certain`, the inputs are not at fault."""
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
        """Start no runs for `seconds`, but at most REST_CAP, because the backend asked for a pause."""
        if seconds <= 0.0:
            return
        self._rest_until = max(self._rest_until, now + min(seconds, REST_CAP))
        if self._open_until is None:
            self._cooldown = 0.0
        self._open_until = max(self._rest_until, self._open_until or self._rest_until)

    def lost(self, now: float) -> None:
        """Record that the backend doesn't answer properly. Only the first call before `regained` counts."""
        if self._silent_since is None:
            self._silent_since = now

    def regained(self, now: float) -> float | None:
        """Record that the backend answered. Returns the seconds since `lost` was called, or None if it wasn't."""
        since, self._silent_since = self._silent_since, None
        return None if since is None else now - since

    def forget(self) -> None:
        """Give up the probe before it runs, so that another run may be the probe."""
        self._permit_until = None
