"""`paced`: evenly spaced departures, the default.

With a fixed batch time, "leave whenever a GPU is free" makes GPUs lock in phase, as buses bunch on a line:
one leaves full, the next nearly empty right behind it. Holding an even gap between departures needs no more
GPUs and takes the worst wait from a whole batch time to one gap. With batch time ℓ(n) = α + βn, k GPUs and
arrival rate λ, each departure carries n = λs, and k departures must fit into one batch time, k·s = α + βλs:

    s* = α / (k − βλ)

Holding control against bunching is from public transport (Daganzo, "A headway-based approach to eliminate
bus bunching", Transportation Research B 43, 2009); the formula for batch servers is ours.
"""

from __future__ import annotations

import math

from headway.core.departure import Load, Rule

WORTH_SPACING = 1.0
"""Expected arrivals in a gap (λα/k) below which there is nothing to space: a lone request leaves at once."""


def headway(load: Load) -> float:
    """The even gap s* in seconds; 0 when arrivals are too few for a gap to gather a second entry."""
    if load.alpha <= 0.0 or load.slots <= 0:
        return 0.0
    if load.rate * load.alpha / load.slots < WORTH_SPACING:
        return 0.0
    saturated = load.batch_seconds(load.max_batch) / load.slots
    spare = load.slots - load.beta * load.rate
    return min(load.alpha / spare, saturated) if spare > 0.0 else saturated


class Paced:
    """Spaces departures by the headway. `max_wait` in seconds bounds the wait further; None leaves it to the gap."""

    def __init__(self, max_wait: float | None = None) -> None:
        self._window = math.inf if max_wait is None else max_wait

    def rule(self, load: Load) -> Rule:
        """Full at the largest batch, otherwise at even gaps."""
        return Rule(
            size=load.max_batch,
            headway=headway(load),
            window=self._window,
            rate=load.rate,
            service=load.batch_seconds(load.max_batch),
        )
