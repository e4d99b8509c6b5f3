"""Scaler of one model: computes from measurements how many workers it should have.

    policy `rules`   each rule whose condition has held for its time changes the number
    policy `plan`    the fewest workers that keep the promised latency under the forecast load (`sizing`), with room

Both respect the same limits. Requested workers count as coming until they are late, so that a shortage is answered only once. Late workers
no longer count, and are requested again. Drained workers are part of the number, but neither ready nor coming, so replacements are
requested as far as the limits allow. Workers are removed only after the time of the rule (or that of `plan`) has passed without a change,
and only if none of them was wanted in that time. At most a fifth of the workers is removed at a time, but at least one, and never so many
that the load would bring some back.

With `idle_after`, a model that has had no requests for that time has no worker until the next request. The time of a start
doesn't count, unless loading failed, so that a client that was told to come back finds a worker. While bulk lines are waiting,
a model that has workers keeps at least one. A model without workers gets one back for its bulk lines, but not until its last
change is as long ago as a start takes."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from headway.core.scaling.rules import QUEUE_ABOVE, USUAL, UTILISATION_ABOVE, ScaleRule
from headway.core.scaling.sizing import MOST_SLOTS, BatchCost, fewest_slots

RULES, PLAN = "rules", "plan"  # Policies.
UP, DOWN, AGAIN = "up", "down", "again"
DIRECTIONS = (UP, DOWN, AGAIN)  # More workers, fewer, or the same number again because requested workers didn't come.
AS_FOUND = "as it was found"  # Reason before the first decision.
MOST_REMOVED = 0.2  # Largest share of the workers that may be removed at a time.
ROOM = 0.8  # Share of the capacity that `plan` aims to use. The rest absorbs growth while workers start.
SPARE = 0.05  # `plan` removes workers only if fewer would be enough for a load that is higher by this share.
PLAN_HOLDS = 5.0  # Seconds for which `plan` must want more workers before it requests them.
PLAN_KEEPS = 300.0  # Seconds (or a start time, if longer) for which a worker must have been unneeded to be removed.
FIRST_START = 60.0  # Assumed start time of a worker in seconds until one has been seen.
ASKED = 0.05  # If fewer entries per second come on average, none has come for a few seconds.
FADING = 0.8  # Weight of an earlier, longer start in the expected start time after a shorter one.

SMOOTH_SECONDS = 5.0  # Time constant of the smoothed rate, and the smallest time constant of the level.
MOST_SMOOTH_SECONDS = 30.0  # Largest time constant of the level.
SMOOTH_SHARE = 0.5  # Time constant of the level in start times. A peak that ends before a worker comes isn't worth one.
NOTED_EVERY = 5.0  # Seconds between two levels that are kept for the trend.
LONGEST_TREND = 900.0  # Longest time in seconds over which a trend is observed.
DAMPING = 0.5  # Share of the trend that is believed, because most climbs end.
APART = 2.0  # Seconds between samples that count as independent. Each is an average over about one second.
SAMPLE_SECONDS = 2.0  # Seconds of arrivals that a sample stands for: twice the time constant of its average.
DISPERSION_SECONDS = 120.0  # Time constant of the dispersion.
MOST_DISPERSION = 400.0  # Limit on the dispersion of one sample. Larger bursts aren't worth a fleet of their size.


class ScaleLimits(msgspec.Struct, frozen=True):
    """Limits and times for one model's scaler."""

    policy: str = RULES  # RULES or PLAN.
    least: int = 1  # Minimum number of workers, at least 1. `idle_after` may still remove all.
    most: int = MOST_SLOTS
    rules: tuple[ScaleRule, ...] = USUAL  # Rules of the policy RULES.
    start_within: float = 600.0  # Seconds for which a requested worker counts as coming.
    promise: float = 0.2  # Promised 95th percentile of latency in seconds, for PLAN.
    idle_after: float = 0.0  # Seconds without a request after which a model has no worker. If 0, it always has one.

    def clamp(self, workers: int) -> int:
        return max(self.least, min(workers, self.most))


class ModelState(msgspec.Struct, frozen=True):
    """Measurements for a model."""

    ready: int  # Healthy workers.
    queue: float  # Waiting entries.
    rate: float  # Offered load in entries per second, including refused ones.
    capacity: float  # Entries per second that all ready workers handle in full batches; 0 if unknown.
    cost: BatchCost | None = None  # Cost of its batches, by entries; None if unknown.
    running: int = 0  # Running batches.
    load: float = 0.0  # Seconds that its workers took to load; 0 if unknown.
    bulk: int = 0  # Waiting bulk lines; 0 if another model should get its GPUs.
    trouble: str = ""  # Why a worker failed to load; empty if none has.
    retry_in: float = 0.0  # Seconds until the next try, if all starting workers have failed.
    drained: int = 0  # Workers that claim nothing because an operator drained them.

    @property
    def asked(self) -> bool:
        return self.queue > 0 or self.running > 0 or self.rate >= ASKED


