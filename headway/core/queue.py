"""One model's queue: the place where a batch is born.

Pure: no clock, no asyncio. A broker wraps it with leases and replies; the simulator drives it from a heap of
virtual instants. All instants passed in must come from one clock and never go back.

    offer ──▶ waiting ──depart──▶ running ──finish──▶ gone
                 ▲  │                │
                 │  └─expire/cancel─▶gone
                 └──── fail (retry plan) / hand_back (uncharged)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core import admission
from headway.core.departure import RETRY, Hold, Load, Policy, Rule, View, decide
from headway.core.packing import GONE, QUEUED, RUNNING, SUSPECT, DueLine, Lane, Queued, turns
from headway.core.retry import Dead, RetryBudget, backoff, plan
from headway.core.service_model import ArrivalRate, ServiceModel
from headway.model import Entry

BUSY_TIME = 5.0
"""Time constant of the utilisation average, seconds."""
WAIT_WEIGHT = 0.2
"""Weight of the newest departure in the average wait."""
MIN_AVOIDANCE = 0.05
"""Least seconds for which a failed batch waits for another worker than the one it failed on."""
HOPELESS = 0.95
"""Share of α: what is due sooner cannot be answered in time."""
GATE_AGE = 0.05
"""Seconds after which the admission figures are made anew even if no batch has left."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What bounds a queue: number of tiers, largest batch, share kept for lower tiers, most entries waiting."""

    tiers: int
    max_batch: int
    reserved_share: float = 0.1
    max_queue: int = 20_000


@dataclass(slots=True)
class Departure:
    """A batch on its way.

    `failures` counts how often it failed before, as a whole or in a larger one; `late` are entries that were
    dropped from it because they could no longer be answered in time.
    """

    worker: str
    members: list[Queued]
    reason: str
    left_at: float
    failures: int = 0
    late: list[Queued] = field(default_factory=list)


@dataclass(slots=True)
class _Suspects:
    """Entries of a failed batch that wait to run again by themselves."""

    members: list[Queued]
    ready_at: float
    failures: int
    avoid: str = ""
    avoid_until: float = -math.inf

    def open_at(self, worker: str, others: bool) -> float:
        """The instant from which `worker` may take them; where there are others, not at once where they failed."""
        return self.avoid_until if others and worker == self.avoid else self.ready_at


@dataclass(slots=True)
class Aftermath:
    """What a failed batch came to: entries that run again, that are dead, that get no more tries, that are too late."""

    again: int = 0
    dead: list[Queued] = field(default_factory=list)
    spent: list[Queued] = field(default_factory=list)
    late: list[Queued] = field(default_factory=list)


