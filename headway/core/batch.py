"""Batches that have departed, and the outcome of those that failed."""

from __future__ import annotations

import msgspec

from headway.core.culprits import CallerKey
from headway.core.fair_queue import QueuedEntry
from headway.core.suspects import Group


class Departure(msgspec.Struct):
    """A batch that has departed.

    `late` are entries that were dropped from it because they could no longer be answered in time. `size` is its size as
    `QueueLimits.size` has it. The last `bulk` members are bulk entries. `parted`: see `core.packing.Packed`. `failures`, `alone` and `rest` are those of the group that it was, as in `core.suspects`. `attempts` counts this run, too.
    """

    worker: str
    members: list[QueuedEntry]
    reason: str
    left_at: float
    late: list[QueuedEntry] = msgspec.field(default_factory=list)
    failures: int = 0
    attempts: int = 1
    alone: int = 0
    rest: Group | None = None
    quarantine: CallerKey | None = None
    size: float = 0.0
    bulk: int = 0
    parted: bool = False

    @property
    def whole(self) -> bool:
        """Whether it has bulk entries alone; see `core.bulk`."""
        return self.bulk > 0 and self.bulk == len(self.members)


class FailureOutcome(msgspec.Struct):
    """Outcome of a failed batch: entries that run again, are dead, get no more tries, or are too late; and its bulk entries, which end."""

    again: int = 0
    dead: list[QueuedEntry] = msgspec.field(default_factory=list)
    spent: list[QueuedEntry] = msgspec.field(default_factory=list)
    late: list[QueuedEntry] = msgspec.field(default_factory=list)
    bulk: list[QueuedEntry] = msgspec.field(default_factory=list)
