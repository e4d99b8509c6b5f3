"""Cost and arrival rate of a model, learnt online.

ℓ(n) = α + βn by exponentially weighted least squares, λ by an exponentially weighted rate.

When a worker starts, warm-up batches measure the cost: a batch of one input, and a batch of as many as it may hold.

    one input, cold ──▶ one input ──▶ … ──▶ the largest batch ──▶ the largest batch again

The first run may load and compile things that later runs reuse, and so may the first of each size. Neither shows how long a batch
takes. A batch is assumed to take at most proportionally longer, and isn't run if that may not fit into the remaining time. Small
steps then lead as far up as time allows. A run that takes far longer than predicted is run once more, as its machine may have
stalled, and the excess isn't counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import exp

DECAY = 0.98  # Weight of the past at each new batch, so that about the last 50 count.
RATE_TIME = 1.0  # Time constant of the arrival rate, seconds.
MOST_TIMES = 30.0  # Time constants after which the sum of arrivals gets a new base instant.
LEAST_SEEN = 0.001  # Smallest share of the past that counts as seen, so that two first arrivals at once aren't a flood.
REACH = 2.0  # Multiple of the largest recent batch up to which the line is trusted. Beyond, it is level.
NORMAL = 1.25  # Standard deviations in a mean distance, for a normal distribution: √(π/2).
STRAY = 2.0  # A much slower batch counts as so many times the expected run time, unless the previous batch was as slow.
FASTER = 8  # Batches in a row, each faster than expected by more than STRAY, after which the model has become faster.
# Weight of the past at each further batch that is faster than expected. A wrong pace holds batches back, so that there is ever less to learn from.
FORGETTING = 0.5
STRAY_DEVIATIONS = 4.0  # Standard deviations from the expected run time within which no batch is a stray.
KNOWN = 8.0  # Weight of past batches needed to recognise a stray.
SPREAD = 0.5  # Minimum variance of batch sizes from which a slope is read. Below it the last slope is kept.


class ServiceModel:
    """Run time of a batch as a line in its size.

    Weighted normal equations with forgetting factor DECAY (recursive least squares; Ljung, "System Identification", §11.2). Both
    coefficients are kept at or above 0, so that noise cannot predict a batch that gets faster as it grows. Far beyond the sizes
    seen the line says nothing, so `seconds` stays level there. Otherwise two small batches, one of them slow by accident, could
    predict a full batch of many seconds. Admission would refuse all but a trickle, and no larger batch would ever correct it."""

    __slots__ = ("_l", "_n", "_nl", "_nn", "_off", "_strays", "_w", "alpha", "beta", "deviation", "largest")

    def __init__(self) -> None:
        self._strays = 0  # 1 after a stray; otherwise minus the number of last batches much faster than expected.
        self._w = self._n = self._l = self._nn = self._nl = self._off = 0.0
        self.largest = 0.0  # Largest batch seen, slowly forgotten.
        self.alpha = 0.0  # Fixed part in seconds.
        self.beta = 0.0  # Seconds for each unit of size, which is an entry unless entries are weighed.
        # Standard deviation in seconds of the run times around the line, from their mean distance, which one stray batch sways far
        # less than it does the mean square (Jacobson, "Congestion avoidance and control", SIGCOMM 1988).
        self.deviation = 0.0

    def warm_up(self, runs: Iterable[WarmUpRun]) -> None:
        if self.largest == 0.0:
            for size, seconds in runs:
                self.observe(size, seconds)

    def observe(self, size: float, seconds: float) -> None:
        """Learn from one finished batch of `size` that held its slot for `seconds`."""
        seconds = self._tamed(size, seconds)
        decay = DECAY if self._strays > -FASTER else FORGETTING
        self.largest = max(size, self.largest * DECAY)
        self._w = self._w * decay + 1.0
        self._n = self._n * decay + size
        self._l = self._l * decay + seconds
        self._nn = self._nn * decay + size * size
        self._nl = self._nl * decay + size * seconds
        mean_n, mean_l = self._n / self._w, self._l / self._w
        variance = self._nn / self._w - mean_n * mean_n
        if variance > SPREAD:
            self.beta = max(0.0, (self._nl / self._w - mean_n * mean_l) / variance)
        self.alpha = mean_l - self.beta * mean_n
        if self.alpha < 0.0:
            self.alpha, self.beta = 0.0, mean_l / mean_n
        self._off = self._off * decay + abs(seconds - self.alpha - self.beta * size)
        self.deviation = NORMAL * self._off / self._w

    def _tamed(self, size: float, seconds: float) -> float:
        """Return the seconds that a batch counts as. A batch that takes far too long is an accident, two in a row are a change."""
        expected = self.seconds(size)
        if STRAY * seconds < expected:
            self._strays = min(self._strays, 0) - 1
            return seconds
        most = STRAY * expected
        if seconds <= most or self._w < KNOWN or seconds <= (wide := expected + STRAY_DEVIATIONS * self.deviation):
            self._strays = 0
            return seconds
        alone, self._strays = self._strays <= 0, 1
        return max(most, wide) if alone else seconds

    @property
    def each(self) -> float:
        """Time of a unit of size relative to the fixed part of a batch: β/α; 0 before the first batch."""
        if self.alpha > 0.0:
            return self.beta / self.alpha
        return math.inf if self.beta > 0.0 else 0.0

    def seconds(self, size: float) -> float:
        """Return the expected run time of a batch of `size`; 0 before the first batch."""
        return self.alpha + self.beta * min(size, self.largest * REACH)


class ArrivalRate:
    """Entries per second, forgetting with time constant `time_constant` seconds.

    Each arrival adds 1/τ to a sum that decays as exp(−t/τ). The sum starts at 0, so it is divided by the share of the past that has
    been seen, 1 − exp(−age/τ), as Adam's moments are (Kingma and Ba, 2015). The sum is kept as it was at a base instant, and a
    later arrival adds exp(t/τ) to it, so that arrivals need not decay it."""

    __slots__ = ("_base", "_began", "_next_base", "_sum", "_tau")

    def __init__(self, time_constant: float = RATE_TIME) -> None:
        self._tau = time_constant
        self._sum = 0.0
        self._base = 0.0
        self._began: float | None = None
        self._next_base = -math.inf  # Instant at which the base moves, since the sum would grow without bound.

    def observe(self, count: int, now: float) -> None:
        """Count arrivals at instant `now`. The first only starts the clock, as one instant doesn't make a rate."""
        if now >= self._next_base:
            if self._began is None:
                count -= 1
            self._move_base(now)
        self._sum += count * exp((now - self._base) / self._tau)

    def observe_each(self, instants: Sequence[float]) -> None:
        if instants[-1] >= self._next_base:
            for now in instants:
                self.observe(1, now)
            return
        base, tau = self._base, self._tau
        self._sum += sum(map(exp, [(now - base) / tau for now in instants]))

    def at(self, now: float) -> float:
        if self._began is None or now >= self._next_base:
            self._move_base(now)
        if self._sum == 0.0:
            return 0.0
        began = now if self._began is None else self._began
        seen = 1.0 - exp(min(began - now, 0.0) / self._tau)
        return self._sum * exp(min(self._base - now, 0.0) / self._tau) / self._tau / max(seen, LEAST_SEEN)

    def after_rest(self, now: float) -> float:
        """Return the rate as if a long silence preceded the first arrival, so that a first burst isn't taken for a lasting
        flood."""
        return self._sum * exp(min(self._base - now, 0.0) / self._tau) / self._tau

    def _move_base(self, now: float) -> None:
        if self._began is None:
            self._began = now
        self._sum *= exp(min(self._base - now, 0.0) / self._tau)
        self._base = now
        self._next_base = now + MOST_TIMES * self._tau


