"""Demand: how much each model is asked, and what loading it costs.

All figures are GPU seconds per second, as an input takes in a full batch, so that models of different cost can be
compared. Refused requests count, too: a model whose requests are refused for want of GPUs is the one that needs them.
"""

from __future__ import annotations

import math

import msgspec

FIRST_LOAD = 10.0
"""Assumed seconds of a load until one has been seen."""
LOAD_WEIGHT = 0.3
"""Weight of the newest load in a model's mean."""
HEAT_LOADS = 8.0
"""Time constant of the heat, in loads."""
LEAST_HEAT_TIME = 30.0
"""Least time constant of the heat, in seconds."""
LEAST_MEMORY = 10.0
"""Seconds for which a request for a cold model is remembered at least, as refused clients pause before they ask again."""
UNKNOWN_SECONDS = 0.01
"""Assumed GPU seconds of an input until a batch of any model was measured."""


class Asked(msgspec.Struct, frozen=True):
    """Requests for one model at an instant, from its queue.

    Attributes:
        rate: arriving entries per second, including refused ones.
        waiting: entries that wait.
        batch: entries of a full batch; so many may wait without a shortage.
        entry_seconds: GPU seconds of an entry in a full batch; 0 if unknown.
        capacity: GPU seconds per second available from other processes.
        loads: whether another process is loading it.
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
        heat: mean of that over the time of a few loads; the coldest model makes room.
        owed: GPU seconds by which demand exceeded what the GPUs could do, at least those of entries waiting beyond a batch.
        paid: seconds waited since something was owed, as if one request came each second: the cost of not loading.
        asked_since: since when it has been asked for, with pauses, while loaded nowhere; infinite if it isn't.
        awaited: whether somebody waits for it while it is loaded nowhere, or did within the last load's time.
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
        """Note the current demand.

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
