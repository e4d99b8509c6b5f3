"""Policies by a window: a batch leaves when it is full or its oldest member has waited long enough. It leaves early if less than
one more arrival is expected in the rest of the window, as waiting would then cost latency and change nothing."""

from __future__ import annotations

from headway.core.departure import Load, Rule

DEFAULT_WINDOW = 0.040  # Seconds that the policy `window` waits, and `pid` aims at, by default.

LIGHT, NORMAL, HEAVY = (16, 0.030), (32, 0.050), (64, 0.100)  # Rows of `table`: batch size and window in seconds.

KP, KI, KD = 0.3, 0.1, 0.05  # Gains of `pid`.


def _rule(load: Load, window: float, size: int) -> Rule:
    size = min(size, load.max_batch)
    return Rule(size=size, window=window, rate=load.rate, service=load.batch_seconds(size))


class Window:
    """`window`: waits at most `max_wait` seconds, the usual rule."""

    def __init__(self, max_wait: float) -> None:
        self._window = max_wait

    def rule(self, load: Load) -> Rule:
        # Without `_rule`, whose call would exceed the budget of a list.
        size = load.max_batch
        return Rule(size=size, window=self._window, rate=load.rate, service=load.batch_seconds(size))


class Table:
    """`table`: three fixed pairs of batch size and window, chosen by load. It is a baseline, and predictable.

    below 50 % busy and fewer than 10 waiting   16 / 30 ms
    above 85 % busy or more than 100 waiting    64 / 100 ms
    otherwise                                   32 / 50 ms"""

    def rule(self, load: Load) -> Rule:
        """Return the rule of the row that fits the load. Sizes are limited by the largest batch."""
        if load.utilisation > 0.85 or load.depth > 100:
            size, window = HEAVY
        elif load.utilisation < 0.50 and load.depth < 10:
            size, window = LIGHT
        else:
            size, window = NORMAL
        return _rule(load, window, size)


class Pid:
    """`pid`: moves the window, from 0 to twice the target, until the oldest member's wait meets `target` seconds.

    The textbook discrete PID in velocity form (Åström and Murray, "Feedback Systems", ch. 11): at each departure,

        e = target − wait;   window += Kp·(e − e₁) + Ki·e + Kd·(e − 2e₁ + e₂)

    The velocity form has no separate integrator, so clamping the window prevents windup."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._window = target
        self._errors = (0.0, 0.0)
        self._seen = 0

    def rule(self, load: Load) -> Rule:
        """Return the rule with the present window, which moves once per departure, however often this is called."""
        if load.departures != self._seen:
            self._seen = load.departures
            last, before = self._errors
            error = self._target - load.wait
            step = KP * (error - last) + KI * error + KD * (error - 2 * last + before)
            self._window = min(max(self._window + step, 0.0), 2 * self._target)
            self._errors = (error, last)
        return _rule(load, self._window, load.max_batch)