class ScaleDecision(msgspec.Struct, frozen=True):
    """Decision to change the number of workers, or to request the same number again."""

    before: int
    desired: int
    direction: str  # UP, DOWN or AGAIN.
    reason: str  # Why, as a phrase.


class ArrivalForecast:
    """Forecasts arrivals from samples of their rate: how many come, how unevenly, and how many will come soon.

    The trend isn't extrapolated further than it has been observed: over the time that a worker needs to start, arrivals may grow by as
    much as they did in the same time before. So a slow wave is met in time, and a sudden doubling isn't taken for a trend."""

    def __init__(self) -> None:
        self.rate = 0.0  # Smoothed arrivals per second; 0 before the first sample.
        self.level = 0.0  # The same, smoothed for longer if workers take long to start.
        self.dispersion = 1.0  # Variance over mean of the arrivals in a second or two; 1 for Poisson, more if burstier.
        self._at: float | None = None
        self._before: deque[tuple[float, float]] = deque()  # Samples with their times, as far back as is compared.
        self._noted: deque[tuple[float, float]] = deque()  # Levels with their times, as far back as a trend goes.

    def observe(self, rate: float, now: float, start: float) -> None:
        """Add a sample of arrivals per second, averaged over about a second. `start` is how many seconds a worker needs to start."""
        last, self._at = self._at, now
        if last is None:
            self.rate = self.level = rate
            self._noted.append((now, rate))
            self._before.append((now, rate))
            return
        elapsed = max(now - last, 0.0)
        self.rate += (rate - self.rate) * -math.expm1(-elapsed / SMOOTH_SECONDS)
        constant = min(max(SMOOTH_SHARE * start, SMOOTH_SECONDS), MOST_SMOOTH_SECONDS)
        self.level += (rate - self.level) * -math.expm1(-elapsed / constant)
        self._compare(rate, now, elapsed)
        if now - self._noted[-1][0] >= NOTED_EVERY:
            self._noted.append((now, self.level))
            while self._noted[0][0] < now - LONGEST_TREND:
                self._noted.popleft()

    def ahead(self, seconds: float) -> float:
        """Return the arrival rate (per second) to provision for `seconds` from now. It is never below the current rate."""
        return self.level + max(0.0, DAMPING * (self.level - self._level_before(seconds)))

    def _level_before(self, seconds: float) -> float:
        if self._at is None:
            return self.level
        since = self._at - seconds
        earlier = self._noted[0][1]
        for at, level in self._noted:
            if at > since:
                break
            earlier = level
        return earlier

    def _compare(self, rate: float, now: float, elapsed: float) -> None:
        """Update the dispersion from two rate samples. Their variance is half their squared difference; a slow rise adds little."""
        self._before.append((now, rate))
        while len(self._before) > 1 and self._before[1][0] <= now - APART:
            self._before.popleft()
        at, other = self._before[0]
        mean = (rate + other) / 2.0
        if now - at < APART or mean <= 0.0:
            return
        dispersion = min(SAMPLE_SECONDS * (rate - other) ** 2 / 2.0 / mean, MOST_DISPERSION)
        share = -math.expm1(-elapsed / DISPERSION_SECONDS)
        self.dispersion = max(self.dispersion + (dispersion - self.dispersion) * share, 1.0)