class ModelQueue:
    """Waiting and retried entries of one model, with what is known of its cost and load."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.service = ServiceModel()
        self.last_departure = -math.inf
        self.slots = 0
        self._known_slots = 1
        self._lanes = [Lane() for _ in range(limits.tiers)]
        self._rates = [ArrivalRate() for _ in range(limits.tiers)]
        self._due = DueLine()
        self._suspects: list[_Suspects] = []
        self._budget = RetryBudget()
        self._gate = admission.Gate.unknown(limits.tiers)
        self._gate_at = -math.inf
        self._busy = 0
        self._utilisation = 0.0
        self._busy_at = 0.0
        self._wait = 0.0
        self._departures = 0
        self._rule: Rule | None = None

    @property
    def depth(self) -> int:
        """Entries waiting, those that wait to run again included."""
        return self._fresh_depth() + sum(len(group.members) for group in self._suspects)

    def depths(self, now: float) -> list[tuple[int, float]]:
        """For each tier: entries waiting, and seconds the oldest has waited."""
        counts = [lane.depth for lane in self._lanes]
        oldest = [now if (first := lane.oldest()) is None else first.arrived for lane in self._lanes]
        for group in self._suspects:
            for member in group.members:
                counts[member.entry.tier] += 1
                oldest[member.entry.tier] = min(oldest[member.entry.tier], member.arrived)
        return [(count, now - since) for count, since in zip(counts, oldest, strict=True)]

    def set_slots(self, slots: int) -> None:
        """How many GPUs are live for this model."""
        self.slots = slots
        self._known_slots = slots or self._known_slots
        self._gate_at = -math.inf

    def offer(self, entry: Entry, now: float) -> Queued | admission.Refused:
        """Admit an entry, or refuse it."""
        tier = entry.tier
        self._rates[tier].observe(1, now)
        waiting = self._fresh_depth()
        if waiting >= self.limits.max_queue:
            drain = self._gate_now(now).drains[tier]
            return admission.Refused(max(1.0 / drain if drain > 0 else 1.0, 0.001), tier_only=False)
        if waiting:
            refused = self._gate_now(now).judge([lane.depth for lane in self._lanes], tier, entry)
            if refused is not None:
                return refused
        queued = Queued(entry, now)
        self._lanes[tier].push(queued)
        self._due.push(queued)
        return queued

    def load(self, now: float) -> Load:
        """What is known at this instant."""
        return Load(
            rate=sum(rate.at(now) for rate in self._rates),
            alpha=self.service.alpha,
            beta=self.service.beta,
            slots=self.slots,
            max_batch=self.limits.max_batch,
            depth=self._fresh_depth(),
            utilisation=self._utilisation,
            wait=self._wait,
            departures=self._departures,
        )

    def depart(self, worker: str, limit: int, policy: Policy, now: float) -> Departure | Hold:
        """The batch that leaves now for a free GPU, or until when to hold.

        Overdue entries must have been taken out by `expire` before.

        Arguments:
            worker: who would run it.
            limit: most entries it takes.
            policy: decides when.
            now: the instant.
        """
        for group in self._suspects:
            if group.open_at(worker, self.slots > 1) <= now:
                self._suspects.remove(group)
                return self._leave(Departure(worker, group.members, RETRY, now, group.failures), now)
        self._rule = policy.rule(self.load(now))
        verdict = decide(self._rule, self._view(), now)
        if isinstance(verdict, Hold):
            return verdict
        departure = Departure(worker, [], verdict.reason, now)
        self._pack(departure, min(limit, self.limits.max_batch), now)
        self._wait += (now - min(member.arrived for member in departure.members) - self._wait) * WAIT_WEIGHT
        self.last_departure = now
        self._budget.earn()
        return self._leave(departure, now)

    def wake(self, idle: Sequence[str], now: float) -> str | float:
        """Which of the idle workers has something to claim now; if none, the instant to look again.

        Applies the rule of the last claim, so it costs little enough to be asked after every enqueue.
        """
        again = math.inf
        for group in self._suspects:
            for worker in idle:
                opens = group.open_at(worker, self.slots > 1)
                if opens <= now:
                    return worker
                again = min(again, opens)
        if self._fresh_depth() == 0:
            return again
        verdict = decide(self._rule, self._view(), now) if self._rule is not None else None
        return min(again, verdict.until) if isinstance(verdict, Hold) else idle[0]

    def expire(self, now: float) -> list[Queued]:
        """Take out all that waited too long."""
        late = []
        for queued in self._due.overdue(now):
            self._lanes[queued.entry.tier].depth -= 1
            queued.state = GONE
            late.append(queued)
        for group in self._suspects:
            overdue = [member for member in group.members if member.due <= now]
            if overdue:
                group.members = [member for member in group.members if member.due > now]
                late += overdue
        for queued in late:
            queued.state = GONE
        self._suspects = [group for group in self._suspects if group.members]
        return late

    def next_due(self) -> float:
        """The instant at which `expire` has something to do; infinite when nothing waits."""
        retried = (member.due for group in self._suspects for member in group.members)
        return min(self._due.earliest(), min(retried, default=math.inf))

    def remove(self, queued: Queued) -> None:
        """Forget an entry. One that is running stays in its batch, but is not tried again."""
        if queued.state == SUSPECT:
            for group in self._suspects:
                if queued in group.members:
                    group.members.remove(queued)
            self._suspects = [group for group in self._suspects if group.members]
        elif queued.state == QUEUED:
            self._lanes[queued.entry.tier].depth -= 1
        queued.state = GONE

    def finish(self, departure: Departure, now: float) -> list[Queued]:
        """The batch came back with outputs; learn from it. Returns the members that are still wanted."""
        wanted = self._arrive(departure, now, GONE)
        self.service.observe(len(departure.members), now - departure.left_at)
        self._gate_at = -math.inf
        return wanted

    def hand_back(self, departure: Departure, now: float) -> None:
        """The batch never ran: its entries wait again, uncharged, ahead of all others."""
        members = self._arrive(departure, now, SUSPECT)
        for member in members:
            member.attempts -= 1
        if members:
            self._suspects.append(_Suspects(members, now, departure.failures))

    def fail(self, departure: Departure, now: float, dice: Callable[[], float]) -> Aftermath:
        """The batch failed; the retry plan decides. `dice` is uniform in [0, 1), for the jitter."""
        after = Aftermath()
        members: list[Queued] = []
        for member in self._arrive(departure, now, SUSPECT):
            (members if member.due > now else after.late).append(member)
        failures = departure.failures + 1
        verdict = plan(len(members), failures, max(member.attempts for member in members)) if members else None
        if isinstance(verdict, Dead):
            after.dead = members
        elif verdict is not None and not self._budget.spend(len(verdict.parts), now):
            after.spent = members
        elif verdict is not None:
            after.again = len(members)
            for start, end in verdict.parts:
                ready_at = now + backoff(failures, dice())
                elsewhere = ready_at + max(self.service.seconds(end - start), MIN_AVOIDANCE)
                self._suspects.append(_Suspects(members[start:end], ready_at, failures, departure.worker, elsewhere))
        for member in (*after.dead, *after.spent, *after.late):
            member.state = GONE
        return after

    def _arrive(self, departure: Departure, now: float, state: int) -> list[Queued]:
        """End a run: those still wanted get `state` and are returned."""
        self._note_busy(now)
        self._busy -= 1
        wanted = [member for member in departure.members if member.state == RUNNING]
        for member in wanted:
            member.state = state
        return wanted

    def _leave(self, departure: Departure, now: float) -> Departure:
        self._note_busy(now)
        self._busy += 1
        self._departures += 1
        self._gate_at = -math.inf
        for member in departure.members:
            member.state = RUNNING
            member.attempts += 1
        return departure

    def _note_busy(self, now: float) -> None:
        share = min(1.0, self._busy / self.slots) if self.slots else 0.0
        weight = 1.0 - math.exp(-max(0.0, now - self._busy_at) / BUSY_TIME)
        self._utilisation += (share - self._utilisation) * weight
        self._busy_at = now

    def _fresh_depth(self) -> int:
        depth = 0
        for lane in self._lanes:
            depth += lane.depth
        return depth

    def _view(self) -> View:
        firsts = [first.arrived for lane in self._lanes if lane.depth and (first := lane.oldest()) is not None]
        return View(
            depth=self._fresh_depth(),
            oldest=min(firsts, default=math.inf),
            due=self._due.earliest(),
            last_departure=self.last_departure,
        )

    def _gate_now(self, now: float) -> admission.Gate:
        if now - self._gate_at > GATE_AGE:
            full = self.service.seconds(self.limits.max_batch)
            drain = self._known_slots * self.limits.max_batch / full if full > 0 else 0.0
            self._gate = admission.Gate.of(drain, full, [r.at(now) for r in self._rates], self.limits.reserved_share)
            self._gate_at = now
        return self._gate

    def _pack(self, departure: Departure, limit: int, now: float) -> None:
        """Fill the batch. When more waits than fits, no place goes to what cannot be answered in time."""
        members = departure.members
        hopeless = now + self.service.alpha * HOPELESS
        while len(members) < limit and (waiting := self._fresh_depth()):
            contended = waiting > limit - len(members)
            for lane in turns(self._lanes, limit - len(members), self.limits.reserved_share):
                queued = lane.pop()
                if queued is None:
                    continue
                if contended and queued.due < hopeless:
                    queued.state = GONE
                    departure.late.append(queued)
                else:
                    members.append(queued)


def entries_of(members: Sequence[Queued]) -> tuple[Entry, ...]:
    """The entries of a batch, in order."""
    return tuple(member.entry for member in members)
