"""Drives the production queue and policies from a heap of simulated events, without an event loop or a clock.

The queue is the one that brokers use, and is called in the same order. An arriving request is offered to the queue and wakes a
worker. A free worker claims a batch. If the policy holds the batch back, the worker goes idle and a timer is set. Only the outside
is simulated: when requests arrive, how long batches run, and which workers die.

    idle ──claim──▶ running ──answer──▶ idle
      │                │
      └──────die───────┴──▶ dead ──restart──▶ idle

Each shard has its own queue, policy and timer. A worker claims from its home shard; if idle, it sometimes looks at another."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from headway.core import batch_cost, shards
from headway.core.admission import Refused
from headway.core.batch_cost import Calls
from headway.core.capacity import capacity
from headway.core.departure import Departure, Hold, Load
from headway.core.fair_queue import QueuedEntry
from headway.core.health import DEGRADED_AFTER, HEARTBEAT_EVERY
from headway.core.queue import ModelQueue
from headway.core.service_model import WarmUpRun
from headway.core.shards import in_turn, parts
from headway.core.slot_factors import SlotPace
from headway.core.throttle import Throttle, room
from headway.model import Cause, CostLine, Entry, WorkerInfo, WorkerStatus
from headway.simulator.record import EXPIRED, FAILED, REFUSED, Record
from headway.simulator.scenario import Kill, Scenario
from headway.simulator.traffic import POISON, arrivals, bulk_lines, callers

Came = tuple[Entry, float]  # An entry, and when it reached its gateway.
SET_EVERY = 0.5  # Seconds between updates of the throttle's rate, as in gateways.


class Shard:
    """Part of the queue, with the idle workers that wait for it."""

    __slots__ = ("idle", "looks_at", "number", "policy", "queue")

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number = number
        self.queue = ModelQueue(scenario.limits())
        self.policy = scenario.make_policy()
        self.idle: dict[str, None] = {}
        self.looks_at = math.inf


class Worker:
    """A GPU. `life` and `rest` count its restarts and idle periods, so that events from earlier ones can be ignored."""

    __slots__ = (
        "alive", "child", "departure", "died_at", "home", "known", "life", "look", "name", "pace", "rest", "shard", "slow",
    )  # fmt: skip

    def __init__(self, name: str, home: Shard, slow: bool, pace: SlotPace) -> None:
        self.name = name
        self.known = True  # True while others think that it is alive.
        self.pace = pace
        self.child = Calls(whole=False)
        self.slow = slow
        self.life = self.rest = 0
        self.alive = True
        self.died_at = 0.0
        self.home = self.shard = home
        self.departure: Departure | None = None  # Batch from `shard` that it is running, or None if idle.
        self.look = 0  # Number of the shard that it looked at last.


class Gateway:
    """Simulated gateway. `turn` decides which shard it uses first."""

    __slots__ = ("_gather", "_max_batch", "_open_at", "_turn", "gathered")

    def __init__(self, scenario: Scenario, turn: int) -> None:
        self.gathered: list[Came] = []  # Entries waiting for the next call to the queue.
        self._gather = scenario.topology.gather
        self._max_batch = scenario.max_batch
        self._open_at = 0.0
        self._turn = turn

    def come(self, entry: Entry, now: float) -> float | None:
        """Accept an entry. Returns when to call `send`, or None if that is planned already."""
        self.gathered.append((entry, now))
        if now >= self._open_at:
            return now
        return now + self._gather if len(self.gathered) == 1 else None

    def send(self, slots: int, active: int, now: float) -> Iterator[tuple[int, list[Came]]]:
        """Yield the gathered entries by shard number. `slots` counts the live workers, and `active` the shards in use."""
        gathered, self.gathered = self.gathered, []
        self._open_at = now + self._gather
        count = parts(len(gathered), self._max_batch) if active > 1 or not slots else 1
        for number in range(count):
            yield in_turn(self._turn, slots, active), gathered[number::count]
            self._turn += 1


def choose_gateway(scenario: Scenario, rng: Callable[[], float]) -> Callable[[], Gateway]:
    """Return a function that picks the gateway of the next request at random. `rng` is uniform in [0, 1)."""
    count = scenario.topology.gateways
    gateways = [Gateway(scenario, int(rng() * scenario.workers)) for _ in range(count)]
    if count == 1:
        return lambda: gateways[0]
    return lambda: gateways[int(rng() * count)]


class LowestTierThrottle:
    """Throttle for the lowest of several tiers."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._lowest = len(scenario.mix) - 1
        self._throttle = Throttle()

    def refuses(self, entry: Entry, now: float) -> bool:
        """Return True if a request is refused for lack of capacity. Otherwise, count it."""
        if entry.tier < self._lowest:
            self._throttle.higher += 1
            return False
        return self._throttle.admit(entry.tenant, now) > 0.0

    def refund(self, entry: Entry) -> None:
        if entry.tier == self._lowest:
            self._throttle.refund(entry.tenant)

    def set_rate(self, workers: Iterable[Worker], load: Load, now: float) -> None:
        reports = [reported(worker, load.entry_size) for worker in workers]
        measured = capacity("", reports, load, self._scenario.queue.target_utilisation)
        flow = self._throttle.count(now)
        self._throttle.set_rate(room(measured, self._scenario.limits().reserved_share, [flow]), now)