class Scaler:
    """Scaler of one model. `desired` is the number of workers that was requested last, and `reason` says why. `start` is how
    many seconds a worker was seen to take to start, or 0. Neither a rule nor `plan` removes a worker until its time has
    passed since `now`."""

    def __init__(
        self, limits: ScaleLimits, desired: int, now: float, reason: str = AS_FOUND, start: float = 0.0
    ) -> None:
        self.limits = limits  # May be replaced.
        self.desired = desired  # Number of workers that there should be.
        self.reason = reason  # Reason for the last decision.
        self.utilisation: float | None = None  # Offered load over the capacity of the ready workers; None if unknown.
        self.foreseen: float | None = None  # The same with all coming workers ready. The rules use it.
        self.forecast = ArrivalForecast()
        self._changed_at = self._asked_at = now
        self._held: dict[ScaleRule, float] = {}
        # When awaited workers were requested, oldest first, and False if a death or a failure to load makes their start untypical.
        self._awaited: list[tuple[float, bool]] = []
        self.late = 0  # Requested workers that didn't come in time.
        self.drained = 0  # Workers that claim nothing because an operator drained them, as last reported.
        self.short = False  # True if more workers than `limits.most` were wanted last.
        self.trouble = ""  # Why a worker failed to load, as last reported; empty if none has.
        self._retry_at = now
        self._pace = 0.0
        self._start, self._seen_start = start or FIRST_START, start > 0.0
        self._load = 0.0
        self._wanted: deque[tuple[float, int]] = deque()  # Recent maxima of what `plan` wanted, with their times.
        self._planned_since: float | None = None
        self._short_since: float | None = None

    @property
    def coming(self) -> int:
        """Requested workers that are neither there nor late."""
        return len(self._awaited) - self.late

    @property
    def start_seconds(self) -> float:
        return self._start

    @property
    def seen_start(self) -> float:
        """Seconds that a worker's start was seen to take; 0 if none was seen."""
        return self._start if self._seen_start else 0.0

    @property
    def _usual_start(self) -> float:
        """Expected seconds of the next start: as seen before or, if unknown, as long as workers took to load, or a guess."""
        return self._start if self._seen_start else self._load or FIRST_START

    def starts_in(self, now: float) -> float | None:
        """Return the seconds until a worker serves, if none is ready: the rest of a start in progress, or a whole start if
        there is none. If loading failed, it is a whole start from the next try. An overdue start is assumed to take as long
        again as it is overdue, but at most a usual start or a minute, whichever is longer. Return None if the model always has
        a worker, or if all are drained."""
        if not self.limits.idle_after or 0 < self.desired <= self.drained:
            return None
        start = self._usual_start
        if self.trouble:
            return max(self._retry_at - now, 0.0) + start
        if not self._awaited:
            return start
        rest = start - self.awaited(now)
        return rest if rest >= 0.0 else min(-rest, max(start, FIRST_START))

    def awaited(self, now: float) -> float:
        """Return how many seconds ago the longest awaited worker was requested; 0 if none is awaited."""
        return now - self._awaited[0][0] if self._awaited else 0.0

    def overdue(self, now: float) -> int:
        """Return the number of workers, late or not, whose start is taking longer than usual."""
        return sum(now - at > self._usual_start for at, _ in self._awaited)

    def decide(self, state: ModelState, now: float) -> ScaleDecision | None:
        self.forecast.observe(state.rate, now, self._start)
        late_before, self.short = self.late, False
        self._count(state, now)
        if self.limits.idle_after:
            if state.asked or (self.coming and not state.trouble):
                self._asked_at = now
            if not self.desired:
                return self._woken(state, now)
            if now - self._asked_at >= self.limits.idle_after and not state.bulk:
                return self._change(0, now, f"no requests for {self.limits.idle_after:g} s")
        bounded = self.limits.clamp(max(self.desired, self.limits.least + self.drained))
        if bounded != self.desired:
            return self._change(
                bounded, now, f"no fewer than {bounded}" if bounded > self.desired else f"at most {bounded}"
            )
        decision = self._by_plan(state, now) if self.limits.policy == PLAN else self._by_rules(state, now)
        if decision is None and self.late > late_before:
            missing = f"{self.late} of {self.desired} workers did not start within {self.limits.start_within:g} s"
            return ScaleDecision(self.desired, self.desired, AGAIN, missing)
        return decision

    def _woken(self, state: ModelState, now: float) -> ScaleDecision | None:
        if state.asked:
            return self._change(self.limits.clamp(1), now, "it has requests")
        if state.bulk and now - self._changed_at >= self._usual_start:
            return self._change(self.limits.clamp(1), now, "bulk lines are waiting for it")
        return None

    def _count(self, state: ModelState, now: float) -> None:
        """Update the list of awaited workers and the throughput per worker."""
        self._load = state.load or self._load
        self.trouble, self._retry_at, self.drained = state.trouble, now + state.retry_in, state.drained
        if state.ready > 0 and state.capacity > 0.0:
            self._pace = state.capacity / state.ready
        missing = max(self.desired - state.ready - self.drained, 0)
        while len(self._awaited) > missing:  # Assume that the workers awaited longest have come.
            at, telling = self._awaited.pop(0)
            if telling:
                took = min(now - at, self.limits.start_within)
                expected = FADING * self._start + (1.0 - FADING) * took if self._seen_start else took
                self._start, self._seen_start = max(took, expected), True
        self._awaited.extend([(now, False)] * (missing - len(self._awaited)))
        if state.trouble:
            self._awaited = [(at, False) for at, _ in self._awaited]
        self.late = sum(now - at >= self.limits.start_within for at, _ in self._awaited)
        counted = self.desired - self.late - self.drained
        self.utilisation, self.foreseen = self._use_of(state.ready), self._use_of(counted)

    def _use_of(self, workers: int) -> float | None:
        """Return the offered load over the capacity of `workers` workers; None if unknown."""
        return self.forecast.rate / (self._pace * workers) if self._pace > 0.0 and workers > 0 else None

    def _by_rules(self, state: ModelState, now: float) -> ScaleDecision | None:
        due = [rule for rule in self.limits.rules if self._due(rule, state, now)]
        add = max((rule for rule in due if rule.change > 0), key=lambda rule: rule.change, default=None)
        if add is not None:
            self.short = self.desired + add.change > self.limits.most
            desired = self.limits.clamp(self.desired + add.change)
            return self._change(desired, now, self._words(add, state)) if desired > self.desired else None
        remove = min((rule for rule in due if rule.change < 0), key=lambda rule: rule.change, default=None)
        if remove is None or self.coming:
            return None
        lowest = max(self.desired + remove.change, self._least_after_removal(), self._least_by_band())
        return self._change(lowest, now, self._words(remove, state)) if lowest < self.desired else None

    def _due(self, rule: ScaleRule, state: ModelState, now: float) -> bool:
        """Return True if a rule's condition has held for its time. While workers are coming, a long queue counts only if they
        won't be enough."""
        answered = rule.condition == QUEUE_ABOVE and self.coming > 0 and (self.foreseen or 0.0) <= 1.0
        if answered or not rule.holds(state.queue, self.foreseen):
            self._held.pop(rule, None)
            return False
        return now - self._held.setdefault(rule, now) >= rule.for_s

    def _least_by_band(self) -> int:
        """Return the fewest workers for which no rule on utilisation would add one again."""
        top = min((rule.threshold for rule in self.limits.rules if rule.condition == UTILISATION_ABOVE), default=1.0)
        if self.foreseen is None or top <= 0.0:
            return self.desired
        return math.floor(self.foreseen * (self.desired - self.drained) / top) + 1 + self.drained

    def _words(self, rule: ScaleRule, state: ModelState) -> str:
        if rule.condition == QUEUE_ABOVE:
            return f"{rule} ({state.queue:.0f} wait)"
        return f"{rule} ({self.foreseen or 0.0:.2f})"

    def _by_plan(self, state: ModelState, now: float) -> ScaleDecision | None:
        cost, forecast = state.cost, self.forecast
        if cost is None or self._pace <= 0.0:
            return self._by_rules(state, now)
        ahead = forecast.ahead(self._start)
        if (self.utilisation or 0.0) > 1.0:  # If all workers are overloaded, waiting doesn't help.
            ahead = max(ahead, forecast.rate)
        needed, why = self._needed(cost, ahead)
        self._remember(self._needed(cost, ahead * (1.0 + SPARE))[0], now)
        wanted = needed + self.late + self.drained
        self.short = wanted > self.limits.most
        desired = self.limits.clamp(wanted)
        if desired <= self.desired:
            self._short_since = None
            return self._shrunk(now)
        since = self._short_since = now if self._short_since is None else self._short_since
        if now - since < PLAN_HOLDS:
            return None
        return self._change(desired, now, f"{needed} {why} at {ahead:.3g}/s")

    def _remember(self, wanted: int, now: float) -> None:
        if self._planned_since is None:
            self._planned_since = now
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._window:
            self._wanted.popleft()

    @property
    def _window(self) -> float:
        """Seconds for which a worker must have been unneeded before `plan` removes it. Not less than a start takes."""
        return max(PLAN_KEEPS, self._start)

    def _shrunk(self, now: float) -> ScaleDecision | None:
        if self.coming or now - self._changed_at < PLAN_KEEPS:
            return None
        if self._planned_since is None or now - self._planned_since < self._window:
            return None
        most = self._wanted[0][1]
        lowest = max(self.limits.clamp(most + self.late + self.drained), self._least_after_removal())
        if lowest >= self.desired:
            return None
        return self._change(lowest, now, f"no more than {most} were needed in the last {self._window:.0f} s")

    def _needed(self, cost: BatchCost, rate: float) -> tuple[int, str]:
        promise = self.limits.promise
        roomy = max(1, math.ceil(rate / (self._pace * ROOM) - 1e-9))
        kept = fewest_slots(cost, rate, promise, self.forecast.dispersion, self.limits.most)
        if kept is None:
            return roomy, f"stay below {ROOM:.0%} use; none keep {promise * 1000:g} ms"
        return (kept, f"keep {promise * 1000:g} ms") if kept > roomy else (roomy, f"stay below {ROOM:.0%} use")

    def _least_after_removal(self) -> int:
        return max(self.limits.least + self.drained, self.desired - max(1, int(MOST_REMOVED * self.desired)))

    def _change(self, desired: int, now: float, reason: str) -> ScaleDecision:
        before, self.desired, self.reason = self.desired, desired, reason
        self._changed_at = now
        self._held.clear()
        self._short_since = None
        if desired > before:
            self._awaited.extend([(now, True)] * (desired - before))
        else:  # A platform first gives up workers that haven't started yet.
            del self._awaited[: before - desired]
            self.late = max(self.late - (before - desired), 0)
        return ScaleDecision(before, desired, UP if desired > before else DOWN, reason)
