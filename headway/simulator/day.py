"""A day of traffic under the autoscaler: GPU-hours, share within the promise, and changes of the number of workers.

A day has hundreds of millions of requests, too many to follow each. So arrivals are counted per second, and the backlog is a level,
which rises with arrivals and falls with what the workers do in full batches. The decisions are production's: `core.scaling.scaler`
is asked once a second, with what the controller would measure.

Traffic is a recorded trace, scaled to the rate and repeated through the day, times a daily wave, times two for an hour in which it
doubles within a minute. Within a second, arrivals are only known by their dispersion, from which the formula of
`core.scaling.sizing` estimates a further wait.

With `limits.idle_after`, the model goes to zero workers and back. Requests that come meanwhile are held or get 503, by the rule of
gateways. Whoever gets 503 doesn't come back."""

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
TENTHS = 10  # Parts of a second in which a record's arrivals are counted.
FIRST_SECONDS = 600  # Seconds from whose counts FIXED and PLAN learn how uneven arrivals are.
LEAST_RECORD = 600.0  # Seconds to which a shorter record is repeated before it is counted.
WAVE = 0.6  # Amplitude of the daily wave, as a share of its mean.
# When the rate doubles, how long it climbs, and how long it stays, in seconds.
DOUBLES_AT, DOUBLES_WITHIN, DOUBLED_FOR = 39_600.0, 60.0, 3600.0
FIXED = "fixed"  # Policy that never changes the number: the fewest workers that keep the promise in the busiest minute.
POLICIES = (RULES, PLAN, FIXED)  # Policies to compare.
QUEUE_SECONDS = 2.0  # Seconds of work that may wait. What comes beyond is refused.
FEW = 20.0  # Arrivals per second below which they are drawn from the Poisson distribution itself, with empty seconds.


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a day to simulate. Times are in seconds. Policy and promise of the limits are replaced."""

    rate: float  # Mean arrivals per second before the doubling.
    cost: BatchCost
    promise: float  # Promised latency.
    start: float  # Time until a new worker serves.
    trace: tuple[float, ...] = ()  # Recorded times; empty for a steady rate.
    limits: ScaleLimits = msgspec.field(default_factory=ScaleLimits)
    timeout: float = 4.0  # Longest overall time of a request.
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0.0 < self.rate <= 1e6):
            raise SettingError("--rate", self.rate, "must lie between 0 and 1000000 requests/s", "For example 2000.")
        if not 0.0 <= self.start <= 3600.0:
            raise SettingError("--cold-start-s", self.start, "must lie between 0 and 3600 s", "For example 60.")
        if not 0.0 <= self.limits.idle_after <= DAY:
            option, hint = "--scale-to-zero-after-s", "For example 600."
            raise SettingError(option, self.limits.idle_after, f"must lie between 0 and {DAY} s", hint)
        least = self.cost.alpha + self.cost.beta
        if least >= self.promise:
            reason = f"no request is answered sooner than one batch takes, {1000 * least:g} ms"
            raise SettingError("--promise", f"{self.promise * 1000:g} ms", reason, "Ask for more.")


class DayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy: RULES, PLAN or FIXED."""

    policy: str
    gpu_hours: float  # Hours of all workers, their starts included.
    within: float  # Share of the requests answered within the promise.
    refused: float  # Share of the requests that were refused.
    ups: int  # Changes of the number of workers, which lies between `fewest` and `most`.
    downs: int
    most: int
    fewest: int
    utilisation: float  # Mean load divided by the capacity of the workers that serve.
    zero_hours: float  # Hours without a worker, starts from zero included.
    starts: int  # Starts from zero.
    held: float  # Requests that were held for such a start.
    sent_away: float  # Requests that got 503 for such a start. They count as refused.


def simulate_day(
    day: Day, policy: str, progress: Callable[[str], None] = lambda text: None,
    traffic: tuple[Sequence[float], float] | None = None,
) -> DayReport:  # fmt: skip
    """Run one policy, RULES, PLAN or FIXED, through the day. `progress` is called with a text on how far it is. `traffic` is the
    result of `day_arrivals`, if it is known already."""
    arrivals, dispersion = traffic or day_arrivals(day)
    return _Run(day, policy, arrivals, dispersion).report(progress)