def reported(worker: Worker, entry_size: float = 1.0) -> WorkerInfo:
    """Describe a worker as its heartbeat would."""
    return WorkerInfo(
        worker_id=worker.name,
        model="",
        status=WorkerStatus.HEALTHY if worker.alive else WorkerStatus.OFFLINE,
        items_per_second=worker.pace.items_per_second / entry_size,
        estimated=worker.pace.estimated,
        cost=worker.child.reported,
    )


REAP_EVERY = 1.0  # Maximum seconds between reaps, as in brokers.
LEASE_SECONDS = 3.0  # Seconds after which the batch of a dead host goes to another worker.
NOTICED_AFTER = DEGRADED_AFTER + 1.0  # Seconds until everyone has noticed a host's death and recounted the workers.
APART = 0.0001  # Seconds between the next requests of two clients that got their answers together.
_LOOKS_AT = attrgetter("looks_at")


def _rng(scenario: Scenario, purpose: str) -> random.Random:
    """Return the generator for one purpose. Each purpose has its own, so arrivals are the same under every policy."""
    return random.Random(f"{scenario.seed}/{purpose}")  # noqa: S311 - the same seed, the same run


def simulate(scenario: Scenario) -> Record:
    """Run a scenario until every request has an outcome. Raises SettingError if the scenario's trace has no rate."""
    return _Simulation(scenario).run()


class _Events:
    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []  # When to call which function with that time.
        self._order = itertools.count()

    def at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (time, next(self._order), act))


class _RunTimes:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = _rng(scenario, "noise")
        spread = math.log1p(scenario.jitter**2)
        self._log_mean, self._log_deviation = -spread / 2, math.sqrt(spread)

    def warm_up(self, slow: bool) -> tuple[WarmUpRun, ...]:
        scenario = self._scenario
        factor = scenario.faults.slow if slow else 1.0
        sizes = {1, scenario.max_batch} if not scenario.weights else ()
        return tuple((size, (scenario.alpha + scenario.beta * size) * factor) for size in sorted(sizes))

    def factor(self, slow: bool) -> float:
        """Draw the factor by which chance and a slow worker multiply the run time of a batch."""
        factor = self._scenario.faults.slow if slow else 1.0
        return factor * self._rng.lognormvariate(self._log_mean, self._log_deviation) if self._log_deviation else factor

    def seconds(self, weights: Sequence[int]) -> float:
        """Return the run time of a call before the factor of its batch is applied."""
        scenario = self._scenario
        if scenario.times is not None:
            return scenario.times.draw(weights, self._rng.random)
        if scenario.padded:
            return scenario.alpha + scenario.beta * len(weights) * max(weights)
        return scenario.alpha + scenario.beta * (sum(weights) if scenario.weights else len(weights))


