"""Scaler of one model: from what is measured to the number of workers that there should be.

    policy `rules`   each rule whose condition has held for its time changes the number
    policy `plan`    the fewest workers that keep the promise at the load to come (`sizing`), with room

Both keep the same bounds. Workers that were asked for count as coming until they are late, so that one shortage is answered
once; what is late no longer counts, and is asked for again. Drained workers are among the number, and neither ready nor
coming: others are asked for in their place, as far as the bounds allow. A removal comes when nothing has changed and none was wanted for
the time of its rule, or for that of `plan`. It takes a fifth of the workers at most (but one at least), and never more than the load
would want back.

Where `idle_after` is set, a model that nobody asks for all that time has no worker at all, until somebody does. The time of a
start does not count, so that who was told to come back then finds a worker, unless a worker failed to load in it. Lines of bulk jobs keep its workers, and bring one back,
but no sooner after the last change than a start takes.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from headway.core.scaling.forecast import ArrivalForecast
from headway.core.scaling.rules import QUEUE_ABOVE, USUAL, UTILISATION_ABOVE, ScaleRule
from headway.core.scaling.sizing import MOST_SLOTS, BatchCost, fewest_slots

RULES, PLAN = "rules", "plan"
"""Policies."""
UP, DOWN, AGAIN = "up", "down", "again"
DIRECTIONS = (UP, DOWN, AGAIN)
"""Directions of a decision: more workers, fewer, or as many as were asked for before and did not come."""
AS_FOUND = "as it was found"
"""Reason of a number that nobody has decided yet."""
MOST_REMOVED = 0.2
"""Share of the workers that may be removed at once."""
ROOM = 0.8
"""Share of the capacity that `plan` means to use, so that a climb meets room while workers start."""
SPARE = 0.05
"""Share by which the load must be lower than a smaller fleet could carry before `plan` removes workers."""
PLAN_HOLDS = 5.0
"""Seconds for which `plan` must want more workers before it asks for them."""
PLAN_KEEPS = 300.0
"""Seconds for which `plan` must not have wanted workers before it removes them, or those of a start if that takes longer."""
FIRST_START = 60.0
"""Seconds that a worker is taken to need for its start until one was seen; that one takes the place of the guess."""
ASKED = 0.05
"""Entries per second, averaged over about one, below which none has come for some seconds."""
FADING = 0.8
"""Part of a longer start that was seen which is still expected after a shorter one."""


class ScaleLimits(msgspec.Struct, frozen=True):
    """Bounds and times of one model's scaler.

    Attributes:
        policy: RULES or PLAN.
        least, most: fewest and most workers; the fewest, from 1 on, of a model that has any.
        rules: rules of the policy RULES.
        start_within: seconds for which a worker that was asked for counts as coming.
        promise: promised 95th percentile of latency in seconds, for PLAN.
        idle_after: seconds after which a model that nobody asks for has no worker; 0: it always has one.
    """

    policy: str = RULES
    least: int = 1
    most: int = MOST_SLOTS
    rules: tuple[ScaleRule, ...] = USUAL
    start_within: float = 600.0
    promise: float = 0.2
    idle_after: float = 0.0

    def clamp(self, workers: int) -> int:
        """Return the nearest number within the bounds."""
        return max(self.least, min(workers, self.most))


class ModelState(msgspec.Struct, frozen=True):
    """Measured state of a model.

    Attributes:
        ready: healthy workers.
        queue: entries that wait.
        rate: offered entries per second, those included that were refused.
        capacity: entries per second of the ready workers together in full batches; 0 while that is not known.
        cost: cost of its batches in entries; None while it is not known.
        running: batches that run.
        load: seconds that its workers took to load; 0 while that is not known.
        bulk: lines of bulk jobs that wait for it; 0 where another model is to have its GPUs.
        trouble: why a worker did not load, in words; empty while none has failed to.
        retry_in: seconds until one of those that start is tried again, where all of them failed.
        drained: workers that claim nothing by an operator's order.
    """

    ready: int
    queue: float
    rate: float
    capacity: float
    cost: BatchCost | None = None
    running: int = 0
    load: float = 0.0
    bulk: int = 0
    trouble: str = ""
    retry_in: float = 0.0
    drained: int = 0

    @property
    def asked(self) -> bool:
        """True if somebody asks for the model, or waits for it."""
        return self.queue > 0 or self.running > 0 or self.rate >= ASKED


class ScaleDecision(msgspec.Struct, frozen=True):
    """Decision to have another number of workers, or to ask for the same again.

    Attributes:
        before, desired: workers until now and from now on.
        direction: UP, DOWN or AGAIN.
        reason: what decided it, in words.
    """

    before: int
    desired: int
    direction: str
    reason: str


class Scaler:
    """Scaler of one model.

    Arguments:
        limits: bounds and times.
        desired: workers that were asked for last.
        now: present instant; no worker is removed until the time of a rule, or of `plan`, has passed from it.
        reason: reason of the number.
        start: seconds that a worker was seen to need for its start; 0: none was seen yet.

    Attributes:
        limits: may be replaced.
        desired: workers that there should be.
        reason: reason of the last decision.
        late: workers that were asked for and did not come in time.
        drained: workers that claim nothing by an operator's order, as last heard.
        trouble: why a worker did not load, as last heard; empty while none has failed to.
        short: whether more workers were wanted last than `limits.most`.
        utilisation: offered load over the capacity of the workers that are ready; None while none is, or nothing is known.
        foreseen: the same once those that come are ready, too: what the rules go by, so that one shortage is answered once.
    """

    def __init__(
        self, limits: ScaleLimits, desired: int, now: float, reason: str = AS_FOUND, start: float = 0.0
    ) -> None:
        self.limits = limits
        self.desired = desired
        self.reason = reason
        self.utilisation: float | None = None
        self.foreseen: float | None = None
        self.forecast = ArrivalForecast()
        self._changed_at = self._asked_at = now
        self._held: dict[ScaleRule, float] = {}
        self._awaited: list[tuple[float, bool]] = []
        """Instants since which workers are awaited, oldest first, and whether their start tells how long one takes.

        It does not of one that was there and has died, nor where a worker failed to load meanwhile.
        """
        self.late = self.drained = 0
        self.short = False
        self.trouble = ""
        self._retry_at = now
        self._pace = 0.0
        self._start, self._seen_start = start or FIRST_START, start > 0.0
        self._load = 0.0
        self._wanted: deque[tuple[float, int]] = deque()
        """Instants and numbers that `plan` wanted, each larger than all after it: the maxima of the last while."""
        self._planned_since: float | None = None
        self._short_since: float | None = None

    @property
    def coming(self) -> int:
        """Workers that were asked for, are not there, and are not late."""
        return len(self._awaited) - self.late

    @property
    def start_seconds(self) -> float:
        """Seconds that a worker is expected to need from being asked for until it serves."""
        return self._start

    @property
    def seen_start(self) -> float:
        """Seconds that a worker was seen to need for its start; 0: none was seen yet."""
        return self._start if self._seen_start else 0.0

    @property
    def _usual_start(self) -> float:
        """Seconds of the next start: of the last one that was seen; else those that the workers took to load, or a guess."""
        return self._start if self._seen_start else self._load or FIRST_START

    def starts_in(self, now: float) -> float | None:
        """Return the seconds until a worker serves where none is ready; None of a model that always has one, or may have no more than are drained.

        They are what is left of the start that is under way, or all of one that would begin now. After one that failed
        they begin with the next try. An overdue start is presumed to take as long again as it is overdue, up to a usual
        start or a minute.
        """
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
        """Return the seconds for which the worker that is awaited longest has been on its way; 0 while none is."""
        return now - self._awaited[0][0] if self._awaited else 0.0

    def overdue(self, now: float) -> int:
        """Return the workers that take longer to start than is usual; those that are late among them."""
        return sum(now - at > self._usual_start for at, _ in self._awaited)

    def decide(self, state: ModelState, now: float) -> ScaleDecision | None:
        """Decide at an instant; None to leave the number as it is."""
        self.forecast.observe(state.rate, now, self._start)
        late_before, self.short = self.late, False
        self._count(state, now)
        if self.limits.idle_after:
            if state.asked or (self.coming and not state.trouble):
                self._asked_at = now
            if not self.desired:
                return self._woken(state, now)
            if now - self._asked_at >= self.limits.idle_after and not state.bulk:
                return self._change(0, now, f"nobody asked for it for {self.limits.idle_after:g} s")
        bounded = self.limits.clamp(max(self.desired, self.limits.least + self.drained))
        if bounded != self.desired:
            return self._change(
                bounded, now, f"no fewer than {bounded}" if bounded > self.desired else f"at most {bounded}"
            )
        decision = self._by_plan(state, now) if self.limits.policy == PLAN else self._by_rules(state, now)
        if decision is None and self.late > late_before:
            missing = f"{self.late} of {self.desired} workers did not come within {self.limits.start_within:g} s"
            return ScaleDecision(self.desired, self.desired, AGAIN, missing)
        return decision

    def _woken(self, state: ModelState, now: float) -> ScaleDecision | None:
        """Return the first workers of a model at zero."""
        if state.asked:
            return self._change(self.limits.clamp(1), now, "somebody asks for it")
        if state.bulk and now - self._changed_at >= self._usual_start:
            return self._change(self.limits.clamp(1), now, "lines of bulk jobs wait for it")
        return None

    def _count(self, state: ModelState, now: float) -> None:
        """Keep account of who is awaited, and of what a worker does."""
        self._load = state.load or self._load
        self.trouble, self._retry_at, self.drained = state.trouble, now + state.retry_in, state.drained
        if state.ready > 0 and state.capacity > 0.0:
            self._pace = state.capacity / state.ready
        missing = max(self.desired - state.ready - self.drained, 0)
        while len(self._awaited) > missing:  # Those that were awaited longest are taken to be the ones that came.
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
        """Return the offered load over the capacity of so many workers; None while that is not known."""
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
        """Return True if a rule's condition has held for its time.

        A queue while workers are coming is answered already, unless the load is more than all of them can do.
        """
        answered = rule.condition == QUEUE_ABOVE and self.coming > 0 and (self.foreseen or 0.0) <= 1.0
        if answered or not rule.holds(state.queue, self.foreseen):
            self._held.pop(rule, None)
            return False
        return now - self._held.setdefault(rule, now) >= rule.for_s

    def _least_by_band(self) -> int:
        """Return the fewest workers with which no rule on utilisation would add one again."""
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
        if (self.utilisation or 0.0) > 1.0:  # What all workers together cannot carry is not waited out.
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
        """Seconds for which `plan` must not have wanted workers that it removes: it could not have them back sooner."""
        return max(PLAN_KEEPS, self._start)

    def _shrunk(self, now: float) -> ScaleDecision | None:
        """Remove what the plan has not wanted for a while."""
        if self.coming or now - self._changed_at < PLAN_KEEPS:
            return None
        if self._planned_since is None or now - self._planned_since < self._window:
            return None
        most = self._wanted[0][1]
        lowest = max(self.limits.clamp(most + self.late + self.drained), self._least_after_removal())
        if lowest >= self.desired:
            return None
        return self._change(lowest, now, f"no more than {most} were needed for {self._window:.0f} s")

    def _needed(self, cost: BatchCost, rate: float) -> tuple[int, str]:
        """Return the fewest workers for a rate, and what asks for them."""
        promise = self.limits.promise
        roomy = max(1, math.ceil(rate / (self._pace * ROOM) - 1e-9))
        kept = fewest_slots(cost, rate, promise, self.forecast.dispersion, self.limits.most)
        if kept is None:
            return roomy, f"stay below {ROOM:.0%} use; none keep {promise * 1000:g} ms"
        return (kept, f"keep {promise * 1000:g} ms") if kept > roomy else (roomy, f"stay below {ROOM:.0%} use")

    def _least_after_removal(self) -> int:
        """Return the fewest workers that one removal may leave."""
        return max(self.limits.least + self.drained, self.desired - max(1, int(MOST_REMOVED * self.desired)))

    def _change(self, desired: int, now: float, reason: str) -> ScaleDecision:
        before, self.desired, self.reason = self.desired, desired, reason
        self._changed_at = now
        self._held.clear()
        self._short_since = None
        if desired > before:
            self._awaited.extend([(now, True)] * (desired - before))
        else:  # A platform gives up first what is not there.
            del self._awaited[: before - desired]
            self.late = max(self.late - (before - desired), 0)
        return ScaleDecision(before, desired, UP if desired > before else DOWN, reason)
