"""Day of traffic under the autoscaler: GPU-hours, share within the promise, and changes of the number of workers.

A day has some hundred million requests, too many to follow each. So arrivals are counted by the second, and what waits is a
level: it rises with what comes and falls with what the workers that serve can do in full batches. The decisions are those of
production: `core.scaling.scaler` is asked once a second with what the controller would measure.

Traffic is a recorded trace, its time scaled to the rate and repeated through the day, times a daily wave, times two for an hour
in which it doubles within a minute. What is uneven within a second comes in as its dispersion: behind the level there waits
what the formula of `core.scaling.sizing` says for it.

Where `limits.idle_after` is set, the model goes to zero and back. Who comes meanwhile is held or gets 503 by the rule of gateways.
Nobody who was sent away comes back.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from headway.core.deadlines import HELD_SHARE
from headway.core.scaling.scaler import DOWN, PLAN, RULES, UP, ModelState, ScaleLimits, Scaler
from headway.core.scaling.sizing import BatchCost, fewest_slots
from headway.errors import SettingError

DAY = 86_400
"""Seconds of a day."""
TENTHS = 10
"""Parts of a second in which the arrivals of a record are counted."""
FIRST_SECONDS = 600
"""Seconds whose counts tell how uneven arrivals are, for who does not measure."""
LEAST_RECORD = 600.0
"""Seconds of a record, repeated, before it is taken to begin again."""
WAVE = 0.6
"""Part by which the daily wave rises above its mean and falls below it."""
DOUBLES_AT, DOUBLES_WITHIN, DOUBLED_FOR = 39_600.0, 60.0, 3600.0
"""Seconds from the start of the day to the doubling, of its climb, and until it ends."""
FIXED = "fixed"
"""Policy that never changes the number: the fewest workers that keep the promise in the busiest minute."""
POLICIES = (RULES, PLAN, FIXED)
"""Policies that are compared."""
QUEUE_SECONDS = 2.0
"""Seconds of work that may wait; what comes beyond is refused."""
FEW = 20.0
"""Arrivals in a second below which their number is drawn from Poisson's distribution itself, as there are seconds without any."""


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """Order for a simulated day.

    Attributes:
        rate: mean arrivals per second before the doubling.
        cost: cost of a batch.
        promise: promised latency in seconds.
        start: seconds from asking for a worker until it serves.
        trace: recorded instants in seconds; empty for a steady rate.
        limits: bounds and rules of the autoscaler; policy and promise are replaced.
        timeout: seconds that a request may take in all.
        seed: seed of the arrivals.
    """

    rate: float
    cost: BatchCost
    promise: float
    start: float
    trace: tuple[float, ...] = ()
    limits: ScaleLimits = msgspec.field(default_factory=ScaleLimits)
    timeout: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0.0 < self.rate <= 1e6):
            raise SettingError("--rate", self.rate, "must lie between 0 and 1000000 requests/s", "For example 2000.")
        if not 0.0 <= self.start <= 3600.0:
            raise SettingError("--cold-start-s", self.start, "must lie between 0 and 3600 s", "For example 60.")
        if not 0.0 <= self.limits.idle_after <= DAY:
            option, hint = "--scale-to-zero-after-s", "For example 600."
            raise SettingError(option, self.limits.idle_after, f"must lie between 0 and {DAY} s", hint)
        if self.cost.alpha + self.cost.beta >= self.promise:
            reason = (
                f"no request is answered sooner than one batch takes, {1000 * (self.cost.alpha + self.cost.beta):g} ms"
            )
            raise SettingError("--promise", f"{self.promise * 1000:g} ms", reason, "Ask for more.")


class DayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy.

    Attributes:
        policy: RULES, PLAN or FIXED.
        gpu_hours: hours of all workers that were asked for, their starts included.
        within: share of the requests that were answered within the promise; refused ones are not.
        refused: share of the requests that were refused.
        ups, downs: changes of the number.
        most, fewest: workers at most and at least.
        utilisation: mean load over the capacity of the workers that serve.
        zero_hours: hours without a worker, starts from zero included.
        starts: starts from zero.
        held: requests that were held for such a start.
        sent_away: requests that got 503 for one; they are among the refused.
    """

    policy: str
    gpu_hours: float
    within: float
    refused: float
    ups: int
    downs: int
    most: int
    fewest: int
    utilisation: float
    zero_hours: float
    starts: int
    held: float
    sent_away: float


def simulate_day(
    day: Day,
    policy: str,
    progress: Callable[[str], None] = lambda text: None,
    traffic: tuple[Sequence[float], float] | None = None,
) -> DayReport:
    """Run one policy through the day.

    Arguments:
        day: the order.
        policy: RULES, PLAN or FIXED.
        progress: is told how far it is.
        traffic: what `day_arrivals` returns, where that is known already.
    """
    return _Run(day, policy, *(traffic or day_arrivals(day))).report(progress)


def day_arrivals(day: Day) -> tuple[list[float], float]:
    """Arrivals of each second, and their dispersion within a second."""
    rng = random.Random(day.seed)  # noqa: S311
    counts, dispersion = record_counts(day.trace, day.rate) if day.trace else ([], 1.0)
    found = []
    for second in range(DAY):
        level = (1.0 - WAVE * math.cos(2.0 * math.pi * second / DAY)) * _doubling(second)
        if counts:
            found.append(counts[second % len(counts)] * level)
        else:
            mean = day.rate * level
            found.append(_few(rng, mean) if mean < FEW else max(0.0, rng.gauss(mean, math.sqrt(mean))))
    return found, dispersion


def _few(rng: random.Random, mean: float) -> float:
    """Number from Poisson's distribution: of events that fit into one second, their gaps being exponential."""
    count, passed = 0, rng.expovariate(mean)
    while passed < 1.0:
        count, passed = count + 1, passed + rng.expovariate(mean)
    return float(count)


def record_counts(trace: Sequence[float], rate: float) -> tuple[list[int], float]:
    """Arrivals by second of a record that is sped up to a mean rate, for many laps; and the dispersion of parts of a second.

    That is the variance over the mean of the counts in tenths of a second.
    """
    laps = max(2, math.ceil(LEAST_RECORD * rate / len(trace)))
    length = len(trace) / rate
    scale = length * (1.0 - 1.0 / len(trace)) / (trace[-1] - trace[0])
    tenths = [0] * int(min(laps * length, DAY) * TENTHS)
    for lap in range(laps):
        for instant in trace:
            place = int((lap * length + (instant - trace[0]) * scale) * TENTHS)
            if place < len(tenths):
                tenths[place] += 1
    seconds = [sum(tenths[at : at + TENTHS]) for at in range(0, len(tenths) - TENTHS + 1, TENTHS)]
    within = statistics.fmean(
        statistics.pvariance(tenths[at : at + TENTHS]) for at in range(0, len(tenths) - TENTHS + 1, TENTHS)
    )
    return seconds, max(within / statistics.fmean(tenths), 1.0)


def _doubling(second: float) -> float:
    since = second - DOUBLES_AT
    if not 0.0 <= since < DOUBLED_FOR + DOUBLES_WITHIN:
        return 1.0
    return 1.0 + min(since, DOUBLES_WITHIN, DOUBLED_FOR + DOUBLES_WITHIN - since) / DOUBLES_WITHIN


class Backlog:
    """Level of what waits for a number of workers.

    Arguments:
        day: gives the cost of a batch and the promise.
        dispersion: dispersion of arrivals within a second.

    Attributes:
        waiting: requests that wait.
    """

    def __init__(self, day: Day, dispersion: float) -> None:
        self.waiting = 0.0
        self._day, self._dispersion = day, dispersion

    def serve(self, arrivals: float, workers: int) -> tuple[float, float]:
        """Serve one second. Returns how many requests of it are answered within the promise, and how many are refused."""
        capacity = workers * self._day.cost.pace
        room = max(capacity * (1.0 + QUEUE_SECONDS) - self.waiting, 0.0)
        taken = min(arrivals, room)
        before, self.waiting = self.waiting, max(0.0, self.waiting + taken - capacity)
        share = self._share((before + self.waiting) / 2.0, taken, workers, capacity)
        return taken * share, arrivals - taken

    def _share(self, waiting: float, rate: float, slots: int, capacity: float) -> float:
        """Share of what comes that is answered within the promise: it waits for what waits, and up to a gap besides."""
        cost = self._day.cost
        spare = slots - cost.beta * rate
        gap = min(cost.alpha / spare, cost.full_seconds / slots) if spare > 0.0 else cost.full_seconds / slots
        run = cost.alpha + cost.beta * min(max(rate * gap, 1.0), cost.max_batch)
        left = self._day.promise - run - waiting / capacity
        if left <= 0.0:
            return 0.0
        chance = self._dispersion * rate / (2.0 * max(capacity - rate, rate / (2.0 * QUEUE_SECONDS))) / capacity
        return _within(left, gap, chance)