class _Clients:
    """Creates requests, and passes them through the throttle and the gateways to the queue."""

    def __init__(self, simulation: _Simulation, scenario: Scenario) -> None:
        self._simulation, self._scenario = simulation, scenario
        self._record, self._events = simulation.record, simulation.events
        self._draw = callers(scenario, _rng(scenario, "callers"))
        self._choose_gateway = choose_gateway(scenario, _rng(scenario, "doors").random)
        self._throttle = LowestTierThrottle(scenario) if len(scenario.mix) > 1 else None
        self._straight = scenario.topology.gather == 0.0 and scenario.topology.shards == 1  # Gateways can be skipped.
        self.sending = 0  # Gateways that are about to send.
        self.closed = False  # True once the last request has come.

    def start(self) -> None:
        if self._throttle is not None:
            self._set_throttle(self._throttle, 0.0)
        self.send_more(self._scenario.clients, 0.0)

    def request(self, now: float) -> None:
        entry = self._draw()
        self._record.came(entry.tier, now)
        if self._throttle is not None and self._throttle.refuses(entry, now):
            self._lose("capacity", entry, now, now + SET_EVERY)
        elif self._straight:
            self._simulation.offer(self._simulation.shards[0], ((entry, now),), now)
        else:
            self._come(self._choose_gateway(), entry, now)

    def send_more(self, count: int, now: float) -> None:
        """Let `count` clients of a closed loop send their next requests, one after the other."""
        if self._scenario.clients:
            for number in range(count):
                self._events.at(now + number * APART, self._send_next)

    def refused(self, entry: Entry, came: float, result: Refused, now: float) -> None:
        if self._throttle is not None:
            self._throttle.refund(entry)
        self._lose("shed" if result.tier_only else "overloaded", entry, came, now + result.wait)

    def _send_next(self, now: float) -> None:
        if not self.closed:
            self.request(now)

    def _lose(self, reason: str, entry: Entry, came: float, again: float) -> None:
        """Record a refusal. The client sends its next request at `again`."""
        self._record.lose(REFUSED, reason, entry.tier, came)
        self.send_more(1, again)

    def _set_throttle(self, throttle: LowestTierThrottle, now: float) -> None:
        throttle.set_rate(self._simulation.workers.values(), self._simulation.shards[0].queue.load(now), now)
        if not self.closed:
            self._events.at(now + SET_EVERY, partial(self._set_throttle, throttle))

    def _come(self, gateway: Gateway, entry: Entry, now: float) -> None:
        sends_at = gateway.come(entry, now)
        if sends_at == now:
            self._simulation.send(gateway, now)
        elif sends_at is not None:
            self.sending += 1
            self._events.at(sends_at, partial(self._send_gathered, gateway))

    def _send_gathered(self, gateway: Gateway, now: float) -> None:
        self.sending -= 1
        self._simulation.send(gateway, now)


