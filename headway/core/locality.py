"""Placement and turns on GPUs that can't hold all models at a time. Shared by the serving processes and the simulator.

Placement decides which GPU loads which model, and which model makes room for it, by demand and by how long loads take.

    cold ──load──▶ loading ──loaded──▶ warm ──evicted for another──▶ cold
      ▲               │
      └────failed─────┘ (after a pause, which doubles), or given up for another once it is overdue

Requests are claimed only where their model is warm. A model is loaded for one of these reasons:

    min_warm   it has fewer copies than it should keep
    cold       it has requests and no copy
    busy       waiting for its copies has cost more than a load takes (ski rental: at most about twice as many loads
               as hindsight would make)

A model loads on one GPU at a time, and a GPU loads one model at a time. A load that takes far longer than expected is overdue. It
continues, but no longer delays the GPU's other loads, and is given up if a cold model with requests needs the room.

The coldest copy whose residence is over makes room: first a copy that its model can do without, then the copy with the least
heat. A cold model with less demand than every candidate replaces the coldest only once its patience runs out, so that nobody
waits for ever. Its patience is the time of a load, plus the longest residence among this model and the copies that must still
stay. A client that is refused and asks again after at most LEAST_MEMORY seconds counts as waiting all along.

Demand is measured in GPU seconds per second, at the cost of an input in a full batch, so that cheap and expensive models can be
compared. Refused requests count: a model that refuses requests for lack of GPUs needs them most.

Turns decide whose batch a GPU runs next. Each model has a virtual time: the GPU seconds it has used since it last began to wait
(start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM 1996). The model with the lowest goes first, so a flood for one model costs
another at most the running batch. If two models are about level, the more urgent goes first: the one whose most urgent entry has the
least slack, relative to the run time of its batch. Urgency isn't enough, because a flooded model is always late."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.core.queue import ModelQueue

LEAD = 0.5  # Two virtual times count as level up to this difference, in run times of the shorter batch.


class Contender(msgspec.Struct, frozen=True):
    """Model that is waiting for the GPU."""

    model: str
    slack: float = math.inf  # Seconds until its most urgent entry would be late; infinite if unknown.
    seconds: float = 0.0  # Expected run time of its next batch; 0 if unknown.
    waits: bool = True  # True if entries are waiting, as far as is known.

    @property
    def urgency(self) -> float:
        """Slack, as a multiple of the batch's run time. The smaller, the more urgent."""
        return self.slack / self.seconds if self.seconds > 0.0 else self.slack


def contender(model: str, queue: ModelQueue, now: float) -> Contender:
    """Return a model as a contender for a GPU, with the slack and run time of its next batch at time `now`."""
    size = min(queue.depth, queue.limits.max_batch)
    return Contender(model, queue.next_due() - now, queue.service.seconds(size), queue.depth > 0)


class FairOrder:
    """Order in which models get one GPU."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}  # Virtual time at which each model's last batch ended.
        self._now = 0.0  # Virtual time at which the last batch started.

    def order(self, contenders: Collection[Contender]) -> list[str]:
        """Return the order in which to ask models for a batch. The first with a due batch runs it. Models without entries come last."""
        if not contenders:
            return []
        starts = {rival.model: self._start(rival.model) for rival in contenders}
        waiting = [rival for rival in contenders if rival.waits] or contenders
        even = min(starts[rival.model] for rival in waiting) + LEAD * min(rival.seconds for rival in waiting)

        def rank(rival: Contender) -> tuple[bool, float, float, str]:
            start = starts[rival.model]
            return not rival.waits, -math.inf if start <= even else start, rival.urgency, rival.model

        return [rival.model for rival in sorted(contenders, key=rank)]

    def began(self, model: str) -> None:
        self._now = self._had[model] = self._start(model)

    def ended(self, model: str, seconds: float) -> None:
        self._had[model] = self._had.get(model, self._now) + seconds

    def forget(self, model: str) -> None:
        self._had.pop(model, None)

    def _start(self, model: str) -> float:
        """Return the virtual time at which a model's next batch would start. An idle model saves nothing up."""
        return max(self._had.get(model, 0.0), self._now)


