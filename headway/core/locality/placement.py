"""Placement: which models are loaded on which GPU, and which make room.

    cold ──load──▶ loading ──loaded──▶ warm ──evicted for another──▶ cold
      ▲               │
      └────failed─────┘ (a pause, which doubles), or given up for another once it is overdue

A request goes where its model is warm, since only there is it claimed. A load happens

    min_warm   where a model has fewer copies than it is to keep
    cold       where a model is asked for and has none
    busy       where waiting for its copies has cost more than a load has been seen to take (ski rental: so the
               loads are at most about twice those that hindsight would make)

and for one model one at a time, for one GPU one at a time. A load that takes far longer than expected is overdue: it goes on, but
keeps its GPU's other loads waiting no longer, and makes room for a model that is cold and asked for. The coldest copy makes room, once it has been there for its least
residence: copies that the rest of their model could do without, then models by their heat. A cold model that is less asked
for than all that could go waits for its patience, and then takes the coldest all the same: nobody waits for ever.
A client that is refused, pauses and asks again is one that waits: pauses of up to LEAST_MEMORY count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.core.locality.demand import FIRST_LOAD, UNKNOWN_SECONDS, Asked, Demand

RESIDENCE_LOADS = 2.0
"""A model stays for the time of so many loads at least, so that GPUs spend most of their time on other things than loading."""
LEAST_RESIDENCE = 5.0
"""Shortest stay of a model in seconds."""
COLDER = 4.0
"""Times by which a model's need of one more copy must exceed the heat of a model that would be cold then."""
SPARE = 0.7
"""Share of what the other copies can do up to which a model can do without one."""
PAUSE = 1.0
"""Seconds until a model that failed to load is tried again; doubles."""
LONGEST_PAUSE = 300.0
OVERDUE_LOADS = 3.0
"""Times the expected seconds of a load after which one that still goes on is overdue; twice as many after each given up."""
LEAST_OVERDUE = 30.0
"""Least seconds after which a load is overdue."""
MIN_WARM, COLD, BUSY = "min_warm", "cold", "busy"
REASONS = (MIN_WARM, COLD, BUSY)
"""Reasons of loads, and so of the evictions that make room for them."""


class Move(msgspec.Struct, frozen=True):
    """Load of a model, and the eviction that makes room for it.

    Attributes:
        gpu: name of the GPU.
        model: model to load.
        evicts: model that makes room; empty where there is room.
        reason: one of REASONS.
        gives_up: whether that model isn't warm, but its load is overdue.
    """

    gpu: str
    model: str
    evicts: str
    reason: str
    gives_up: bool = False


_NOTHING = Asked()


class _Gpu(msgspec.Struct):
    """Models on one GPU: since when each is warm, and since when each loads. A lost GPU gets no further ones."""

    warm: dict[str, float] = msgspec.field(default_factory=dict)
    loading: dict[str, float] = msgspec.field(default_factory=dict)
    lost: bool = False


