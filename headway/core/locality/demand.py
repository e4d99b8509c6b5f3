"""Demand: what is asked of each model, and what loading it costs.

All is in GPU seconds per second, at the least that an input takes in a full batch, so that models of different cost can be
compared. What is refused counts, too: a model that is refused for want of GPUs is the one that needs them.
"""

from __future__ import annotations

import math

import msgspec

FIRST_LOAD = 10.0
"""Seconds that a load is taken for as long as none has been seen."""
LOAD_WEIGHT = 0.3
"""Weight of the newest load in what loads of a model take."""
HEAT_LOADS = 8.0
"""Time constant of the heat, in loads."""
LEAST_HEAT_TIME = 30.0
"""Least time constant of the heat, in seconds."""
LEAST_MEMORY = 10.0
"""Least seconds after which it is forgotten that a cold model was asked for. Clients that are refused pause before they ask again."""
UNKNOWN_SECONDS = 0.01
"""GPU seconds of an input as long as no batch of any model has been measured."""


class Asked(msgspec.Struct, frozen=True):
    """Requests for one model at an instant, as its queue tells of them.

    Attributes:
        rate: entries that come per second, those that are refused included.
        waiting: entries that wait.
        batch: entries of a full batch: so many may wait without anything lacking.
        entry_seconds: GPU seconds of an entry in a full batch; 0 as long as it is not known.
        capacity: GPU seconds per second that it can have from other processes.
        loads: whether another process loads it right now.
    """

    rate: float = 0.0
    waiting: int = 0
    batch: int = 0
    entry_seconds: float = 0.0
    capacity: float = 0.0
    loads: bool = False


class Demand:
    """Demand for one model.

    Attributes:
        work: GPU seconds per second that are asked now.
        heat: mean of that over the last loads' time; the coldest model makes room.
        owed: GPU seconds by which what has come exceeds what the GPUs could do, at least those of what waits beyond a batch.
        paid: seconds waited since something was owed, as if one request came each second: what not to load has cost.
        asked_since: instant since which it is asked for while it is nowhere loaded, with pauses; infinite when it is not.
        awaited: whether somebody waits for it while it is nowhere loaded, or did within the last load's time.
    """

    __slots__ = ("_asked_at", "_load", "asked_since", "awaited", "heat", "owed", "paid", "work")

    def __init__(self) -> None:
        self.work = self.heat = self.owed = self.paid = 0.0
        self.asked_since = math.inf
        self.awaited = False
        self._asked_at = -math.inf
        self._load: float | None = None

    @property
    def load_seconds(self) -> float | None:
        """Seconds that a load has been seen to take; None before the first."""
        return self._load

    def loaded(self, seconds: float) -> None:
        """Learn from a load."""
        self._load = seconds if self._load is None else self._load + (seconds - self._load) * LOAD_WEIGHT
        self.owed = self.paid = 0.0

    def note(self, asked: Asked, entry_seconds: float, capacity: float, load: float, span: float, now: float) -> None:
        """Take note of what is asked.

        Arguments:
            asked: what is asked at instant `now`.
            entry_seconds: GPU seconds of an entry.
            capacity: GPU seconds per second that the model can have where it is loaded; 0 where it is nowhere.
            load: seconds that a load is expected to take.
            span: seconds since the last call.
            now: the instant.
        """
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