RESIDENCE_LOADS = 2.0  # Shortest stay of a model, in load times, so that GPUs spend most of their time running.
LEAST_RESIDENCE = 5.0  # Shortest stay of a model in seconds.
COLDER = 4.0  # A model evicts another only if its need for one more copy exceeds the other's heat by this factor.
SPARE = 0.7  # A model can do without a copy if its demand is at most this share of its other copies' capacity.
PAUSE = 1.0  # Seconds before a model that failed to load is tried again. Doubles with each failure.
LONGEST_PAUSE = 300.0
OVERDUE_LOADS = 3.0  # Multiple of the expected time after which a load is overdue. Doubles with each one given up.
LEAST_OVERDUE = 30.0  # No load is overdue before this many seconds.
MIN_WARM, COLD, BUSY = "min_warm", "cold", "busy"
REASONS = (MIN_WARM, COLD, BUSY)  # Reasons for a load, and so for the eviction that makes room for it.
FIRST_LOAD = 10.0  # Assumed load time in seconds until a load has been seen.
LOAD_WEIGHT = 0.3  # Weight of the newest load in a model's mean.
HEAT_LOADS = 8.0  # Time constant of the heat, in load times.
LEAST_HEAT_TIME = 30.0  # Minimum time constant of the heat, in seconds.
LEAST_MEMORY = 10.0  # A request for a cold model is remembered for at least this many seconds: refused clients pause.
UNKNOWN_SECONDS = 0.01  # Assumed GPU seconds of an input until a batch of any model has been measured.


class Asked(msgspec.Struct, frozen=True):
    """Requests for one model at a point in time, from its queue."""

    rate: float = 0.0  # Arrivals in entries per second, including refused ones.
    waiting: int = 0
    batch: int = 0  # Entries in a full batch. This many may wait without a shortage.
    entry_seconds: float = 0.0  # GPU seconds of one entry in a full batch; 0 if unknown.
    capacity: float = 0.0  # GPU seconds per second available in other processes.
    loads: bool = False  # True while another process is loading it.


class Demand:
    """Demand for one model."""

    __slots__ = ("_asked_at", "asked_since", "awaited", "heat", "owed", "paid", "work")

    def __init__(self) -> None:
        self.work = 0.0  # Work that currently arrives, in GPU seconds per second.
        self.heat = 0.0  # Mean of `work` over the time of a few loads. The coldest model makes room.
        self.owed = 0.0  # GPU seconds by which demand exceeded capacity, or of entries beyond a full batch, if more.
        self.paid = 0.0  # Cost of not loading it: total wait since work was owed, if one request came per second.
        self.asked_since = math.inf  # Time since which requests have come, with pauses, while no GPU has it loaded.
        self.awaited = False  # True if a request waited within the last load time while no GPU had the model loaded.
        self._asked_at = -math.inf

    def note(self, asked: Asked, entry_seconds: float, capacity: float, load: float, span: float, now: float) -> None:
        """Record the demand at time `now`, `span` seconds after the last call. `entry_seconds` is the GPU time of an entry, `load`
        the expected load time, and `capacity` the GPU seconds per second available to the model."""
        self.work = asked.rate * entry_seconds
        weight = 1.0 - math.exp(-span / max(HEAT_LOADS * load, LEAST_HEAT_TIME))
        self.heat += (self.work - self.heat) * weight
        if capacity > 0.0:
            backlog = max(asked.waiting - asked.batch, 0) * entry_seconds
            self.owed = max(backlog, self.owed + (self.work - capacity) * span)
            self.paid = self.paid + self.owed / capacity * span if self.owed else 0.0
            self.asked_since, self._asked_at, self.awaited = math.inf, -math.inf, False
            return
        self.owed = self.paid = 0.0
        if asked.waiting:
            self._asked_at = now
            self.asked_since = min(self.asked_since, now)
        elif now - self._asked_at > max(load, LEAST_MEMORY):
            self.asked_since = math.inf
        self.awaited = now - self._asked_at <= load


