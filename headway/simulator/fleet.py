"""The simulated fleet: the queue and its workers, gateways, and their throttle. `engine` moves it.

    come ──▶ gathered ──send──▶ part ──▶ shard in turn
                 (at once, if the last call was long enough ago)

Gateways of a fleet divide the workers' room as their traffic divides. So one throttle, by the production rules, stands for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from headway.core.batch import Departure
from headway.core.batch_cost import BatchCost, is_news
from headway.core.capacity import capacity
from headway.core.departure import Load
from headway.core.queue import ModelQueue
from headway.core.shards import in_turn, parts
from headway.core.slot_pace import SlotPace
from headway.core.throttle import Throttle, room
from headway.model import CostLine, CostShape, Entry, WorkerInfo, WorkerStatus
from headway.simulator.scenario import Scenario

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


class Child:
    """Costs of calls as a worker's process learns them. It cuts batches of a model that pads into several calls."""

    __slots__ = ("_cost", "line")

    def __init__(self) -> None:
        self._cost = BatchCost()
        self.line: CostLine | None = None  # Line that it reported last; None before the first.

    def calls(self, weights: Sequence[int]) -> list[list[int]]:
        return [[weights[place] for place in call] for call in self._cost.calls(weights)]

    def ran(self, weights: Sequence[int], calls: Iterable[tuple[Sequence[int], float]]) -> bool:
        """Learn from a batch and the seconds of its calls. Returns True if there is something new to report."""
        self._cost.note_batch(weights)
        for call, seconds in calls:
            self._cost.observe(call, seconds)
        line = self._cost.line
        if not is_news(line, self.line) or (self.line is None and line.shape is CostShape.NUMBER):
            return False
        self.line = line
        return True


class Worker:
    """A GPU. `life` and `rest` count its lives and rests, so that events of earlier ones can be ignored."""

    __slots__ = (
        "alive", "child", "departure", "died_at", "home", "known", "life", "look", "name", "pace", "rest", "shard", "slow",
    )  # fmt: skip

    def __init__(self, name: str, home: Shard, slow: bool, pace: SlotPace) -> None:
        self.name = name
        self.known = True  # True while others think that it lives.
        self.pace = pace
        self.child = Child()
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
        """Take an entry. Return when to call `send`; None if that is planned already."""
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
        cost=worker.child.line,
    )