class _Run:
    """One policy's run."""

    def __init__(self, day: Day, policy: str, arrivals: Sequence[float], dispersion: float) -> None:
        self._day, self._policy, self._arrivals = day, policy, arrivals
        self._backlog = Backlog(day, dispersion)
        first = arrivals[:FIRST_SECONDS]
        self._uneven = max(statistics.pvariance(first) / max(statistics.fmean(first), 1e-9), dispersion)
        self._limits = replace(day.limits, policy=PLAN if policy == PLAN else RULES, promise=day.promise)
        self._ready = self._first()
        self._scaler = Scaler(self._limits, self._ready, 0.0)
        self._coming: list[float] = []
        self._served_within = self._refused = self._offered = self._gpu_seconds = 0.0
        self._busy = self._held = self._sent_away = 0.0
        self._at_zero = self._starts = 0
        self._counts = {UP: 0, DOWN: 0}

    def _first(self) -> int:
        """Workers at the start of the day: for FIXED those of the busiest minute, else those of the first."""
        rates, day = self._arrivals, self._day
        minutes = [sum(rates[at : at + 60]) / 60 for at in range(0, DAY, 60)]
        rate = max(minutes) if self._policy == FIXED else sum(minutes[:60]) / 60 / 0.6
        found = fewest_slots(day.cost, rate, day.promise, self._uneven) or math.ceil(rate / day.cost.pace)
        return self._limits.clamp(found)

    def report(self, progress: Callable[[str], None]) -> DayReport:
        scaler = self._scaler
        most = fewest = self._ready
        measured = 0.0
        for second, arrivals in enumerate(self._arrivals):
            if second % 3600 == 0:
                progress(f"{self._policy} {second // 3600} h")
            self._step(arrivals, second)
            measured += (arrivals - measured) * 0.632  # The gateways tell an average over a second.
            if self._policy == FIXED:
                self._gpu_seconds += self._ready
                continue
            capacity = self._ready * self._day.cost.pace
            state = ModelState(
                self._ready, self._backlog.waiting, measured, capacity, self._day.cost, load=self._day.start
            )
            decision = scaler.decide(state, float(second))
            if decision is not None and decision.direction in self._counts:
                self._counts[decision.direction] += 1
                self._starts += not decision.before
                self._coming += [second + self._day.start] * (decision.desired - decision.before)
                self._ready = min(self._ready, decision.desired)
            self._gpu_seconds += scaler.desired
            most, fewest = max(most, scaler.desired), min(fewest, scaler.desired)
        return DayReport(
            policy=self._policy,
            gpu_hours=self._gpu_seconds / 3600,
            within=self._served_within / self._offered,
            refused=self._refused / self._offered,
            ups=self._counts[UP],
            downs=self._counts[DOWN],
            most=most,
            fewest=fewest,
            utilisation=self._busy / max(DAY - self._at_zero, 1),
            zero_hours=self._at_zero / 3600,
            starts=self._starts,
            held=self._held,
            sent_away=self._sent_away,
        )

    def _step(self, arrivals: float, second: float) -> None:
        """Serve one second."""
        while self._coming and self._coming[0] <= second:
            self._coming.pop(0)
            self._ready += 1
        self._offered += arrivals
        if not self._ready:
            self._wait_for_start(arrivals, second)
            return
        within, refused = self._backlog.serve(arrivals, self._ready)
        self._refused += refused
        self._served_within += within
        self._busy += min(arrivals / (self._ready * self._day.cost.pace), 1.0)

    def _wait_for_start(self, arrivals: float, second: float) -> None:
        """Hold what comes in a second at zero, or send it away."""
        self._at_zero += 1
        if (self._scaler.starts_in(second) or 0.0) <= HELD_SHARE * self._day.timeout:
            self._backlog.waiting += arrivals
            self._held += arrivals
        else:
            self._refused += arrivals
            self._sent_away += arrivals


def _within(left: float, gap: float, mean: float) -> float:
    """Probability that an even share of `gap` and an exponential part with this mean are together at most `left`."""
    if mean <= gap * 1e-3:
        return min(left / gap, 1.0)
    upto = min(left, gap)
    return (upto - mean * (math.exp(-(left - upto) / mean) - math.exp(-left / mean))) / gap
