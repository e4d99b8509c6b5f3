"""GPUs that hold some, but not all, of several models: placement and turns, shared by the serving processes and the simulator.

Placement says which GPU loads which model, and which model makes room. It follows demand, and what a load costs.

    cold ──load──▶ loading ──loaded──▶ warm ──evicted for another──▶ cold
      ▲               │
      └────failed─────┘ (after a pause, which doubles), or given up for another once it is overdue

Requests are claimed only where their model is warm. A model is loaded for one of these reasons:

    min_warm   it has fewer copies than it should keep
    cold       it has requests and no copy
    busy       waiting for its copies has cost more than a load takes (ski rental: at most about twice as many loads
               as hindsight would make)

One model loads in one place at a time, and one GPU loads one model at a time. A load that takes far longer than expected is
overdue: it goes on, but no longer delays its GPU's other loads, and makes room for a cold model with requests. The coldest copy
makes room once its residence is over: first copies that their model's other copies can replace, then models by their heat. A cold
model with less demand than every candidate waits until its patience runs out. Then it replaces the coldest anyway, so that nobody
waits for ever. Patience is a load and the longest residence of that model and of copies that still stay, so an idle copy goes
before a hot one. A client that is refused, pauses and asks again counts as waiting, for pauses of up to LEAST_MEMORY.

All demand is in GPU seconds per second, as an input takes in a full batch, so that models of different cost can be compared.
Refused requests count: a model that refuses requests for lack of GPUs needs them most.

Turns say whose batch a GPU runs next. Each model has a virtual time: its GPU seconds since it last began to wait (start-time fair
queueing; Goyal, Vin and Cheng, SIGCOMM 1996). The model with the least goes first, so a flood of one model costs another at most
the running batch. If two have about the same, the more urgent model goes first: that whose most urgent entry has the least slack,
in run times of its batch. Urgency alone isn't enough, as a flooded model is always late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.core.queue import ModelQueue

LEAD = 0.5  # Run times of the shorter batch up to which two models' virtual times count as equal.


class Contender(msgspec.Struct, frozen=True):
    """Model that waits for the GPU."""

    model: str
    slack: float = math.inf  # Seconds until its most urgent entry would be too late; infinite if unknown.
    seconds: float = 0.0  # Expected run time of its next batch; 0 while unknown.
    waits: bool = True  # True if entries wait for it, as far as is known.

    @property
    def urgency(self) -> float:
        """Slack in run times; less is more urgent."""
        return self.slack / self.seconds if self.seconds > 0.0 else self.slack


def contender(model: str, queue: ModelQueue, now: float) -> Contender:
    """Return a model that waits for a GPU, with the figures of its next batch at instant `now`."""
    size = min(queue.depth, queue.limits.max_batch)
    return Contender(model, queue.next_due() - now, queue.service.seconds(size), queue.depth > 0)


class FairOrder:
    """Order of the models on one GPU."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}  # Virtual instant at which the last batch of each model ended.
        self._now = 0.0  # Virtual time at which the last batch started.

    def order(self, contenders: Collection[Contender]) -> list[str]:
        """Return the order in which to ask these models for a batch. The first model with a due batch runs it. Models without
        waiting entries come last."""
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
        """Return the virtual instant at which a model's next batch would start. A model without requests saves nothing up."""
        return max(self._had.get(model, 0.0), self._now)