WarmUpRun = tuple[int, float]  # Size of a batch, and its run time in seconds.

BUDGET = 10.0  # Limit in seconds on all runs after the first, as predicted.

FAR = 3.0  # Multiple of the predicted time from which a run is repeated.
LEAST_STOP = 0.5  # Seconds beyond the prediction that it must take, too.


def next_size(runs: Sequence[WarmUpRun], most: int) -> int | None:
    """Return the size of the next warm-up batch, up to `most`, given all batches so far; None to end the warm-up."""
    if not runs:
        return 1
    took = [_foreseen(runs, at) if _stood_still(runs, at) else runs[at][1] for at in range(1, len(runs))]
    left = BUDGET - sum(took)
    if len(runs) == 1:
        return 1 if runs[0][1] <= left else None
    if _stood_still(runs, len(runs) - 1):
        return runs[-1][0]
    largest = max(size for size, _ in runs)
    seconds = min(seconds for size, seconds in runs[1:] if size == largest)
    if largest < most:
        fits = most if seconds <= 0.0 else int(min(largest * left / seconds, most))
        return fits if fits > largest else None
    again = most > 1 and [size for size, _ in runs].count(most) == 1
    return most if again and seconds <= left else None


def measured(runs: Sequence[WarmUpRun]) -> tuple[WarmUpRun, ...]:
    """Return the sizes of runs after the first, ascending, each with its shortest time."""
    best: dict[int, float] = {}
    for size, seconds in runs[1:]:
        best[size] = min(seconds, best.get(size, seconds))
    return tuple(sorted(best.items()))


def _foreseen(runs: Sequence[WarmUpRun], at: int) -> float:
    size = runs[at][0]
    return min((seconds * size / before for before, seconds in runs[:at] if before <= size), default=math.inf)


def _stood_still(runs: Sequence[WarmUpRun], at: int) -> bool:
    """Return True if a run, the first of its size after the cold one, took far longer than predicted."""
    (size, seconds), foreseen = runs[at], _foreseen(runs, at)
    first = all(before != size for before, _ in runs[1:at])
    return first and seconds > max(FAR * foreseen, foreseen + LEAST_STOP)