class Move(msgspec.Struct, frozen=True):
    """A load of a model, with the eviction that makes room for it."""

    gpu: str
    model: str  # Model to load.
    evicts: str  # Model that makes room, or empty if there already is room.
    reason: str  # One of REASONS.
    gives_up: bool = False  # True if the evicted model isn't warm yet and its load is overdue.


_NOTHING = Asked()


class _Loads(msgspec.Struct):
    """History of one model's loads.

    seconds: mean load time; None before the first success.
    time_limit: seconds after which the next load is overdue, if an earlier one was given up.
    pause: length of the last pause after a failure; 0 if the last load succeeded. The pause ends at `until`.
    failed_on: GPU on which the last load failed. Other GPUs with room are tried first.
    """

    seconds: float | None = None
    time_limit: float = 0.0
    pause: float = 0.0
    until: float = -math.inf
    failed_on: str = ""

    def loaded(self, seconds: float) -> None:
        mean = seconds if self.seconds is None else self.seconds + (seconds - self.seconds) * LOAD_WEIGHT
        self.seconds, self.time_limit, self.pause, self.until, self.failed_on = mean, 0.0, 0.0, -math.inf, ""

    def failed(self, gpu: str, now: float) -> None:
        self.pause = min(self.pause * 2 or PAUSE, LONGEST_PAUSE)
        self.until, self.failed_on = now + self.pause, gpu


class _Gpu(msgspec.Struct):
    """One GPU: its warm models and its loading models, each with its start time. A lost GPU gets no more models."""

    warm: dict[str, float] = msgspec.field(default_factory=dict)
    loading: dict[str, float] = msgspec.field(default_factory=dict)
    lost: bool = False

    def holds(self, model: str) -> bool:
        return model in self.warm or model in self.loading

    def has_room(self, room: int) -> bool:
        return not self.lost and len(self.warm) + len(self.loading) < room


