"""Simulation of several models on GPUs that can't hold all of them.

It drives the production rules (`core.locality`) and queues (`core.queue`) from a heap of virtual times. It simulates the environment: arrivals for
each model, and the time of batches and loads. While a GPU loads one model, it runs batches of its others.

    arrival ──▶ queue of its model ──▶ idle GPU where that is warm ──▶ answer, and the next batch of any model that is warm there
    look, twice a second ──▶ loads, each with the eviction that makes room for it ──▶ warm
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headway.core import policies
from headway.core.admission import Refused
from headway.core.departure import Departure, Hold
from headway.core.locality import Asked, FairOrder, Move, Placement, contender
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Entry

CHECK_LOADS_EVERY = 0.5
"""Seconds between two decisions about what to load, as in a serving process."""
GRAIN = 0.001
"""Minimum seconds of a timer, because event loops count in milliseconds."""
RATE_TIME = 1.0
"""Time constant of the arrival rate in seconds, as in `core.service_model`."""
USE_TIME = 3.0
"""Time constant in seconds of each model's share of a GPU."""


@dataclass(frozen=True, slots=True)
class WarmScenario:
    """Scenario of a simulation.

    Attributes:
        models: names of the models.
        gpus: number of GPUs.
        room: models that fit on a GPU.
        load_seconds: seconds of a load.
        alpha, beta: seconds of a batch, and additional seconds for each entry.
        max_batch: maximum entries of a batch.
        timeout: seconds after which a request is given up.
        policy: name of the departure policy.
        min_warm: minimum warm copies of each model.
        warmup: seconds at the start whose requests don't count in the latencies.
        look_every: seconds between two decisions about what to load.
    """

    models: Sequence[str]
    gpus: int
    room: int
    load_seconds: float
    alpha: float
    beta: float
    max_batch: int
    timeout: float
    policy: str = "paced"
    min_warm: int = 0
    warmup: float = 0.0
    look_every: float = CHECK_LOADS_EVERY

    @property
    def entry_seconds(self) -> float:
        return self.alpha / self.max_batch + self.beta


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that has begun: its time, and the move."""

    at: float
    move: Move


@dataclass(slots=True)
class WarmRecord:
    """Record of a simulation: all loads, latencies in seconds by whether the model was warm somewhere, the longest wait and the
    losses of each model, and GPU seconds of batches."""

    loads: list[Loaded] = field(default_factory=list)
    warm: array[float] = field(default_factory=lambda: array("d"))
    cold: array[float] = field(default_factory=lambda: array("d"))
    longest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    busy: float = 0.0


Arrival = tuple[float, str]
"""Time of a request, and the name of its model."""


def simulate_warm(scenario: WarmScenario, arrivals: Iterable[Arrival]) -> WarmRecord:
    return _Simulation(scenario).run(arrivals)


class _Gpu:
    """A GPU. `model` and `departure` belong to the running batch."""

    __slots__ = ("departure", "model", "name", "turns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns = FairOrder()
        self.model = ""
        self.departure: Departure | None = None


class _Simulation:
    def __init__(self, scenario: WarmScenario) -> None:
        self._scenario = scenario
        limits = QueueLimits(tiers=1, max_batch=scenario.max_batch)
        self._queues = {model: ModelQueue(limits) for model in scenario.models}
        self._policies = {model: policies.build(scenario.policy, None) for model in scenario.models}
        self._gpus = {name: _Gpu(name) for name in (f"gpu-{number}" for number in range(scenario.gpus))}
        self._placement = Placement(tuple(self._gpus), scenario.room, dict.fromkeys(scenario.models, scenario.min_warm))
        self._homes: dict[str, dict[str, None]] = {model: {} for model in scenario.models}
        self._leaving: dict[tuple[str, str], Move] = {}
        """Moves that wait for the last batch of the evicted model, by GPU and that model."""
        self._came: dict[str, int] = dict.fromkeys(scenario.models, 0)
        self._rates = dict.fromkeys(scenario.models, 0.0)
        self._had: defaultdict[tuple[str, str], float] = defaultdict(float)
        """GPU seconds of each model since the last look, by GPU and model."""
        self._used: dict[tuple[str, str], float] = {}
        self._timers = dict.fromkeys(scenario.models, math.inf)
        self._was_warm: dict[str, bool] = {}
        self._record = WarmRecord()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._ids = itertools.count()
        self._closed = False

    def run(self, arrivals: Iterable[Arrival]) -> WarmRecord:
        for move in self._placement.first():
            self._begin(move, 0.0)
        self._at(self._scenario.look_every, self._look)
        coming = iter(arrivals)
        arrival = next(coming, None)
        heap = self._heap
        while arrival is not None or heap:
            if arrival is not None and (not heap or arrival[0] <= heap[0][0]):
                now, model = arrival
                self._come(model, now)
                arrival = next(coming, None)
                self._closed = arrival is None
            else:
                now, _, act = heapq.heappop(heap)
                act(now)
        return self._record

    def _at(self, instant: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (instant, next(self._order), act))

    def _come(self, model: str, now: float) -> None:
        self._came[model] += 1
        id = str(next(self._ids))
        timeout = self._scenario.timeout
        offered = self._queues[model].offer(Entry(id, model, "", 0, "t", "g", timeout, timeout), now)
        if isinstance(offered, Refused):
            self._record.lost[model] += 1
            return
        self._was_warm[id] = bool(self._homes[model])
        self._wake(model, now)

    def _wake(self, model: str, now: float) -> None:
        """Let idle GPUs claim the due batches of a model, then set a timer for when the next may be due."""
        queue = self._queues[model]
        while idle := {name: None for name in self._homes[model] if self._gpus[name].departure is None}:
            found = queue.wake(idle, now)
            again = self._claim(self._gpus[found], model, now) if isinstance(found, str) else found
            if again is not None:
                self._set_timer(model, again, now)
                return

    def _set_timer(self, model: str, at: float, now: float) -> None:
        at = max(at, now + GRAIN)
        if at < self._timers[model]:
            self._timers[model] = at
            self._at(at, partial(self._ring, model))

    def _ring(self, model: str, now: float) -> None:
        if self._timers[model] <= now:
            self._timers[model] = math.inf
            self._expire(model, now)
            self._wake(model, now)

    def _claim(self, gpu: _Gpu, model: str, now: float) -> float | None:
        """Let a GPU take the batch of a model that leaves now. If none does, returns when to look again."""
        self._expire(model, now)
        scenario = self._scenario
        departure = self._queues[model].depart(gpu.name, scenario.max_batch, self._policies[model], now)
        if isinstance(departure, Hold):
            return departure.until
        self._give_up(model, departure.late)
        gpu.model, gpu.departure = model, departure
        gpu.turns.began(model)
        seconds = scenario.alpha + scenario.beta * len(departure.members)
        self._record.busy += seconds
        self._at(now + seconds, partial(self._answer, gpu, seconds))
        return None

    def _answer(self, gpu: _Gpu, seconds: float, now: float) -> None:
        model, departure = gpu.model, gpu.departure
        if departure is None:
            raise RuntimeError(f"{gpu.name} answers no batch")
        gpu.departure = None
        gpu.turns.ended(model, seconds)
        self._had[gpu.name, model] += seconds
        record = self._record
        for member in self._queues[model].finish(departure, now):
            waited = now - member.arrived
            was_warm = self._was_warm.pop(member.entry.id)
            if member.arrived >= self._scenario.warmup:
                (record.warm if was_warm else record.cold).append(waited)
            record.longest[model] = max(record.longest[model], waited)
        move = self._leaving.pop((gpu.name, model), None)
        if move is not None:
            self._load(move, now)
        self._free(gpu, now)

    def _free(self, gpu: _Gpu, now: float) -> None:
        warm = [model for model, homes in self._homes.items() if gpu.name in homes]
        waiting = [contender(model, self._queues[model], now) for model in warm if self._queues[model].depth]
        for model in gpu.turns.order(waiting):
            if self._claim(gpu, model, now) is None:
                break
        for one in waiting:
            self._wake(one.model, now)

    def _look(self, now: float) -> None:
        """Decide what to load, while requests may still arrive."""
        every = self._scenario.look_every
        for model in self._queues:
            self._rates[model] += (self._came[model] / every - self._rates[model]) * min(every / RATE_TIME, 1.0)
            self._came[model] = 0
            self._expire(model, now)
            self._count(model)
        for key in self._had.keys() | self._used.keys():
            used = self._used.get(key, 0.0)
            self._used[key] = used + (self._had.pop(key, 0.0) / every - used) * min(every / USE_TIME, 1.0)
        batch, entry = self._scenario.max_batch, self._scenario.entry_seconds
        asked = {model: Asked(self._rates[model], queue.depth, batch, entry) for model, queue in self._queues.items()}
        for move in self._placement.look(asked, self._used, now):
            self._begin(move, now)
        if not self._closed or any(queue.depth for queue in self._queues.values()):
            self._at(now + self._scenario.look_every, self._look)

    def _begin(self, move: Move, now: float) -> None:
        """Begin a move. The evicted model leaves as soon as its batch is done."""
        self._record.loads.append(Loaded(now, move))
        if not move.evicts:
            self._load(move, now)
            return
        self._homes[move.evicts].pop(move.gpu)
        self._count(move.evicts)
        gpu = self._gpus[move.gpu]
        if gpu.departure is not None and gpu.model == move.evicts:
            self._leaving[move.gpu, move.evicts] = move
        else:
            self._load(move, now)

    def _load(self, move: Move, now: float) -> None:
        if move.evicts:
            self._gpus[move.gpu].turns.forget(move.evicts)
        self._at(now + self._scenario.load_seconds, partial(self._loaded, move))

    def _loaded(self, move: Move, now: float) -> None:
        self._placement.loaded(move.gpu, move.model, self._scenario.load_seconds, now)
        self._homes[move.model][move.gpu] = None
        scenario = self._scenario
        sizes = (1, scenario.max_batch)
        self._queues[move.model].service.warm_up([(size, scenario.alpha + scenario.beta * size) for size in sizes])
        self._count(move.model)
        self._wake(move.model, now)

    def _count(self, model: str) -> None:
        homes = self._homes[model]
        self._queues[model].set_slots(len(homes), homes, self._placement.capacity(model))

    def _expire(self, model: str, now: float) -> None:
        self._give_up(model, self._queues[model].expire(now))

    def _give_up(self, model: str, late: Iterable[object]) -> None:
        for _ in late:
            self._record.lost[model] += 1
