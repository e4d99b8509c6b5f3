"""`paced`: evenly spaced departures, the default.

With a fixed batch time, "leave whenever a GPU is free" makes GPUs lock in phase, as buses bunch on a line:
one leaves full, the next nearly empty right behind it. Holding an even gap between departures needs no more
GPUs and takes the worst wait from a whole batch time to one gap. With batch time ℓ(n) = α + βn, k GPUs and
arrival rate λ, each departure carries n = λs, and k departures must fit into one batch time, k·s = α + βλs:

    s* = α / (k − βλ)

Near saturation every batch is full, and GPUs that came free together would leave together for ever, each finding
the queue that all of them left behind. There a full batch leaves only when a schedule that moves on by PACE gaps a
departure has come to it. The schedule is faster than the GPUs, so in the long run it costs none of their time; and a
batch may run ahead of it by what batch times are seen to vary, for against chance there is nothing to hold. (A leaky
bucket as a meter, the virtual scheduling of ITU-T I.371.)

The formula leaves no slack: where a batch takes longer the more it holds, one that chance has made large comes back late,
the next leaves larger still, and gaps bunch again. So no gap is shorter than ℓ(n)/k for the largest batch n on a GPU. That
is the pace at which GPUs come back while chance lasts, and s* again when it is over.

In bursts, the gap since the last departure says little: the first request of a burst would take a GPU for itself, and
the rest wait. So one that comes late in a gap in which others were due is given a gap of its own to gather a batch,
unless again nobody follows. Poisson arrivals hardly notice.

Holding control against bunching is from public transport (Daganzo, "A headway-based approach to eliminate
bus bunching", Transportation Research B 43, 2009); the formula for batch servers is ours.
"""

from __future__ import annotations

import math

from headway.core.departure import Load, Rule

WORTH_SPACING = 1.0
"""Expected arrivals in a gap (λα/k) below which there is nothing to space, so that a lone request leaves at once."""

SATURATED = 0.8
"""Share of the GPUs' capacity in use above which full batches are spaced, too."""
PACE = 0.95
"""Gaps by which each departure moves the schedule of full batches on; below 1, so that it never limits throughput."""
TOLERANCE = 0.0625
"""Gaps that a full batch may be ahead of that schedule."""
TOLERANCE_DEVIATIONS = 4.0
"""Standard deviations of the batch time that a full batch may be ahead besides."""
SILENCE = 3.0
"""Mean gaps between arrivals after which a silence is no chance any more: of Poisson gaps, 5 % are longer."""


def headway(load: Load) -> float:
    """The even gap s* in seconds; 0 when arrivals are too few for a gap to gather a second entry."""
    if load.slots <= 0 or load.rate * load.alpha / load.slots < WORTH_SPACING:
        return 0.0
    saturated = load.batch_seconds(load.max_batch) / load.slots
    spare = load.slots - load.beta * load.size_rate
    return min(load.alpha / spare, saturated) if spare > 0.0 else saturated


class Paced:
    """Spaces departures by the headway. `max_wait` in seconds bounds the wait further; None leaves it to the gap."""

    def __init__(self, max_wait: float | None = None) -> None:
        self._window = math.inf if max_wait is None else max_wait

    def rule(self, load: Load) -> Rule:
        """Rule at this load: leave full at the largest batch, otherwise at even gaps."""
        gap = headway(load)
        service = load.batch_seconds(load.max_batch)
        silence = SILENCE / load.rate if gap > 0.0 else 0.0
        saturated = load.slots > 1 and load.size_rate * service > SATURATED * load.slots * load.max_batch
        return Rule(
            size=load.max_batch,
            headway=gap,
            gap_fixed=load.alpha / load.slots if gap > 0.0 else 0.0,
            gap_each=load.beta / load.slots if gap > 0.0 else 0.0,
            window=self._window,
            rate=load.rate,
            service=service,
            pace=PACE * gap if saturated else 0.0,
            tolerance=TOLERANCE * gap + TOLERANCE_DEVIATIONS * load.deviation if saturated else math.inf,
            gather=max(0.0, gap - silence),
            quiet=silence,
        )
