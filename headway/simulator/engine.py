"""Drives the production queue and policies from a heap of virtual instants: no event loop, no clock.

The queue is the one that brokers use, asked in the same order: an arrival is offered and rings the bell; a free
worker claims, and when it is told to hold it goes idle and the bell is set. What is simulated is only the outside:
who comes, how long a batch runs, who dies.

    idle ──claim──▶ running ──answer──▶ idle
      │                │
      └──────die───────┴──▶ dead ──restart──▶ idle
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from functools import partial

from headway.core.admission import Refused
from headway.core.departure import Hold
from headway.core.packing import Queued
from headway.core.queue import Departure, ModelQueue
from headway.simulator.record import EXPIRED, FAILED, REFUSED, Record
from headway.simulator.scenario import Kill, Scenario
from headway.simulator.traffic import POISON, arrivals, callers

REAP_EVERY = 1.0
"""Most seconds between two looks for overdue entries, as brokers do it."""


def simulate(scenario: Scenario) -> Record:
    """Run a scenario to its end: until each request that came has had its outcome.

    Raises:
        SettingError: the trace has no rate.
    """
    return _Simulation(scenario).run()


class _Worker:
    """A GPU. `life` counts its lives, so that what was begun in an earlier one is known to be void."""

    __slots__ = ("alive", "departure", "died_at", "life", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.alive = True
        self.died_at = 0.0
        self.departure: Departure | None = None


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._record = Record(scenario)
        self._queue = ModelQueue(scenario.limits())
        self._policy = scenario.make_policy()
        self._workers = {name: _Worker(name) for name in (f"gpu-{n}" for n in range(scenario.workers))}
        self._idle: dict[str, None] = dict.fromkeys(self._workers)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._bell = math.inf
        self._reap_at = 0.0
        self._closed = False
        self._failures = self._dice("failures")
        self._retries = self._dice("retries").random
        self._noise = self._dice("noise")
        spread = math.log1p(scenario.jitter**2)
        self._log_mean, self._log_deviation = -spread / 2, math.sqrt(spread)

    def run(self) -> Record:
        scenario, queue, record, heap = self._scenario, self._queue, self._record, self._heap
        coming = arrivals(scenario, self._dice("arrivals"))
        draw = callers(scenario, self._dice("callers"))
        queue.set_slots(scenario.workers)
        self._plan_deaths()
        arrival = next(coming, math.inf)
        if arrival == math.inf:
            self._close(0.0)
        while True:
            event = heap[0][0] if heap else math.inf
            soonest = min(event, self._bell, self._reap_at)
            if arrival <= soonest and arrival < math.inf:
                entry = draw()
                record.came(entry.tier, arrival)
                offered = queue.offer(entry, arrival)
                if type(offered) is Refused:
                    record.lose(REFUSED, "shed" if offered.tier_only else "overloaded", entry.tier, arrival)
                if self._idle:
                    self._ring(arrival)
                now, arrival = arrival, next(coming, math.inf)
                if arrival == math.inf:
                    self._close(now)
            elif soonest == math.inf:
                return record
            elif event == soonest:
                now, _, act = heapq.heappop(heap)
                act(now)
            elif self._bell == soonest:
                self._ring(soonest)
            else:
                self._reap(soonest)

    def _dice(self, what: str) -> random.Random:
        """Chance of its own for each purpose, so that a change of policy leaves the arrivals alone."""
        return random.Random(f"{self._scenario.seed}/{what}")  # noqa: S311 - the same seed, the same run

    def _at(self, instant: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (instant, next(self._order), act))

    def _close(self, now: float) -> None:
        """The last request has come."""
        load = self._queue.load(now)
        self._record.estimates = (load.rate, load.alpha, load.beta, load.deviation)
        self._closed = True

    def _ring(self, now: float) -> None:
        """Let idle workers claim while there is something for them; then set the bell for when there may be."""
        idle, queue = self._idle, self._queue
        while idle:
            found = queue.wake(idle, now)
            if not isinstance(found, str):
                self._bell = found
                return
            del idle[found]
            self._claim(self._workers[found], now)
        self._bell = math.inf

    def _free(self, worker: _Worker, now: float) -> None:
        """A worker is ready for a batch."""
        self._claim(worker, now)
        self._ring(now)

    def _claim(self, worker: _Worker, now: float) -> None:
        self._expire(now)
        departure = self._queue.depart(worker.name, self._scenario.max_batch, self._policy, now)
        if isinstance(departure, Hold):
            self._idle[worker.name] = None
            return
        self._give_up(departure.late, now)
        worker.departure = departure
        size = len(departure.members)
        seconds = self._scenario.alpha + self._scenario.beta * size
        if self._log_deviation:
            seconds *= self._noise.lognormvariate(self._log_mean, self._log_deviation)
        self._record.departed(size, departure.reason, now)
        life = worker.life
        ends = now + seconds + self._scenario.overhead
        self._at(ends, partial(self._answer, worker, life, seconds))

    def _answer(self, worker: _Worker, life: int, seconds: float, now: float) -> None:
        """A batch has come back, unless its worker died meanwhile."""
        departure = worker.departure
        if worker.life != life or departure is None:
            return
        worker.departure = None
        record = self._record
        record.ran(departure.left_at + self._scenario.overhead / 2, seconds)
        if self._scenario.poison and any(member.entry.input == POISON for member in departure.members):
            self._fail(departure, now)
        else:
            for member in self._queue.finish(departure, now):
                if now > member.due:
                    record.lose(EXPIRED, "total", member.entry.tier, member.arrived)
                else:
                    record.answered(member.entry.tier, member.arrived, now)
        self._free(worker, now)

    def _fail(self, departure: Departure, now: float) -> None:
        after = self._queue.fail(departure, now, self._retries)
        self._record.retried += after.again
        for member in after.dead:
            self._record.lose(FAILED, "rejected", member.entry.tier, member.arrived)
        for member in after.spent:
            self._record.lose(FAILED, "budget", member.entry.tier, member.arrived)
        self._give_up(after.late, now)

    def _expire(self, now: float) -> None:
        late = self._queue.expire(now)
        if late:
            self._give_up(late, now)

    def _give_up(self, late: Iterable[Queued], now: float) -> None:
        for member in late:
            reason = "no_workers" if self._queue.slots == 0 else "total" if member.attempts else "queue"
            self._record.lose(EXPIRED, reason, member.entry.tier, member.arrived)

    def _reap(self, now: float) -> None:
        self._expire(now)
        if self._closed and not self._queue.depth and all(w.departure is None for w in self._workers.values()):
            self._reap_at = math.inf
        else:
            self._reap_at = min(now + REAP_EVERY, max(self._queue.next_due(), math.nextafter(now, math.inf)))

    def _plan_deaths(self) -> None:
        for kill in self._scenario.kills:
            self._at(kill.at, partial(self._kill, kill))
        for worker in self._workers.values():
            self._plan_death(worker, 0.0)

    def _plan_death(self, worker: _Worker, now: float) -> None:
        """When this life of a worker ends by itself; nobody dies after the last request."""
        if self._scenario.fail_every <= 0.0:
            return
        life, ends = worker.life, now + self._failures.expovariate(1.0 / self._scenario.fail_every)
        if ends < self._scenario.duration:
            self._at(ends, lambda then: self._die(worker, then) if worker.life == life else None)

    def _kill(self, kill: Kill, now: float) -> None:
        alive = [worker for worker in self._workers.values() if worker.alive]
        for worker in alive[: kill.workers]:
            self._die(worker, now)

    def _die(self, worker: _Worker, now: float) -> None:
        worker.alive = False
        worker.life += 1
        worker.died_at = now
        self._record.deaths += 1
        self._idle.pop(worker.name, None)
        departure, worker.departure = worker.departure, None
        if departure is not None:
            self._record.ran(departure.left_at, now - departure.left_at)
            self._fail(departure, now)
        self._queue.set_slots(self._queue.slots - 1)
        self._at(now + self._scenario.restart, partial(self._revive, worker))
        self._ring(now)

    def _revive(self, worker: _Worker, now: float) -> None:
        worker.alive = True
        self._record.was_down(worker.died_at, now)
        self._queue.set_slots(self._queue.slots + 1)
        self._plan_death(worker, now)
        self._free(worker, now)
