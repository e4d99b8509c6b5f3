"""Drives the production queue and policies from a heap of virtual events, without event loop and clock.

The queue is the one that brokers use, called in the same order. An arrival is offered and wakes a worker. A free worker claims. If
it must hold, it goes idle and a timer is set. Only the outside is simulated: who comes, how long a batch runs, who dies.

    idle ──claim──▶ running ──answer──▶ idle
      │                │
      └──────die───────┴──▶ dead ──restart──▶ idle

Each shard of a queue has a queue, a policy and a timer of its own. A worker claims from its home shard, and now and then, while it
is idle, looks at another."""

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

Came = tuple[Entry, float]  # An entry, and when it came to its gateway.
SET_EVERY = 0.5  # Seconds after which the throttle's rate is set again, as in gateways.


class Shard:
    """Part of the queue, and the workers that wait for it."""

    __slots__ = ("idle", "looks_at", "number", "policy", "queue")

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number = number
        self.queue = ModelQueue(scenario.limits())
        self.policy = scenario.make_policy()
        self.idle: dict[str, None] = {}
        self.looks_at = math.inf


class Worker:
    """A GPU. `life` and `rest` count its lives and rests, so that events of earlier ones can be ignored."""

    __slots__ = (
        "alive", "child", "departure", "died_at", "home", "known", "life", "look", "name", "pace", "rest", "shard", "slow",
    )  # fmt: skip

    def __init__(self, name: str, home: Shard, slow: bool, pace: SlotPace) -> None:
        self.name = name
        self.known = True  # True while others think that it lives.
        self.pace = pace
        self.child = Calls(whole=False)
        self.slow = slow
        self.life = self.rest = 0
        self.alive = True
        self.died_at = 0.0
        self.home = self.shard = home
        self.departure: Departure | None = None  # Batch that it runs, from `shard`; None when idle.
        self.look = 0  # Number of the shard it looked at last.


class Gateway:
    """Simulated gateway. The number of the shard whose turn it is begins at `turn`."""

    __slots__ = ("_gather", "_max_batch", "_open_at", "_turn", "gathered")

    def __init__(self, scenario: Scenario, turn: int) -> None:
        self.gathered: list[Came] = []  # Entries that wait for the next call.
        self._gather = scenario.gather
        self._max_batch = scenario.max_batch
        self._open_at = 0.0
        self._turn = turn

    def come(self, entry: Entry, now: float) -> float | None:
        """Take an entry. Returns the instant at which to call `send`; None if that is planned already."""
        self.gathered.append((entry, now))
        if now >= self._open_at:
            return now
        return now + self._gather if len(self.gathered) == 1 else None

    def send(self, slots: int, active: int, now: float) -> Iterator[tuple[int, list[Came]]]:
        """Send the gathered entries. Yields shards by number with their entries. `slots` workers live, `active` shards serve."""
        gathered, self.gathered = self.gathered, []
        self._open_at = now + self._gather
        count = parts(len(gathered), self._max_batch) if active > 1 or not slots else 1
        for number in range(count):
            yield in_turn(self._turn, slots, active), gathered[number::count]
            self._turn += 1


def choose_gateway(scenario: Scenario, rng: Callable[[], float]) -> Callable[[], Gateway]:
    """Return a function that draws the gateway of the next request. `rng` is uniform in [0, 1)."""
    count = scenario.gateways
    gateways = [Gateway(scenario, int(rng() * scenario.workers)) for _ in range(count)]
    if count == 1:
        return lambda: gateways[0]
    return lambda: gateways[int(rng() * count)]


