"""`pid`: a controller that moves the window until the measured wait meets a target.

The textbook discrete PID in velocity form (Åström and Murray, "Feedback Systems", ch. 11): each departure,

    e = target − wait;   window += Kp·(e − e₁) + Ki·e + Kd·(e − 2e₁ + e₂)

The velocity form needs no separate integrator, so clamping the window is its own anti-windup.
"""

from __future__ import annotations

from headway.core.departure import Load, Rule

KP, KI, KD = 0.3, 0.1, 0.05


class Pid:
    """Steers the oldest member's wait towards `target` seconds; the window stays within 0 and twice the target."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._window = target
        self._errors = (0.0, 0.0)
        self._seen = 0

    def rule(self, load: Load) -> Rule:
        """Return the rule with the present window, which moves once a departure, however often the rule is asked for."""
        if load.departures != self._seen:
            self._seen = load.departures
            last, before = self._errors
            error = self._target - load.wait
            step = KP * (error - last) + KI * error + KD * (error - 2 * last + before)
            self._window = min(max(self._window + step, 0.0), 2 * self._target)
            self._errors = (error, last)
        return Rule(
            size=load.max_batch,
            window=self._window,
            rate=load.rate,
            service=load.batch_seconds(load.max_batch),
        )