class Placement:
    """Placement of models on one process's GPUs, each with room for `room` models. `min_warm` says how many copies of each to
    keep."""

    def __init__(self, gpus: Sequence[str], room: int, min_warm: Mapping[str, int]) -> None:
        self._gpus = {gpu: _Gpu() for gpu in gpus}
        self._room = room
        self._min_warm = dict(min_warm)
        self._demand = {model: Demand() for model in min_warm}
        self._loads = {model: _Loads() for model in min_warm}
        self._looked_at: float | None = None
        self._asked = dict.fromkeys(min_warm, _NOTHING)
        self._used: Mapping[tuple[str, str], float] = {}
        self._capacities: Mapping[str, float] = {}

    def warm(self, gpu: str) -> Collection[str]:
        return self._gpus[gpu].warm.keys()

    def copies(self, model: str) -> int:
        return sum(gpu.holds(model) for gpu in self._gpus.values())

    def load_seconds(self, model: str) -> float:
        """Return the expected load time of a model in seconds: its own mean or, before its first load, that of the other models."""
        own = self._loads[model].seconds
        if own is not None:
            return own
        seen = [loads.seconds for loads in self._loads.values() if loads.seconds is not None]
        return math.fsum(seen) / len(seen) if seen else FIRST_LOAD

    def overdue_after(self, model: str) -> float:
        return max(OVERDUE_LOADS * self.load_seconds(model), LEAST_OVERDUE, self._loads[model].time_limit)

    def rest(self, model: str, now: float) -> float:
        """Return the seconds until a model that failed to load may be tried again."""
        return max(self._loads[model].until - now, 0.0)

    def first(self, elsewhere: Mapping[str, int] = MappingProxyType({})) -> list[Move]:
        """Return moves that load models when a process starts up: first the copies that must be kept warm, then one more copy
        of each model in turn while there is room. Models with the fewest copies in other processes go first. If this is called
        again before anything has been loaded, planning starts over."""
        moves = []
        for gpu in self._gpus.values():
            gpu.loading.clear()
        order = sorted(self._min_warm.items(), key=lambda kept: elsewhere.get(kept[0], 0))
        for round_ in range(-1, len(self._gpus)):
            for model, least in order:
                for _ in range(least - self.copies(model) if round_ < 0 else int(self.copies(model) <= round_)):
                    if name := self._emptiest(model):
                        self._gpus[name].loading[model] = math.inf  # Never overdue: the process needs it.
                        moves.append(Move(name, model, "", MIN_WARM if round_ < 0 else COLD))
        return moves

    def _emptiest(self, model: str) -> str:
        """Return the GPU with the fewest loads among those that have room and lack the model, or an empty string."""
        free = [name for name, gpu in self._gpus.items() if gpu.has_room(self._room) and not gpu.holds(model)]
        return min(free, key=lambda name: len(self._gpus[name].loading), default="")

    def loaded(self, gpu: str, model: str, seconds: float, now: float) -> None:
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.setdefault(model, now)  # A reload or restart doesn't begin a new stay.
        self._loads[model].loaded(seconds)
        self._demand[model].owed = self._demand[model].paid = 0.0

    def failed(self, gpu: str, model: str, now: float) -> None:
        """Record that loading a model failed or was given up. It is tried again after a pause."""
        self.left(gpu, model)
        self._loads[model].failed(gpu, now)

    def given_up(self, gpu: str, model: str, now: float) -> None:
        """Record that an overdue load was given up. The model's next load gets twice the time."""
        self._loads[model].time_limit = 2 * self.overdue_after(model)
        self.failed(gpu, model, now)

    def left(self, gpu: str, model: str) -> None:
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.pop(model, None)

    def lose(self, gpu: str) -> None:
        self._gpus[gpu] = _Gpu(lost=True)

    def undo(self, move: Move) -> None:
        """Undo a move that hasn't begun because another process was faster."""
        place = self._gpus[move.gpu]
        place.loading.pop(move.model, None)
        if move.gives_up:
            place.loading[move.evicts] = -math.inf  # It is overdue.
        elif move.evicts:
            place.warm[move.evicts] = -math.inf  # Its residence was over.

    def look(self, asked: Mapping[str, Asked], used: Mapping[tuple[str, str], float], now: float) -> list[Move]:
        """Return what to load now. These models count as loading until `loaded` or `failed` is called. `asked` maps models to
        their requests; `used` maps a GPU and a model to the share of recent time that its batches took."""
        self._used = used
        self._note(asked, now)
        moves = []
        for model, reason in self._wanted(now):
            if move := self._place(model, reason, now):
                place = self._gpus[move.gpu]
                self.left(move.gpu, move.evicts)
                place.loading[model] = now
                moves.append(move)
        return moves

    def _note(self, asked: Mapping[str, Asked], now: float) -> None:
        span = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at, self._asked = now, {model: asked.get(model, _NOTHING) for model in self._demand}
        known = [requests.entry_seconds for requests in asked.values() if requests.entry_seconds > 0.0]
        usual = math.fsum(known) / len(known) if known else UNKNOWN_SECONDS
        self._capacities = {model: self.capacity(model) for model in self._demand}
        for model, demand in self._demand.items():
            requests, load = self._asked[model], self.load_seconds(model)
            demand.note(requests, requests.entry_seconds or usual, self._capacities[model], load, span, now)

    def capacity(self, model: str) -> float:
        """Return the GPU seconds per second that a model has, on this process's warm GPUs and in other processes."""
        homes = [name for name, gpu in self._gpus.items() if model in gpu.warm]
        return math.fsum(self.share(gpu, model) for gpu in homes) + self._asked[model].capacity

    def share(self, gpu: str, model: str) -> float:
        """Return the share of a GPU that other models leave to this one, or an even share if that is more; 0 if not warm."""
        warm = self._gpus[gpu].warm
        if model not in warm:
            return 0.0
        others = [self._used.get((gpu, other), 0.0) for other in warm if other != model]
        return max(1.0 - math.fsum(others), 1.0 / (sum(part > 0.0 for part in others) + 1))

    def _wanted(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the models to load and why, most urgent first. Models that are loading or pausing are left out."""
        kept, cold, busy = [], [], []
        for model, demand in self._demand.items():
            loads = self._asked[model].loads or any(model in gpu.loading for gpu in self._gpus.values())
            if loads or self.rest(model, now):
                continue
            copies, load, capacity = self.copies(model), self.load_seconds(model), self._capacities[model]
            if copies < self._min_warm[model]:
                kept.append(model)
            elif capacity <= 0.0:
                if demand.awaited:
                    cold.append((demand.asked_since, model))
            elif copies < len(self._gpus) and demand.paid > load:
                busy.append((-demand.paid, model))
        yield from ((model, MIN_WARM) for model in kept)
        yield from ((model, COLD) for _, model in sorted(cold))
        yield from ((model, BUSY) for _, model in sorted(busy))

    def _place(self, model: str, reason: str, now: float) -> Move | None:
        """Return a move that loads a model where there is room, or else in place of the coldest model. None if it has to wait."""
        places = self._gpus.items()
        fit = [
            (name, gpu)
            for name, gpu in places
            if not (gpu.lost or model in gpu.warm)
            and all(now >= since + self.overdue_after(loading) for loading, since in gpu.loading.items())
        ]
        failed_on = self._loads[model].failed_on
        free = [(name == failed_on, self._busy(name), name) for name, gpu in fit if gpu.has_room(self._room)]
        if free:
            return Move(min(free)[-1], model, "", reason)
        kept = Counter(model for _, gpu in places for model in gpu.warm)
        victims, patience = [], self.residence(model)
        for name, gpu in fit:
            if reason != BUSY:
                victims += [(0.0, self._demand[late].heat, self._busy(name), name, late) for late in gpu.loading]
            for victim, since in gpu.warm.items():
                if kept[victim] <= self._min_warm[victim]:
                    continue
                worth = self._worth(victim, kept[victim])
                if now >= since + self.residence(victim):
                    victims.append((worth, self._demand[victim].heat, self._busy(name), name, victim))
                else:  # It may be the coldest, and can make room soon.
                    patience = max(patience, self.residence(victim))
        if not victims:
            return None
        worth, *_, name, victim = min(victims)
        if not self._yields(worth, model, reason, patience, now):
            return None
        return Move(name, model, victim, reason, gives_up=victim in self._gpus[name].loading)

    def _yields(self, worth: float, model: str, reason: str, patience: float, now: float) -> bool:
        """Return True if a copy whose loss costs `worth` (see `_worth`) should make room for `model`."""
        demand = self._demand[model]
        if worth == 0.0 or reason == MIN_WARM:
            return True
        if reason == BUSY:
            return worth * COLDER < demand.heat / (self.copies(model) + 1)
        return worth < demand.heat or now >= demand.asked_since + patience + self.load_seconds(model)

    def _worth(self, model: str, copies: int) -> float:
        """Return the heat that would be left without a GPU if a model lost one copy, or 0 if its other copies can take over."""
        heat, others = self._demand[model].heat, copies - 1 + self._asked[model].capacity
        if others <= 0.0:
            return heat
        return 0.0 if heat <= SPARE * self._capacities[model] * others / (others + 1) else heat / (others + 1)

    def residence(self, model: str) -> float:
        return max(RESIDENCE_LOADS * self.load_seconds(model), LEAST_RESIDENCE)

    def _busy(self, name: str) -> float:
        return math.fsum(self._used.get((name, model), 0.0) for model in self._gpus[name].warm)