def day_arrivals(day: Day) -> tuple[list[float], float]:
    """Return the arrivals of each second, and their dispersion within a second."""
    rng = random.Random(day.seed)  # noqa: S311
    counts, dispersion = record_counts(day.trace, day.rate) if day.trace else ([], 1.0)
    seconds = []
    for second in range(DAY):
        level = (1.0 - WAVE * math.cos(2.0 * math.pi * second / DAY)) * _doubling(second)
        if counts:
            seconds.append(counts[second % len(counts)] * level)
        else:
            mean = day.rate * level
            seconds.append(_few(rng, mean) if mean < FEW else max(0.0, rng.gauss(mean, math.sqrt(mean))))
    return seconds, dispersion


def _few(rng: random.Random, mean: float) -> float:
    """Draw from the Poisson distribution, by counting events with exponential gaps within a second."""
    count, passed = 0, rng.expovariate(mean)
    while passed < 1.0:
        count, passed = count + 1, passed + rng.expovariate(mean)
    return float(count)


def record_counts(trace: Sequence[float], rate: float) -> tuple[list[int], float]:
    """Return the arrivals by second of a record, sped up to `rate` and repeated, and their dispersion in tenths of a second."""
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
    """Backlog in front of the workers, given the dispersion of arrivals within a second."""

    def __init__(self, day: Day, dispersion: float) -> None:
        self.waiting = 0.0
        self._day, self._dispersion = day, dispersion

    def serve(self, arrivals: float, workers: int) -> tuple[float, float]:
        """Serve the arrivals of one second. Return how many of them are answered within the promised time, and how many
        are refused."""
        capacity = workers * self._day.cost.pace
        room = max(capacity * (1.0 + QUEUE_SECONDS) - self.waiting, 0.0)
        accepted = min(arrivals, room)
        before, self.waiting = self.waiting, max(0.0, self.waiting + accepted - capacity)
        share = self._share((before + self.waiting) / 2.0, accepted, workers, capacity)
        return accepted * share, arrivals - accepted

    def _share(self, waiting: float, rate: float, slots: int, capacity: float) -> float:
        """Return the share of arrivals that are answered within the promised time. Each arrival waits for the backlog
        to clear, plus up to one gap."""
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
        """Return the number of workers at the start of the day. For FIXED it is enough for the busiest minute.
        Otherwise it is enough for the first hour."""
        rates, day = self._arrivals, self._day
        minutes = [sum(rates[at : at + 60]) / 60 for at in range(0, DAY, 60)]
        rate = max(minutes) if self._policy == FIXED else sum(minutes[:60]) / 60 / 0.6
        workers = fewest_slots(day.cost, rate, day.promise, self._uneven) or math.ceil(rate / day.cost.pace)
        return self._limits.clamp(workers)

    def report(self, progress: Callable[[str], None]) -> DayReport:
        scaler = self._scaler
        most = fewest = self._ready
        measured = 0.0
        for second, arrivals in enumerate(self._arrivals):
            if second % 3600 == 0:
                progress(f"{self._policy} {second // 3600} h")
            self._step(arrivals, second)
            measured += (arrivals - measured) * 0.632  # Gateways report an average over about a second.
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
            policy=self._policy, gpu_hours=self._gpu_seconds / 3600, within=self._served_within / self._offered,
            refused=self._refused / self._offered, ups=self._counts[UP], downs=self._counts[DOWN], most=most, fewest=fewest,
            utilisation=self._busy / max(DAY - self._at_zero, 1), zero_hours=self._at_zero / 3600, starts=self._starts,
            held=self._held, sent_away=self._sent_away,
        )  # fmt: skip

    def _step(self, arrivals: float, second: float) -> None:
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
        """Hold the requests of a second without workers, or send them away."""
        self._at_zero += 1
        if (self._scaler.starts_in(second) or 0.0) <= HELD_SHARE * self._day.timeout:
            self._backlog.waiting += arrivals
            self._held += arrivals
        else:
            self._refused += arrivals
            self._sent_away += arrivals


def _within(left: float, gap: float, mean: float) -> float:
    """Return the probability that a uniform part up to `gap` and an exponential part with `mean` add up to at most `left`."""
    if mean <= gap * 1e-3:
        return min(left / gap, 1.0)
    upto = min(left, gap)
    return (upto - mean * (math.exp(-(left - upto) / mean) - math.exp(-left / mean))) / gap