class _Deaths:
    def __init__(self, simulation: _Simulation, scenario: Scenario) -> None:
        self._simulation, self._scenario = simulation, scenario
        self._record, self._events = simulation.record, simulation.events
        self._rng = _rng(scenario, "failures")
        self.leases = 0  # Leases of dead workers that haven't expired yet.

    def start(self) -> None:
        for kill in self._scenario.faults.kills:
            self._events.at(kill.at, partial(self._kill, kill))
        for worker in self._simulation.workers.values():
            self._plan(worker, 0.0)

    def _plan(self, worker: Worker, now: float) -> None:
        """Draw when a worker dies next. No worker dies after the last request."""
        if self._scenario.faults.fail_every <= 0.0:
            return
        life, ends = worker.life, now + self._rng.expovariate(1.0 / self._scenario.faults.fail_every)
        if ends < self._scenario.duration:
            self._events.at(ends, lambda then: self._die(worker, then) if worker.life == life else None)

    def _kill(self, kill: Kill, now: float) -> None:
        alive = [worker for worker in self._simulation.workers.values() if worker.alive]
        for worker in alive[: kill.workers]:
            self._die(worker, now, kill.silent)

    def _die(self, worker: Worker, now: float, silent: bool = False) -> None:
        worker.alive = worker.known = False
        worker.life += 1
        worker.died_at = now
        self._record.died_at.append(now)
        worker.home.idle.pop(worker.name, None)
        departure, worker.departure = worker.departure, None
        if departure is not None:
            self._record.ran(departure.left_at, now - departure.left_at)
            if silent:
                self.leases += 1
                expires_at = max(departure.left_at + LEASE_SECONDS, now)
                self._events.at(expires_at, partial(self._take_back, worker.shard, departure))
            else:
                self._simulation.fail(worker.shard, departure, now, Cause.CRASHED)
        self._events.at(now + self._scenario.faults.restart, partial(self._revive, worker))
        if silent:
            worker.known = True
            self._events.at(now + NOTICED_AFTER, partial(self._notice, worker, worker.life))
        else:
            self._notice(worker, worker.life, now)

    def _take_back(self, shard: Shard, departure: Departure, now: float) -> None:
        self.leases -= 1
        self._simulation.fail(shard, departure, now, Cause.CRASHED)
        self._simulation.wake_idle(shard, now)

    def _notice(self, worker: Worker, life: int, now: float) -> None:
        if worker.life == life and not worker.alive:
            worker.known = False
            self._simulation.deal(now)
        for shard in self._simulation.shards:
            self._simulation.wake_idle(shard, now)

    def _revive(self, worker: Worker, now: float) -> None:
        worker.alive = worker.known = True
        self._record.was_down(worker.died_at, now)
        self._simulation.deal(now)
        self._plan(worker, now)
        self._simulation.free(worker, now)


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.record = Record(scenario)
        self.events = _Events()
        self._times = _RunTimes(scenario)
        self.shards = [Shard(number, scenario) for number in range(scenario.topology.shards)]
        self._active = 1  # Shards in use.
        self.workers: dict[str, Worker] = {}
        for number in range(scenario.workers):
            name, slow, pace = f"gpu-{number}", number == 0, SlotPace(scenario.max_batch)
            pace.warmed(self._times.warm_up(slow))
            self.workers[name] = Worker(name, self.shards[0], slow, pace)
        warm = self._times.warm_up(slow=False)
        for shard in self.shards:
            shard.queue.service.warm_up(warm)
        self._line: CostLine | None = None  # Cost line that the queues use to fill up batches.
        self._slots = 0
        self._came: dict[QueuedEntry, float] = {}  # When entries reached their gateway, if they were gathered there.
        self._looks_at = math.inf
        self._reap_at = 0.0
        self._retries = _rng(scenario, "retries").random
        self._lines = bulk_lines(scenario, _rng(scenario, "bulk"))
        self._clients = _Clients(self, scenario)
        self._deaths = _Deaths(self, scenario)

    def run(self) -> Record:
        scenario, heap = self._scenario, self.events.heap
        coming = arrivals(scenario, _rng(scenario, "arrivals"))
        self.deal(0.0)
        for worker in self.workers.values():
            self._go_idle(worker, 0.0)
        for shard in self.shards if scenario.bulk else ():
            self._feed(shard, 0.0)
            self.wake_idle(shard, 0.0)
        self._deaths.start()
        self._clients.start()
        if scenario.clients:
            self.events.at(float(scenario.duration), self._close)
        arrival = next(coming, math.inf)
        if arrival == math.inf and not scenario.clients:
            self._end_of_arrivals(0.0)
        while True:
            event = heap[0][0] if heap else math.inf
            soonest = min(event, self._looks_at, self._reap_at)
            if arrival <= soonest and arrival < math.inf:
                self._clients.request(arrival)
                now, arrival = arrival, next(coming, math.inf)
                if arrival == math.inf:
                    self._end_of_arrivals(now)
            elif soonest == math.inf:
                return self.record
            elif event == soonest:
                now, _, act = heapq.heappop(heap)
                act(now)
            elif self._looks_at == soonest:
                self.wake_idle(min(self.shards, key=_LOOKS_AT), soonest)
            else:
                self._reap(soonest)

    def _end_of_arrivals(self, now: float) -> None:
        """Handle the last arrival. Bulk entries keep coming until the end of the scenario."""
        if self._scenario.bulk:
            self.events.at(float(self._scenario.duration), self._close)
        else:
            self._close(now)

    def _close(self, now: float) -> None:
        """Record the queue's estimates, and accept no more requests."""
        loads = [shard.queue.load(now) for shard in self.shards[: self._active]]
        rate = math.fsum(load.rate for load in loads)
        self.record.estimates = (rate, loads[0].alpha, loads[0].beta, loads[0].deviation)
        self._clients.closed = True

    def deal(self, now: float) -> None:
        """Assign a home shard to each worker that the others believe to be alive."""
        alive = [worker.name for worker in self.workers.values() if worker.known]
        self._slots, self._active = len(alive), shards.active(len(self.shards), len(alive))
        at_home = dict[Shard, list[str]]((shard, []) for shard in self.shards)
        for name in alive:
            worker, home = self.workers[name], self.shards[shards.home(name, alive, self._active)]
            if worker.home is not home and name in worker.home.idle:
                del worker.home.idle[name]
                home.idle[name] = None
            worker.home = home
            at_home[home].append(name)
        for position, (shard, names) in enumerate(at_home.items()):
            shard.queue.set_slots(shards.slots_at(position, self._slots, self._active), names)

    def send(self, gateway: Gateway, now: float) -> None:
        for number, entries in gateway.send(self._slots, self._active, now):
            self.offer(self.shards[number], entries, now)

    def offer(self, shard: Shard, entries: Iterable[Came], now: float) -> None:
        for entry, came in entries:
            result = shard.queue.offer(entry, now)
            if isinstance(result, Refused):
                self._clients.refused(entry, came, result, now)
            elif came < now:
                self._came[result] = came
        if shard.idle:
            self.wake_idle(shard, now)

    def wake_idle(self, shard: Shard, now: float) -> None:
        """Let idle workers claim while there is something for them. Then set the timer for when there may be more."""
        idle, queue = shard.idle, shard.queue
        shard.looks_at = math.inf
        while idle:
            woken = queue.wake(idle, now)
            if not isinstance(woken, str):
                shard.looks_at = woken
                break
            del idle[woken]
            worker = self.workers[woken]
            if not self._claim(worker, shard, now):
                self._go_idle(worker, now)
        self._looks_at = shard.looks_at if len(self.shards) == 1 else min(map(_LOOKS_AT, self.shards))

    def free(self, worker: Worker, now: float) -> None:
        if not self._claim(worker, worker.home, now):
            self._go_idle(worker, now)
        self.wake_idle(worker.home, now)

    def _go_idle(self, worker: Worker, now: float) -> None:
        worker.rest += 1
        worker.home.idle[worker.name] = None
        if len(self.shards) > 1:
            self._look(worker, worker.rest, now)

    def _look(self, worker: Worker, rest: int, now: float) -> None:
        """Let an idle worker claim from the next shard, if that shard is behind. If still idle, look again later."""
        home = worker.home
        if worker.rest != rest or worker.name not in home.idle:
            return
        others = len(self.shards) - 1
        worker.look = (worker.look + 1) % others
        shard = self.shards[(home.number + 1 + worker.look) % len(self.shards)]
        behind = shards.behind(shard.queue.depth, shard.queue.slots, self._scenario.max_batch)
        if behind and not shard.idle and self._claim(worker, shard, now):
            del home.idle[worker.name]
        elif self._reap_at < math.inf:
            self.events.at(now + shards.LOOK_ELSEWHERE_EVERY, partial(self._look, worker, rest))

    def _claim(self, worker: Worker, shard: Shard, now: float) -> bool:
        self._expire(shard, now)
        self._feed(shard, now)
        departure = shard.queue.depart(worker.name, self._scenario.max_batch, shard.policy, now)
        if isinstance(departure, Hold):
            return False
        self._give_up(departure.late, now)
        worker.departure, worker.shard = departure, shard
        size = len(departure.members)
        factor = self._times.factor(worker.slow)
        weights = [member.entry.weight for member in departure.members]
        if self._scenario.pads:
            seconds = self._run_calls(worker, weights, factor, now)
        else:
            seconds = self._times.seconds(weights) * factor
        fill = departure.size / self._scenario.max_batch
        self.record.departed(size, departure.reason, now, shard.number, shard is not worker.home, fill)
        self.events.at(now + seconds + self._scenario.overhead, partial(self._answer, worker, worker.life, seconds))
        return True

    def _feed(self, shard: Shard, now: float) -> None:
        """Keep enough bulk entries waiting in a shard until the last request has come."""
        if self._scenario.bulk and not self._clients.closed:
            while shard.queue.offer_bulk(next(self._lines), now) is not None:
                pass

    def _run_calls(self, worker: Worker, weights: Sequence[int], factor: float, now: float) -> float:
        """Return the total time of the calls into which a worker best splits a batch. The worker learns from these times."""
        calls = [[weights[place] for place in places] for places in worker.child.parts(weights)]
        times = [self._times.seconds(call) * factor for call in calls]
        seconds = math.fsum(times)
        worker.child.ran_in_parts(weights, list(zip(calls, times, strict=True)))
        if worker.child.news() is not None:
            self.events.at(now + seconds + HEARTBEAT_EVERY, self._fill_up)
        return seconds

    def _fill_up(self, now: float) -> None:
        line = batch_cost.padded(map(reported, self.workers.values())).get("")
        if batch_cost.is_news(line, self._line):
            self._line = line
            for shard in self.shards:
                shard.queue.bound(self._scenario.limits().filling_up(line))

    def _answer(self, worker: Worker, life: int, seconds: float, now: float) -> None:
        departure = worker.departure
        if worker.life != life or departure is None:
            return
        worker.departure = None
        record, answered = self.record, 0
        record.ran(departure.left_at + self._scenario.overhead / 2, seconds)
        worker.pace.observe(departure.size, now - departure.left_at)
        if self._scenario.faults.poison and any(member.entry.input == POISON for member in departure.members):
            self.fail(worker.shard, departure, now, Cause.RAISED)
        else:
            answers = worker.shard.queue.finish(departure, now)
            others = len(answers) - departure.bulk
            record.bulk_answered(departure.bulk, now)
            for member in answers[:others]:
                if now > member.due:
                    self._lose(member, EXPIRED, "total", now)
                else:
                    record.answered(member.entry.tier, self._came.pop(member, member.arrived), now)
                    answered += 1
        self._clients.send_more(answered, now)
        self.free(worker, now)

    def _lose(self, member: QueuedEntry, kind: str, reason: str, now: float) -> None:
        self.record.lose(kind, reason, member.entry.tier, self._came.pop(member, member.arrived))
        self._clients.send_more(1, now)

    def fail(self, shard: Shard, departure: Departure, now: float, cause: Cause) -> None:
        after = shard.queue.fail(departure, cause, now, self._retries)
        self.record.retried += after.again
        for member in after.dead:
            self._lose(member, FAILED, "rejected", now)
        for member in after.spent:
            self._lose(member, FAILED, "budget", now)
        self._give_up(after.late, now)

    def _expire(self, shard: Shard, now: float) -> None:
        late = shard.queue.expire(now)
        if late:
            self._give_up(late, now)

    def _give_up(self, late: Iterable[QueuedEntry], now: float) -> None:
        for member in late:
            reason = "no_workers" if self._slots == 0 else "total" if member.attempts else "queue"
            self._lose(member, EXPIRED, reason, now)

    def _reap(self, now: float) -> None:
        for shard in self.shards:
            self._expire(shard, now)
        if self._clients.closed and self._scenario.bulk:
            for shard in self.shards:
                shard.queue.bulk = None
        waiting = self._clients.sending or self._deaths.leases or any(shard.queue.depth for shard in self.shards)
        if self._clients.closed and not waiting and all(w.departure is None for w in self.workers.values()):
            self._reap_at = math.inf
        else:
            due = min(shard.queue.next_due() for shard in self.shards)
            self._reap_at = min(now + REAP_EVERY, max(due, math.nextafter(now, math.inf)))