class Placement:
    """Placement of models on the GPUs of one process.

    Arguments:
        gpus: names of the GPUs.
        room: limit on the models of one GPU.
        min_warm: copies that each model keeps at least, by name.
    """

    def __init__(self, gpus: Sequence[str], room: int, min_warm: Mapping[str, int]) -> None:
        self._gpus = {gpu: _Gpu() for gpu in gpus}
        self._room = room
        self._min_warm = dict(min_warm)
        self._demand = {model: Demand() for model in min_warm}
        self._pauses: dict[str, tuple[float, float]] = {}
        """Instant until which a model that failed to load rests, and the length of that pause."""
        self._failed_on: dict[str, str] = {}
        """GPU on which each of them last failed to load; others are tried first, if there is room."""
        self._time_to_load: dict[str, float] = {}
        """Least seconds after which a load is overdue, of models of which one has been given up."""
        self._looked_at: float | None = None
        self._asked: Mapping[str, Asked] = {}
        self._used: Mapping[tuple[str, str], float] = {}
        self._capacities: Mapping[str, float] = {}

    def warm(self, gpu: str) -> Collection[str]:
        """Return the models that are loaded on a GPU."""
        return self._gpus[gpu].warm.keys()

    def copies(self, model: str) -> int:
        """Return the GPUs on which a model is loaded, or being loaded."""
        return sum(model in gpu.warm or model in gpu.loading for gpu in self._gpus.values())

    def load_seconds(self, model: str) -> float:
        """Return the expected seconds of a load of a model: as seen before or, failing that, as of others."""
        own = self._demand[model].load_seconds
        if own is not None:
            return own
        seen = [one.load_seconds for one in self._demand.values() if one.load_seconds is not None]
        return math.fsum(seen) / len(seen) if seen else FIRST_LOAD

    def overdue_after(self, model: str) -> float:
        """Return the seconds after which a load of a model is overdue."""
        return max(OVERDUE_LOADS * self.load_seconds(model), LEAST_OVERDUE, self._time_to_load.get(model, 0.0))

    def rest(self, model: str, now: float) -> float:
        """Return the seconds until a model that failed to load may be tried again."""
        return max(self._pauses.get(model, (now, 0.0))[0] - now, 0.0)

    def first(self, elsewhere: Mapping[str, int] = MappingProxyType({})) -> list[Move]:
        """Return the loads with which a process starts: copies to keep, then each model in turn while there is room.

        Models with the fewest copies elsewhere go first. A second call before anything is loaded starts over.

        Arguments:
            elsewhere: copies in other processes, by model.
        """
        moves = []
        for gpu in self._gpus.values():
            gpu.loading.clear()
        order = sorted(self._min_warm.items(), key=lambda one: elsewhere.get(one[0], 0))
        for round_ in range(-1, len(self._gpus)):
            for model, least in order:
                for _ in range(least - self.copies(model) if round_ < 0 else int(self.copies(model) <= round_)):
                    if name := self._emptiest(model):
                        self._gpus[name].loading[model] = math.inf  # Without it there is no process.
                        moves.append(Move(name, model, "", MIN_WARM if round_ < 0 else COLD))
        return moves

    def _emptiest(self, model: str) -> str:
        """Return the GPU with the most room that does not have a model; empty if there is none."""
        free = [name for name, gpu in self._gpus.items() if self._has_room(gpu) and not self._is_on(model, gpu)]
        return min(free, key=lambda name: len(self._gpus[name].loading), default="")

    def loaded(self, gpu: str, model: str, seconds: float, now: float) -> None:
        """Note that a model has been loaded, in `seconds`."""
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.setdefault(model, now)  # Stays where a reload or a death has started it anew.
        self._demand[model].loaded(seconds)
        for known in (self._pauses, self._failed_on, self._time_to_load):
            known.pop(model, None)

    def failed(self, gpu: str, model: str, now: float) -> None:
        """Note that a model failed to load, or was given up; it rests before it is tried again."""
        self.left(gpu, model)
        _, pause = self._pauses.get(model, (0.0, PAUSE / 2))
        pause = min(pause * 2, LONGEST_PAUSE)
        self._pauses[model] = now + pause, pause
        self._failed_on[model] = gpu

    def given_up(self, gpu: str, model: str, now: float) -> None:
        """Note that an overdue load was given up. The next one is overdue only after twice the time."""
        self._time_to_load[model] = 2 * self.overdue_after(model)
        self.failed(gpu, model, now)

    def left(self, gpu: str, model: str) -> None:
        """Note that a model is no longer on a GPU."""
        place = self._gpus[gpu]
        place.loading.pop(model, None)
        place.warm.pop(model, None)

    def lose(self, gpu: str) -> None:
        """Note that a GPU is lost, with everything loaded there."""
        self._gpus[gpu] = _Gpu(lost=True)

    def undo(self, move: Move) -> None:
        """Undo a move that hasn't begun, as another process was faster."""
        place = self._gpus[move.gpu]
        place.loading.pop(move.model, None)
        if move.gives_up:
            place.loading[move.evicts] = -math.inf  # It is overdue.
        elif move.evicts:
            place.warm[move.evicts] = -math.inf  # It has stayed for its residence.

    def look(self, asked: Mapping[str, Asked], used: Mapping[tuple[str, str], float], now: float) -> list[Move]:
        """Decide what to load now. The result counts as loading until `loaded` or `failed` is called.

        Arguments:
            asked: requests for each model, and its copies in other processes.
            used: share of recent time that a GPU ran batches of a model, by GPU and model.
            now: the instant.
        """
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
        known = [one.entry_seconds for one in asked.values() if one.entry_seconds > 0.0]
        usual = math.fsum(known) / len(known) if known else UNKNOWN_SECONDS
        self._capacities = {model: self.capacity(model) for model in self._demand}
        for model, demand in self._demand.items():
            one = asked.get(model, _NOTHING)
            load = self.load_seconds(model)
            demand.note(one, one.entry_seconds or usual, self._capacities[model], load, span, now)

    def capacity(self, model: str) -> float:
        """Return the GPU seconds per second available to a model on the GPUs where it is loaded."""
        homes = [name for name, gpu in self._gpus.items() if model in gpu.warm]
        return math.fsum(self.share(gpu, model) for gpu in homes) + self._elsewhere(model).capacity

    def share(self, gpu: str, model: str) -> float:
        """Return the share of a GPU available to a model: what others leave, at least its even part; 0 if it isn't loaded there."""
        warm = self._gpus[gpu].warm
        if model not in warm:
            return 0.0
        others = [self._used.get((gpu, other), 0.0) for other in warm if other != model]
        return max(1.0 - math.fsum(others), 1.0 / (sum(part > 0.0 for part in others) + 1))

    def _elsewhere(self, model: str) -> Asked:
        return self._asked.get(model, _NOTHING)

    def _wanted(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield models to load, with reasons, the most urgent first; none that is loading, or rests after a failure."""
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
        """Find a place for a model: with room, or where the coldest makes room; None if there is none yet."""
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
        kept = self._copies()
        victims = []
        for name, gpu in fit:
            if reason != BUSY:
                victims += [(0.0, self._demand[late].heat, self._busy(name), name, late) for late in gpu.loading]
            for victim, since in gpu.warm.items():
                worth = self._worth(victim, kept[victim])
                if now >= since + self.residence(victim) and kept[victim] > self._min_warm[victim]:
                    victims.append((worth, self._demand[victim].heat, self._busy(name), name, victim))
        if not victims:
            return None
        worth, *_, name, victim = min(victims)
        if not self._yields(worth, model, reason, now):
            return None
        return Move(name, model, victim, reason, gives_up=victim in self._gpus[name].loading)

    def _yields(self, worth: float, model: str, reason: str, now: float) -> bool:
        """Return True if a copy is worth so little that it makes room for a model."""
        demand = self._demand[model]
        if worth == 0.0 or reason == MIN_WARM:
            return True
        if reason == BUSY:
            return worth * COLDER < demand.heat / (self.copies(model) + 1)
        longest = self.residence(model) + self.load_seconds(model)
        return worth < demand.heat or now >= demand.asked_since + longest

    def _worth(self, model: str, copies: int) -> float:
        """Return the heat that would lack a GPU if a model had one copy less; 0 if its others could carry it."""
        heat, others = self._demand[model].heat, copies - 1 + self._elsewhere(model).capacity
        if others <= 0.0:
            return heat
        return 0.0 if heat <= SPARE * self._capacities[model] * others / (others + 1) else heat / (others + 1)

    def residence(self, model: str) -> float:
        """Return the shortest stay in seconds of a model's copy."""
        return max(RESIDENCE_LOADS * self.load_seconds(model), LEAST_RESIDENCE)

    def _copies(self) -> Counter[str]:
        """Return the copies of each model that are warm."""
        return Counter(model for gpu in self._gpus.values() for model in gpu.warm)

    def _busy(self, name: str) -> float:
        """Return the share of recent time that a GPU ran batches."""
        return math.fsum(self._used.get((name, model), 0.0) for model in self._gpus[name].warm)

    def _loads_in_time(self, gpu: _Gpu, now: float) -> bool:
        """Return True if a load on a GPU isn't overdue."""
        return any(now < since + self.overdue_after(model) for model, since in gpu.loading.items())

    def _has_room(self, gpu: _Gpu) -> bool:
        return not gpu.lost and len(gpu.warm) + len(gpu.loading) < self._room

    @staticmethod
    def _is_on(model: str, gpu: _Gpu) -> bool:
        return model in gpu.warm or model in gpu.loading