# Shortest stay of a model, in loads, so that GPUs spend most of their time on other things than loading.
RESIDENCE_LOADS = 2.0
LEAST_RESIDENCE = 5.0  # Shortest stay of a model in seconds.
COLDER = 4.0  # A model evicts another only if its need of one more copy exceeds the other's heat by this factor.
SPARE = 0.7  # Share of the capacity of a model's other copies up to which it can do without one.
PAUSE = 1.0  # Seconds until a model that failed to load is tried again; doubles.
LONGEST_PAUSE = 300.0
# Multiple of a load's expected seconds after which it is overdue; doubles after each load given up.
OVERDUE_LOADS = 3.0
LEAST_OVERDUE = 30.0  # Shortest time in seconds after which a load is overdue.
MIN_WARM, COLD, BUSY = "min_warm", "cold", "busy"
REASONS = (MIN_WARM, COLD, BUSY)  # Reasons of loads, and so of the evictions that make room for them.
FIRST_LOAD = 10.0  # Assumed seconds of a load until one has been seen.
LOAD_WEIGHT = 0.3  # Weight of the newest load in a model's mean.
HEAT_LOADS = 8.0  # Time constant of the heat, in loads.
LEAST_HEAT_TIME = 30.0  # Minimum time constant of the heat, in seconds.
# Seconds for which a request for a cold model is remembered at least, as refused clients pause before they ask again.
LEAST_MEMORY = 10.0
UNKNOWN_SECONDS = 0.01  # Assumed GPU seconds of an input until a batch of any model was measured.


class Asked(msgspec.Struct, frozen=True):
    """Requests for one model at an instant, from its queue."""

    rate: float = 0.0  # Arriving entries per second, including refused ones.
    waiting: int = 0
    batch: int = 0  # Entries of a full batch. As many may wait without a shortage.
    entry_seconds: float = 0.0  # GPU seconds of an entry in a full batch; 0 if unknown.
    capacity: float = 0.0  # GPU seconds per second available in other processes.
    loads: bool = False  # True while another process is loading it.


class Demand:
    """Demand for one model."""

    __slots__ = ("_asked_at", "_load", "asked_since", "awaited", "heat", "owed", "paid", "work")

    def __init__(self) -> None:
        self.work = 0.0  # GPU seconds of work that arrive per second at present.
        self.heat = 0.0  # Mean of `work` over the time of a few loads. The coldest model makes room.
        # GPU seconds by which demand exceeded capacity, but at least those of the entries that wait beyond a batch.
        self.owed = 0.0
        self.paid = 0.0  # Cost of not loading it: seconds waited since work was owed, at one request a second.
        self.asked_since = math.inf  # Instant since which requests come, with pauses, while it is loaded nowhere.
        self.awaited = False  # True if, in the time of a load, a request waited while the model was loaded nowhere.
        self._asked_at = -math.inf
        self._load: float | None = None

    @property
    def load_seconds(self) -> float | None:
        """Seconds that a load has taken; None before the first."""
        return self._load

    def loaded(self, seconds: float) -> None:
        self._load = seconds if self._load is None else self._load + (seconds - self._load) * LOAD_WEIGHT
        self.owed = self.paid = 0.0

    def note(self, asked: Asked, entry_seconds: float, capacity: float, load: float, span: float, now: float) -> None:
        """Note the demand at instant `now`, `span` seconds after the last call. `entry_seconds` are the GPU seconds of an entry,
        `load` the expected seconds of a load, and `capacity` the GPU seconds per second that the model can have."""
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
    """Load of a model, and the eviction that makes room for it."""

    gpu: str
    model: str  # Model to load.
    evicts: str  # Model that makes room; empty if there is room.
    reason: str  # One of REASONS.
    gives_up: bool = False  # True if the evicted model isn't warm, but its load is overdue.


_NOTHING = Asked()


class _Gpu(msgspec.Struct):
    """Models on one GPU, with the instants since which each is warm or loads. A lost GPU gets no more models."""

    warm: dict[str, float] = msgspec.field(default_factory=dict)
    loading: dict[str, float] = msgspec.field(default_factory=dict)
    lost: bool = False