class LowestTierThrottle:
    """Throttle of the lowest of several tiers."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._lowest = len(scenario.mix) - 1
        self._throttle = Throttle()

    def refuses(self, entry: Entry, now: float) -> bool:
        """Return True if a request is refused for lack of capacity; else count it."""
        if entry.tier < self._lowest:
            self._throttle.higher += 1
            return False
        return self._throttle.admit(entry.tenant, now) > 0.0

    def refund(self, entry: Entry) -> None:
        if entry.tier == self._lowest:
            self._throttle.refund(entry.tenant)

    def set_rate(self, workers: Iterable[Worker], load: Load, now: float) -> None:
        reports = [reported(worker, load.entry_size) for worker in workers]
        measured = capacity("", reports, load, self._scenario.target_utilisation)
        flow = self._throttle.count(now)
        self._throttle.set_rate(room(measured, self._scenario.reserved_share, [flow]), now)


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


REAP_EVERY = 1.0  # Most seconds between two reaps, as in brokers.
LEASE_SECONDS = 3.0  # Seconds after which the batch of a dead host goes to others.
NOTICED_AFTER = DEGRADED_AFTER + 1.0  # Seconds until everybody has noticed a host's death, and counted workers again.
APART = 0.0001  # Seconds between requests of two clients that got their answers together.
Choose = Callable[[Sequence[int], float], int]  # Picks a shard by the entries that wait in each shard in use, and time.
_LOOKS_AT = attrgetter("looks_at")


def simulate(scenario: Scenario, choose: Choose | None = None) -> Record:
    """Run a scenario until every request has its outcome, and let `choose` pick shards for entries, for contrast with the
    production rule. Raises SettingError if its trace has no rate."""
    return _Simulation(scenario, choose).run()


class _Simulation:
    def __init__(self, scenario: Scenario, choose: Choose | None) -> None:
        self._scenario = scenario
        self._choose = choose
        self._record = Record(scenario)
        self._shards = [Shard(number, scenario) for number in range(scenario.shards)]
        self._active = 1  # Shards in use.
        names = [f"gpu-{number}" for number in range(scenario.workers)]
        self._workers = {name: self._worker(name, slow=number == 0) for number, name in enumerate(names)}
        warm = self._warm_up(slow=False)
        for shard in self._shards:
            shard.queue.service.warm_up(warm)
        self._throttle = LowestTierThrottle(scenario) if len(scenario.mix) > 1 else None
        self._line: CostLine | None = None  # Line by which the queues fill up batches.
        self._slots = 0
        self._came: dict[QueuedEntry, float] = {}  # When entries came that then gathered in their gateway.
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._looks_at = math.inf
        self._reap_at = 0.0
        self._closed = False
        self._sending = 0  # Gateways about to send.
        self._leases = 0  # Leases of workers whose death nobody has noticed.
        self._failures = self._rng("failures")
        self._retries = self._rng("retries").random
        self._noise = self._rng("noise")
        self._draw = callers(scenario, self._rng("callers"))
        self._choose_gateway = choose_gateway(scenario, self._rng("doors").random)
        self._lines = bulk_lines(scenario, self._rng("bulk"))
        # True if nothing tells gateways apart, so that requests can be offered at once, which saves time.
        self._straight = scenario.gather == 0.0 and scenario.shards == 1
        spread = math.log1p(scenario.jitter**2)
        self._log_mean, self._log_deviation = -spread / 2, math.sqrt(spread)

    def _worker(self, name: str, slow: bool) -> Worker:
        pace = SlotPace(self._scenario.max_batch)
        pace.warmed(self._warm_up(slow))
        return Worker(name, self._shards[0], slow, pace)

    def _warm_up(self, slow: bool) -> tuple[WarmUpRun, ...]:
        scenario = self._scenario
        factor = scenario.slow if slow else 1.0
        sizes = {1, scenario.max_batch} if not scenario.weights else ()
        return tuple((size, (scenario.alpha + scenario.beta * size) * factor) for size in sorted(sizes))

    def run(self) -> Record:
        scenario, record, heap = self._scenario, self._record, self._heap
        coming = arrivals(scenario, self._rng("arrivals"))
        self._deal(0.0)
        for worker in self._workers.values():
            self._go_idle(worker, 0.0)
        for shard in self._shards if scenario.bulk else ():
            self._feed(shard, 0.0)
            self._wake_idle(shard, 0.0)
        self._plan_deaths()
        if self._throttle is not None:
            self._set_throttle(self._throttle, 0.0)
        if scenario.clients:
            self._let_send(scenario.clients, 0.0)
            self._at(float(scenario.duration), self._close)
        arrival = next(coming, math.inf)
        if arrival == math.inf and not scenario.clients:
            self._end_of_arrivals(0.0)
        while True:
            event = heap[0][0] if heap else math.inf
            soonest = min(event, self._looks_at, self._reap_at)
            if arrival <= soonest and arrival < math.inf:
                self._request(arrival)
                now, arrival = arrival, next(coming, math.inf)
                if arrival == math.inf:
                    self._end_of_arrivals(now)
            elif soonest == math.inf:
                return record
            elif event == soonest:
                now, _, act = heapq.heappop(heap)
                act(now)
            elif self._looks_at == soonest:
                self._wake_idle(min(self._shards, key=_LOOKS_AT), soonest)
            else:
                self._reap(soonest)

    def _request(self, now: float) -> None:
        entry = self._draw()
        self._record.came(entry.tier, now, entry.input == POISON)
        if self._throttle is not None and self._throttle.refuses(entry, now):
            self._lose_at_once("capacity", entry, now, now + SET_EVERY)
        elif self._straight:
            self._offer(self._shards[0], ((entry, now),), now)
        else:
            self._come(self._choose_gateway(), entry, now)

    def _send_next(self, now: float) -> None:
        if not self._closed:
            self._request(now)

    def _let_send(self, count: int, now: float) -> None:
        """Let `count` clients of a closed loop send their next requests, one after the other."""
        if self._scenario.clients:
            for number in range(count):
                self._at(now + number * APART, self._send_next)

    def _lose_at_once(self, reason: str, entry: Entry, came: float, again: float) -> None:
        """Note a refusal. The client sends its next request at `again`."""
        self._record.lose(REFUSED, reason, entry.tier, came, entry.input == POISON)
        self._let_send(1, again)

    def _rng(self, purpose: str) -> random.Random:
        """Return a source of randomness for one purpose, so that another policy gets the same arrivals."""
        return random.Random(f"{self._scenario.seed}/{purpose}")  # noqa: S311 - the same seed, the same run

    def _at(self, instant: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (instant, next(self._order), act))

    def _end_of_arrivals(self, now: float) -> None:
        """Note that no further request comes. Bulk entries still do, until the end."""
        if self._scenario.bulk:
            self._at(float(self._scenario.duration), self._close)
        else:
            self._close(now)

    def _close(self, now: float) -> None:
        """Note that the last request has come, and record the estimates of the queue."""
        loads = [shard.queue.load(now) for shard in self._shards[: self._active]]
        rate = math.fsum(load.rate for load in loads)
        self._record.estimates = (rate, loads[0].alpha, loads[0].beta, loads[0].deviation)
        self._closed = True

    def _set_throttle(self, throttle: LowestTierThrottle, now: float) -> None:
        throttle.set_rate(self._workers.values(), self._shards[0].queue.load(now), now)
        if not self._closed:
            self._at(now + SET_EVERY, partial(self._set_throttle, throttle))

    def _deal(self, now: float) -> None:
        """Assign each worker that is known to be alive to its home shard."""
        alive = [worker.name for worker in self._workers.values() if worker.known]
        self._slots, self._active = len(alive), shards.active(len(self._shards), len(alive))
        at_home = dict[Shard, list[str]]((shard, []) for shard in self._shards)
        for name in alive:
            worker, home = self._workers[name], self._shards[shards.home(name, alive, self._active)]
            if worker.home is not home and name in worker.home.idle:
                del worker.home.idle[name]
                home.idle[name] = None
            worker.home = home
            at_home[home].append(name)
        for position, (shard, names) in enumerate(at_home.items()):
            shard.queue.set_slots(shards.slots_at(position, self._slots, self._active), names)

    def _come(self, gateway: Gateway, entry: Entry, now: float) -> None:
        sends_at = gateway.come(entry, now)
        if sends_at == now:
            self._send(gateway, now)
        elif sends_at is not None:
            self._sending += 1
            self._at(sends_at, partial(self._send_gathered, gateway))

    def _send_gathered(self, gateway: Gateway, now: float) -> None:
        self._sending -= 1
        self._send(gateway, now)

    def _send(self, gateway: Gateway, now: float) -> None:
        choose = self._choose
        used = self._shards[: self._active]
        for number, entries in gateway.send(self._slots, self._active, now):
            shard = used[number if choose is None else choose([other.queue.depth for other in used], now)]
            self._offer(shard, entries, now)

    def _offer(self, shard: Shard, entries: Iterable[Came], now: float) -> None:
        for entry, came in entries:
            result = shard.queue.offer(entry, now)
            if isinstance(result, Refused):
                reason = "shed" if result.tier_only else "overloaded"
                if self._throttle is not None:
                    self._throttle.refund(entry)
                self._lose_at_once(reason, entry, came, now + result.wait)
            elif came < now:
                self._came[result] = came
        if shard.idle:
            self._wake_idle(shard, now)

    def _wake_idle(self, shard: Shard, now: float) -> None:
        """Let idle workers claim while there is something for them. Then set the timer to the next instant at which there may be
        more."""
        idle, queue = shard.idle, shard.queue
        shard.looks_at = math.inf
        while idle:
            woken = queue.wake(idle, now)
            if not isinstance(woken, str):
                shard.looks_at = woken
                break
            del idle[woken]
            worker = self._workers[woken]
            if not self._claim(worker, shard, now):
                self._go_idle(worker, now)
        self._looks_at = shard.looks_at if len(self._shards) == 1 else min(map(_LOOKS_AT, self._shards))

    def _free(self, worker: Worker, now: float) -> None:
        if not self._claim(worker, worker.home, now):
            self._go_idle(worker, now)
        self._wake_idle(worker.home, now)

    def _go_idle(self, worker: Worker, now: float) -> None:
        worker.rest += 1
        worker.home.idle[worker.name] = None
        if len(self._shards) > 1:
            self._look(worker, worker.rest, now)

    def _look(self, worker: Worker, rest: int, now: float) -> None:
        """Let an idle worker claim from the next other shard if that is behind, and look again later while it rests."""
        home = worker.home
        if worker.rest != rest or worker.name not in home.idle:
            return
        others = len(self._shards) - 1
        worker.look = (worker.look + 1) % others
        shard = self._shards[(home.number + 1 + worker.look) % len(self._shards)]
        behind = shards.behind(shard.queue.depth, shard.queue.slots, self._scenario.max_batch)
        if behind and not shard.idle and self._claim(worker, shard, now):
            del home.idle[worker.name]
        elif self._reap_at < math.inf:
            self._at(now + shards.LOOK_ELSEWHERE_EVERY, partial(self._look, worker, rest))

    def _claim(self, worker: Worker, shard: Shard, now: float) -> bool:
        self._expire(shard, now)
        self._feed(shard, now)
        departure = shard.queue.depart(worker.name, self._scenario.max_batch, shard.policy, now)
        if isinstance(departure, Hold):
            return False
        self._give_up(departure.late, now)
        worker.departure, worker.shard = departure, shard
        size = len(departure.members)
        factor = self._scenario.slow if worker.slow else 1.0
        if self._log_deviation:
            factor *= self._noise.lognormvariate(self._log_mean, self._log_deviation)
        weights = [member.entry.weight for member in departure.members]
        if self._scenario.pads:
            seconds = self._run_calls(worker, weights, factor, now)
        else:
            seconds = self._seconds(weights) * factor
        fill = departure.size / self._scenario.max_batch
        self._record.departed(size, departure.reason, now, shard.number, shard is not worker.home, fill)
        life = worker.life
        ends = now + seconds + self._scenario.overhead
        self._at(ends, partial(self._answer, worker, life, seconds))
        return True

    def _feed(self, shard: Shard, now: float) -> None:
        """Keep enough bulk entries waiting in a shard until the last request has come."""
        if self._scenario.bulk and not self._closed:
            while shard.queue.offer_bulk(next(self._lines), now) is not None:
                pass

    def _run_calls(self, worker: Worker, weights: Sequence[int], factor: float, now: float) -> float:
        """Return the run time of a batch in as many calls as its worker finds best. The worker learns from them."""
        calls = [[weights[place] for place in places] for places in worker.child.parts(weights)]
        times = [self._seconds(call) * factor for call in calls]
        seconds = math.fsum(times)
        worker.child.ran_in_parts(weights, list(zip(calls, times, strict=True)))
        if worker.child.news() is not None:
            self._at(now + seconds + HEARTBEAT_EVERY, self._fill_up)
        return seconds

    def _fill_up(self, now: float) -> None:
        line = batch_cost.padded(map(reported, self._workers.values())).get("")
        if batch_cost.is_news(line, self._line):
            self._line = line
            for shard in self._shards:
                shard.queue.bound(self._scenario.limits().filling_up(line))

    def _seconds(self, weights: Sequence[int]) -> float:
        """Return the run time of a call, before what a slow worker or chance adds."""
        scenario = self._scenario
        if scenario.times is not None:
            return scenario.times.draw(weights, self._noise.random)
        if scenario.padded:
            return scenario.alpha + scenario.beta * len(weights) * max(weights)
        return scenario.alpha + scenario.beta * (sum(weights) if scenario.weights else len(weights))

    def _answer(self, worker: Worker, life: int, seconds: float, now: float) -> None:
        departure = worker.departure
        if worker.life != life or departure is None:
            return
        worker.departure = None
        record, answered = self._record, 0
        record.ran(departure.left_at + self._scenario.overhead / 2, seconds)
        worker.pace.observe(departure.size, now - departure.left_at)
        if self._scenario.poison and any(member.entry.input == POISON for member in departure.members):
            self._fail(worker.shard, departure, now, Cause.RAISED)
        else:
            answers = worker.shard.queue.finish(departure, now)
            others = len(answers) - departure.bulk
            record.bulk_answered(departure.bulk, now)
            for member in answers[:others]:
                if now > member.due:
                    self._lose(member, EXPIRED, "total", now)
                else:
                    record.answered(member.entry.tier, self._since(member), now)
                    answered += 1
        self._let_send(answered, now)
        self._free(worker, now)

    def _since(self, member: QueuedEntry) -> float:
        """Return the instant at which an entry that has ended came to its gateway."""
        return self._came.pop(member, member.arrived)

    def _lose(self, member: QueuedEntry, kind: str, reason: str, now: float) -> None:
        entry = member.entry
        self._record.lose(kind, reason, entry.tier, self._since(member), entry.input == POISON)
        self._let_send(1, now)

    def _fail(self, shard: Shard, departure: Departure, now: float, cause: Cause) -> None:
        after = shard.queue.fail(departure, cause, now, self._retries)
        self._record.retried += after.again
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
        for shard in self._shards:
            self._expire(shard, now)
        if self._closed and self._scenario.bulk:
            for shard in self._shards:
                shard.queue.bulk = None
        waiting = self._sending or self._leases or any(shard.queue.depth for shard in self._shards)
        if self._closed and not waiting and all(w.departure is None for w in self._workers.values()):
            self._reap_at = math.inf
        else:
            due = min(shard.queue.next_due() for shard in self._shards)
            self._reap_at = min(now + REAP_EVERY, max(due, math.nextafter(now, math.inf)))

    def _plan_deaths(self) -> None:
        for kill in self._scenario.kills:
            self._at(kill.at, partial(self._kill, kill))
        for worker in self._workers.values():
            self._plan_death(worker, 0.0)

    def _plan_death(self, worker: Worker, now: float) -> None:
        """Draw when this life of a worker ends. No worker dies after the last request."""
        if self._scenario.fail_every <= 0.0:
            return
        life, ends = worker.life, now + self._failures.expovariate(1.0 / self._scenario.fail_every)
        if ends < self._scenario.duration:
            self._at(ends, lambda then: self._die(worker, then) if worker.life == life else None)

    def _kill(self, kill: Kill, now: float) -> None:
        alive = [worker for worker in self._workers.values() if worker.alive]
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
                self._leases += 1
                self._at(max(departure.left_at + LEASE_SECONDS, now), partial(self._take_back, worker.shard, departure))
            else:
                self._fail(worker.shard, departure, now, Cause.CRASHED)
        self._at(now + self._scenario.restart, partial(self._revive, worker))
        if silent:
            worker.known = True
            self._at(now + NOTICED_AFTER, partial(self._notice, worker, worker.life))
        else:
            self._notice(worker, worker.life, now)

    def _take_back(self, shard: Shard, departure: Departure, now: float) -> None:
        self._leases -= 1
        self._fail(shard, departure, now, Cause.CRASHED)
        self._wake_idle(shard, now)

    def _notice(self, worker: Worker, life: int, now: float) -> None:
        if worker.life == life and not worker.alive:
            worker.known = False
            self._deal(now)
        for shard in self._shards:
            self._wake_idle(shard, now)

    def _revive(self, worker: Worker, now: float) -> None:
        worker.alive = worker.known = True
        self._record.was_down(worker.died_at, now)
        self._deal(now)
        self._plan_death(worker, now)
        self._free(worker, now)
