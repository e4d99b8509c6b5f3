"""Simulates a day of traffic with the autoscaler: GPU-hours, answers within the promise, and changes of the number of workers.

A day has too many requests to follow each one. So arrivals are counted per second, and the backlog is a number that rises with
arrivals and falls by what the workers can do in full batches. The production code decides: `core.scaling.scaler` is called once a
second with what the controller would measure.

The traffic is a recorded trace, scaled to the rate and repeated all day, multiplied by a daily wave. For one hour it is doubled.
Within a second, only the dispersion of arrivals is known, from which the formula of `core.scaling.sizing` estimates an extra wait.

With `limits.idle_after`, the model is scaled to zero workers and back. Requests that arrive while there are no workers are held or
get 503, by the same rule as in gateways. Clients that get 503 don't retry."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from headway.config.fields import check_within
from headway.core.arrivals import poisson
from headway.core.deadlines import HELD_SHARE
from headway.core.scaling.scaler import DOWN, PLAN, RULES, UP, ModelState, ScaleLimits, Scaler
from headway.core.scaling.sizing import BatchCost, fewest_slots
from headway.errors import SettingError

DAY = 86_400
TENTHS = 10  # Parts of a second in which the arrivals of a trace are counted.
FIRST_SECONDS = 600  # Seconds from which FIXED and PLAN learn how uneven arrivals are.
LEAST_RECORD = 600.0  # A shorter trace is repeated up to this many seconds before its arrivals are counted.
WAVE = 0.6  # Amplitude of the daily wave, as a share of its mean.
DOUBLES_AT, DOUBLES_WITHIN, DOUBLED_FOR = 39_600.0, 60.0, 3600.0  # Start, rise and length of the doubling in seconds.
FIXED = "fixed"  # Policy with a constant number: the fewest workers that keep the promise in the busiest minute.
POLICIES = (RULES, PLAN, FIXED)  # Policies to compare.
QUEUE_SECONDS = 2.0  # Seconds of work that may be waiting. Anything more is refused.
FEW = 20.0  # Arrivals per second below which they are drawn from an exact Poisson distribution, with empty seconds.


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """A day to simulate. Times are in seconds. `policy` and `promise` of the limits are ignored."""

    rate: float  # Mean arrivals per second, without the doubling.
    cost: BatchCost
    promise: float  # Promised latency.
    start: float  # Time that a new worker takes to start.
    trace: tuple[float, ...] = ()  # Recorded arrival times; empty for a steady rate.
    limits: ScaleLimits = msgspec.field(default_factory=ScaleLimits)
    timeout: float = 4.0  # Longest total time of a request.
    seed: int = 0

    def __post_init__(self) -> None:
        check_within("--rate", self.rate, 0.001, 1_000_000, "requests/s")
        check_within("--cold-start-s", self.start, 0, 3600, "s")
        check_within("--scale-to-zero-after-s", self.limits.idle_after, 0, DAY, "s")
        least = self.cost.alpha + self.cost.beta
        if least >= self.promise:
            reason = f"no request is answered sooner than one batch takes, {1000 * least:g} ms"
            raise SettingError("--promise", f"{self.promise * 1000:g} ms", reason, "Choose a larger value.")


class DayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one policy: RULES, PLAN or FIXED."""

    policy: str
    gpu_hours: float  # Hours of all workers, including their start times.
    within: float  # Share of the requests answered within the promise.
    refused: float  # Share of the requests that were refused.
    ups: int  # How often the number of workers rose; it was between `fewest` and `most`.
    downs: int  # How often it fell.
    most: int
    fewest: int
    utilisation: float  # Mean load divided by the capacity of the running workers.
    zero_hours: float  # Hours without a worker, including starts from zero.
    starts: int  # Starts from zero.
    held: float  # Requests that were held for such a start.
    sent_away: float  # Requests that got 503 during such a start. They count as refused.


def simulate_day(
    day: Day, policy: str, progress: Callable[[str], None] = lambda text: None,
    traffic: tuple[Sequence[float], float] | None = None,
) -> DayReport:  # fmt: skip
    """Simulate a day with the policy RULES, PLAN or FIXED. `traffic` is the result of `day_arrivals`, if already known."""
    arrivals, dispersion = traffic or day_arrivals(day)
    return _Run(day, policy, arrivals, dispersion).report(progress)


def day_arrivals(day: Day) -> tuple[list[float], float]:
    """Return the number of arrivals in each second, and their dispersion within a second."""
    rng = random.Random(day.seed)  # noqa: S311
    counts, dispersion = record_counts(day.trace, day.rate) if day.trace else ([], 1.0)
    seconds = []
    for second in range(DAY):
        level = (1.0 - WAVE * math.cos(2.0 * math.pi * second / DAY)) * _doubling(second)
        if counts:
            seconds.append(counts[second % len(counts)] * level)
        elif (mean := day.rate * level) < FEW:
            seconds.append(float(sum(1 for _ in takewhile((1.0).__gt__, poisson(mean, rng)))))
        else:
            seconds.append(max(0.0, rng.gauss(mean, math.sqrt(mean))))
    return seconds, dispersion


def record_counts(trace: Sequence[float], rate: float) -> tuple[list[int], float]:
    """Repeat a trace at a given rate. Return the number of arrivals in each second, and their dispersion within a second."""
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
    """Backlog of requests. `dispersion` is the dispersion of arrivals within a second."""

    def __init__(self, day: Day, dispersion: float) -> None:
        self.waiting = 0.0
        self._day, self._dispersion = day, dispersion

    def serve(self, arrivals: float, workers: int) -> tuple[float, float]:
        """Serve the arrivals of one second. Returns how many are answered within the promise, and how many are refused."""
        capacity = workers * self._day.cost.pace
        room = max(capacity * (1.0 + QUEUE_SECONDS) - self.waiting, 0.0)
        accepted = min(arrivals, room)
        before, self.waiting = self.waiting, max(0.0, self.waiting + accepted - capacity)
        share = self._share((before + self.waiting) / 2.0, accepted, workers, capacity)
        return accepted * share, arrivals - accepted

    def _share(self, waiting: float, rate: float, slots: int, capacity: float) -> float:
        """Return the share of arrivals answered within the promise. An arrival waits until the backlog has cleared, then up to
        one `gap` until a batch starts, and longer by chance."""
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
        """Return the number of workers at the start of the day: enough for the busiest minute if FIXED, else for the first hour."""
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
        self._at_zero += 1
        if (self._scaler.starts_in(second) or 0.0) <= HELD_SHARE * self._day.timeout:
            self._backlog.waiting += arrivals
            self._held += arrivals
        else:
            self._refused += arrivals
            self._sent_away += arrivals


def _within(left: float, gap: float, mean: float) -> float:
    """Return the probability that the sum of a uniform variable up to `gap` and an exponential one with `mean` is at most `left`."""
    if mean <= gap * 1e-3:
        return min(left / gap, 1.0)
    upto = min(left, gap)
    return (upto - mean * (math.exp(-(left - upto) / mean) - math.exp(-left / mean))) / gap