class Placement:
    """Placement of models on the GPUs of one process, each of which has room for `room` models. `min_warm` has the number of copies
    to keep of each model."""

    def __init__(self, gpus: Sequence[str], room: int, min_warm: Mapping[str, int]) -> None:
        self._gpus = {gpu: _Gpu() for gpu in gpus}
        self._room = room
        self._min_warm = dict(min_warm)
        self._demand = {model: Demand() for model in min_warm}
        # Instant until which a model that failed to load rests, and the length of that pause.
        self._pauses: dict[str, tuple[float, float]] = {}
        # GPU on which each of them last failed to load. Other GPUs with room are tried first.
        self._failed_on: dict[str, str] = {}
        # Time in seconds after which the next load of a model is overdue, once an earlier load was given up.
        self._time_to_load: dict[str, float] = {}
        self._looked_at: float | None = None
        self._asked: Mapping[str, Asked] = {}
        self._used: Mapping[tuple[str, str], float] = {}
        self._capacities: Mapping[str, float] = {}

    def warm(self, gpu: str) -> Collection[str]:
        return self._gpus[gpu].warm.keys()

    def copies(self, model: str) -> int:
        """Return the number of GPUs on which a model is loaded or loading."""
        return sum(model in gpu.warm or model in gpu.loading for gpu in self._gpus.values())

    def load_seconds(self, model: str) -> float:
        """Return the expected seconds of a model's load: as measured, or else the mean of other models."""
        own = self._demand[model].load_seconds
        if own is not None:
            return own
        seen = [demand.load_seconds for demand in self._demand.values() if demand.load_seconds is not None]
        return math.fsum(seen) / len(seen) if seen else FIRST_LOAD

    def overdue_after(self, model: str) -> float:
        return max(OVERDUE_LOADS * self.load_seconds(model), LEAST_OVERDUE, self._time_to_load.get(model, 0.0))

    def rest(self, model: str, now: float) -> float:
        """Return the seconds until a model that failed to load may be tried again."""
        return max(self._pauses.get(model, (now, 0.0))[0] - now, 0.0)

    def first(self, elsewhere: Mapping[str, int] = MappingProxyType({})) -> list[Move]:
        """Return the loads of a starting process. The copies to keep come first, then each model in turn while there is room.

        Models with the fewest copies in other processes go first. A second call before anything is loaded starts over."""
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
        """Return the GPU with the most room among those without a model; empty if there is none."""
        free = [
            name
            for name, gpu in self._gpus.items()
            if self._has_room(gpu) and model not in gpu.warm and model not in gpu.loading
        ]
        return min(free, key=lambda name: len(self._gpus[name].loading), default="")

    def loaded(self, gpu: str, model: str, seconds: float, now: float) -> None:
        """Note that a model has been loaded, in `seconds`."""
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.setdefault(model, now)  # A reload or restart doesn't begin a new stay.
        self._demand[model].loaded(seconds)
        for known in (self._pauses, self._failed_on, self._time_to_load):
            known.pop(model, None)

    def failed(self, gpu: str, model: str, now: float) -> None:
        """Note that a model failed to load, or was given up. It pauses before it is tried again."""
        self.left(gpu, model)
        _, pause = self._pauses.get(model, (0.0, PAUSE / 2))
        pause = min(pause * 2, LONGEST_PAUSE)
        self._pauses[model] = now + pause, pause
        self._failed_on[model] = gpu

    def given_up(self, gpu: str, model: str, now: float) -> None:
        """Note that an overdue load was given up. The next load of the model gets twice the time."""
        self._time_to_load[model] = 2 * self.overdue_after(model)
        self.failed(gpu, model, now)

    def left(self, gpu: str, model: str) -> None:
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.pop(model, None)

    def lose(self, gpu: str) -> None:
        self._gpus[gpu] = _Gpu(lost=True)

    def undo(self, move: Move) -> None:
        """Undo a move that hasn't begun, because another process was faster."""
        place = self._gpus[move.gpu]
        place.loading.pop(move.model, None)
        if move.gives_up:
            place.loading[move.evicts] = -math.inf  # It is overdue.
        elif move.evicts:
            place.warm[move.evicts] = -math.inf  # Its residence was over.

    def look(self, asked: Mapping[str, Asked], used: Mapping[tuple[str, str], float], now: float) -> list[Move]:
        """Return what to load now. Each load counts as loading until `loaded` or `failed` is called.

        `asked`: requests for each model. `used`: share of recent time in which a GPU ran batches of a model, by GPU and model."""
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
        self._looked_at, self._asked = now, asked
        known = [figures.entry_seconds for figures in asked.values() if figures.entry_seconds > 0.0]
        usual = math.fsum(known) / len(known) if known else UNKNOWN_SECONDS
        self._capacities = {model: self.capacity(model) for model in self._demand}
        for model, demand in self._demand.items():
            figures = asked.get(model, _NOTHING)
            load = self.load_seconds(model)
            demand.note(figures, figures.entry_seconds or usual, self._capacities[model], load, span, now)

    def capacity(self, model: str) -> float:
        """Return the GPU seconds per second available to a model on the GPUs where it is loaded."""
        homes = [name for name, gpu in self._gpus.items() if model in gpu.warm]
        return math.fsum(self.share(gpu, model) for gpu in homes) + self._elsewhere(model).capacity

    def share(self, gpu: str, model: str) -> float:
        """Return the share of a GPU that other models leave to a model, at least an even part. 0 if it isn't loaded there."""
        warm = self._gpus[gpu].warm
        if model not in warm:
            return 0.0
        others = [self._used.get((gpu, other), 0.0) for other in warm if other != model]
        return max(1.0 - math.fsum(others), 1.0 / (sum(part > 0.0 for part in others) + 1))

    def _elsewhere(self, model: str) -> Asked:
        return self._asked.get(model, _NOTHING)

    def _wanted(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the models to load, with reasons, the most urgent first. Models that are loading or pausing are left out."""
        kept, cold, busy = [], [], []
        for model, demand in self._demand.items():
            loads = self._elsewhere(model).loads or any(model in gpu.loading for gpu in self._gpus.values())
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
        """Return a load of a model where there is room, or where the coldest model makes room; None if there is no place yet."""
        places = self._gpus.items()
        fit = [
            (name, gpu)
            for name, gpu in places
            if model not in gpu.warm and not (gpu.lost or self._loads_in_time(gpu, now))
        ]
        failed_on = self._failed_on.get(model)
        free = [(name == failed_on, self._busy(name), name) for name, gpu in fit if self._has_room(gpu)]
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
        """Return True if a copy should make room: it is worth too little, or the model is cold and has waited long enough."""
        demand = self._demand[model]
        if worth == 0.0 or reason == MIN_WARM:
            return True
        if reason == BUSY:
            return worth * COLDER < demand.heat / (self.copies(model) + 1)
        return worth < demand.heat or now >= demand.asked_since + patience + self.load_seconds(model)

    def _worth(self, model: str, copies: int) -> float:
        """Return the heat left without a GPU if a model lost one copy; 0 if its other copies could carry it."""
        heat, others = self._demand[model].heat, copies - 1 + self._elsewhere(model).capacity
        if others <= 0.0:
            return heat
        return 0.0 if heat <= SPARE * self._capacities[model] * others / (others + 1) else heat / (others + 1)

    def residence(self, model: str) -> float:
        """Return the shortest stay of a model in seconds."""
        return max(RESIDENCE_LOADS * self.load_seconds(model), LEAST_RESIDENCE)

    def _busy(self, name: str) -> float:
        return math.fsum(self._used.get((name, model), 0.0) for model in self._gpus[name].warm)

    def _loads_in_time(self, gpu: _Gpu, now: float) -> bool:
        return any(now < since + self.overdue_after(model) for model, since in gpu.loading.items())

    def _has_room(self, gpu: _Gpu) -> bool:
        return not gpu.lost and len(gpu.warm) + len(gpu.loading) < self._room
