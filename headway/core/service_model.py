"""Cost and arrival rate of a model, learnt online.

The cost ℓ(n) = α + βn is fitted by exponentially weighted least squares; λ is an exponentially weighted rate. When a worker
starts, warm-up batches measure the cost, from one input to the largest batch allowed:

    one input, cold ──▶ one input ──▶ … ──▶ the largest batch ──▶ the largest batch again

The first run, and the first of each size, may load and compile things that later runs reuse, so neither shows how long a batch takes.
A larger batch is assumed to take at most proportionally longer, and isn't run if it may not fit into the remaining time. A run that
takes far longer than predicted is repeated, and its excess time isn't counted, because the machine may have stalled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import exp

DECAY = 0.98  # Factor by which the past fades at each new batch, so that about the last 50 count.
RATE_TIME = 1.0  # Time constant of the arrival rate in seconds.
MOST_TIMES = 30.0  # Number of time constants after which the sum of arrivals gets a new base time.
LEAST_SEEN = 0.001  # Least share of the past that counts as seen, so that two simultaneous arrivals aren't a flood.
REACH = 2.0  # The line is trusted up to this multiple of the largest recent batch. Beyond that it is flat.
NORMAL = 1.25  # Ratio of a normal distribution's standard deviation to its mean distance from the mean: √(π/2).
STRAY = 2.0  # A much slower batch counts as this multiple of the expected time, unless the previous one was as slow.
FASTER = 8  # If this many batches in a row are more than STRAY times as fast as expected, the model is faster now.
FORGETTING = 0.5  # Factor by which the past then fades at each further fast batch.
STRAY_DEVIATIONS = 4.0  # A batch within this many standard deviations of the expected run time is no stray.
KNOWN = 8.0  # Weight of past batches needed to recognise a stray.
SPREAD = 0.5  # Variance of batch sizes needed to fit a slope. Below it, the last slope is kept.


class ServiceModel:
    """Run time of a batch as a linear function of its size, by weighted normal equations with forgetting factor DECAY
    (recursive least squares; Ljung, "System Identification", §11.2). Neither coefficient is negative, so no batch gets faster
    as it grows.

    Far beyond the sizes seen so far, the line means nothing, so `seconds` stays flat there. Otherwise one slow small batch
    could predict many seconds for a full batch. Admission would then refuse all but a trickle, and no larger batch would ever
    correct it."""

    __slots__ = ("_l", "_n", "_nl", "_nn", "_off", "_strays", "_w", "alpha", "beta", "deviation", "largest")

    def __init__(self) -> None:
        self._strays = 0  # 1 after a stray; otherwise minus the number of latest batches that were much too fast.
        self._w = self._n = self._l = self._nn = self._nl = self._off = 0.0
        self.largest = 0.0  # Largest batch seen, slowly forgotten.
        self.alpha = 0.0  # Fixed part in seconds.
        self.beta = 0.0  # Seconds per unit of size, which is an entry unless entries are weighed.
        # Standard deviation in seconds of the run times around the line, computed from their mean distance. A single stray batch
        # affects that far less than the mean square (Jacobson, "Congestion avoidance and control", SIGCOMM 1988).
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
        """Return the seconds to learn from a batch. One batch that takes far too long counts as an accident, two in a row as a change."""
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
        """Time per unit of size, relative to the fixed part of a batch: β/α; 0 before the first batch."""
        if self.alpha > 0.0:
            return self.beta / self.alpha
        return math.inf if self.beta > 0.0 else 0.0

    def seconds(self, size: float) -> float:
        """Return the expected run time of a batch of `size`; 0 before the first batch."""
        return self.alpha + self.beta * min(size, self.largest * REACH)


class ArrivalRate:
    """Entries per second, with exponential forgetting. `time_constant` (τ) is in seconds. Each arrival adds 1/τ to a sum that decays
    as exp(−t/τ). The sum starts at 0, so it is divided by the share of the past that was seen, 1 − exp(−age/τ), as in Adam
    (Kingma and Ba, 2015). The sum is stored as it was at a base time, and an arrival t later adds exp(t/τ) to it, so that no
    arrival has to update the decay."""

    __slots__ = ("_base", "_began", "_next_base", "_sum", "_tau")

    def __init__(self, time_constant: float = RATE_TIME) -> None:
        self._tau = time_constant
        self._sum = 0.0
        self._base = 0.0
        self._began: float | None = None
        self._next_base = -math.inf  # Time at which the base moves; otherwise the sum would grow without limit.

    def observe(self, count: int, now: float) -> None:
        """Count arrivals at time `now`. The first call only starts the clock, because one point in time doesn't make a rate."""
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
        """Return the rate as if the first arrival came after a long silence, so that a first burst isn't taken for a lasting flood."""
        return self._sum * exp(min(self._base - now, 0.0) / self._tau) / self._tau

    def _move_base(self, now: float) -> None:
        if self._began is None:
            self._began = now
        self._sum *= exp(min(self._base - now, 0.0) / self._tau)
        self._base = now
        self._next_base = now + MOST_TIMES * self._tau


WarmUpRun = tuple[int, float]  # Size of a batch, and its run time in seconds.

BUDGET = 10.0  # Limit in seconds on the predicted time of all runs after the first.

FAR = 3.0  # A run is repeated if it takes at least this multiple of the predicted time,
LEAST_STOP = 0.5  # and at least this many seconds longer than predicted.


def next_size(runs: Sequence[WarmUpRun], most: int) -> int | None:
    """Return the size of the next warm-up batch, up to `most`, given all batches so far. None if the warm-up is finished."""
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
    """Return the sizes of the runs after the first, ascending, each with its shortest time."""
    best: dict[int, float] = {}
    for size, seconds in runs[1:]:
        best[size] = min(seconds, best.get(size, seconds))
    return tuple(sorted(best.items()))


def _foreseen(runs: Sequence[WarmUpRun], at: int) -> float:
    size = runs[at][0]
    return min((seconds * size / before for before, seconds in runs[:at] if before <= size), default=math.inf)


def _stood_still(runs: Sequence[WarmUpRun], at: int) -> bool:
    """Return True if a run took far longer than predicted, and is the first of its size, not counting the cold run."""
    (size, seconds), foreseen = runs[at], _foreseen(runs, at)
    first = all(before != size for before, _ in runs[1:at])
    return first and seconds > max(FAR * foreseen, foreseen + LEAST_STOP)
