"""Batches that left for a GPU: running ones, and the outcome of failed ones."""

from __future__ import annotations

from math import exp

import msgspec

from headway.core.culprits import CallerKey
from headway.core.fair_queue import QueuedEntry
from headway.core.suspects import Group


class Departure(msgspec.Struct):
    """A batch that has departed, without the `late` entries, which could no longer be answered in time. The last `bulk` members are
    bulk entries. `failures`, `alone` and `rest` come from its group; see `core.suspects.Group`. `attempts` includes this run."""

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
    size: float = 0.0  # See `QueueLimits.size`.
    bulk: int = 0
    parted: bool = False  # See `core.packing.Packed`.

    @property
    def whole(self) -> bool:
        """True if it has only bulk entries; see `core.bulk`."""
        return self.bulk > 0 and self.bulk == len(self.members)


class FailureOutcome(msgspec.Struct):
    """Outcome of a failed batch: the number of entries that run again, and the entries that end."""

    again: int = 0
    dead: list[QueuedEntry] = msgspec.field(default_factory=list)
    spent: list[QueuedEntry] = msgspec.field(default_factory=list)  # Out of retries.
    late: list[QueuedEntry] = msgspec.field(default_factory=list)  # Too late to run again.
    bulk: list[QueuedEntry] = msgspec.field(default_factory=list)  # Retried by their sender.


BUSY_TIME = 5.0  # Time constant of the busy share, in seconds.


class RunningBatches:
    """Batches on GPUs."""

    __slots__ = ("_since", "_sizes", "utilisation")

    def __init__(self) -> None:
        self.utilisation = 0.0  # Busy share of the slots over the last seconds, 0 to 1, as of the last call.
        self._sizes: list[float] = []
        self._since = 0.0

    @property
    def busy(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> float:
        """Size of the largest batch; 0 if none runs."""
        return max(self._sizes, default=0.0)

    @property
    def size(self) -> float:
        return sum(self._sizes)

    def left(self, size: float, slots: int, now: float) -> None:
        self._note(slots, now)
        self._sizes.append(size)

    def back(self, size: float, slots: int, now: float) -> None:
        self._note(slots, now)
        self._sizes.remove(size)

    def _note(self, slots: int, now: float) -> None:
        share = min(1.0, len(self._sizes) / slots) if slots else 0.0
        weight = 1.0 - exp(-max(0.0, now - self._since) / BUSY_TIME)
        self.utilisation += (share - self.utilisation) * weight
        self._since = now
