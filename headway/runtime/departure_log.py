"""Log of the batches and slots of one process since its last notice to the board; bounded."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from msgspec.structs import replace

from headway.core.excerpt import excerpt
from headway.model import Lease, Slot, WorkerStatus
from headway.model.board import ARRIVED, BatchDeparture, ScalingChange, SlotChange

MOST = 256
"""Limit on batches, and on changes, between two notices."""


class DepartureLog:
    """Departures, arrivals and changes of slots for the next notice to the board.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running: dict[str, BatchDeparture] = {}
        self._told: dict[tuple[str, float], BatchDeparture] = {}
        self._statuses: dict[str, WorkerStatus] = {}
        self._changes: list[tuple[float, SlotChange]] = []
        self._scalings: list[tuple[float, ScalingChange]] = []
        self._untold = 0
        self._killed: dict[str, str] = {}

    def killed(self, worker: str, how: str) -> None:
        """Note how a worker's process ended that wasn't told to."""
        self._killed.setdefault(worker, excerpt(how))

    def take_killed(self) -> dict[str, str]:
        """Take the ends of workers' processes since the last call, in words, by worker."""
        killed, self._killed = self._killed, {}
        return killed

    def left(self, lease: Lease) -> None:
        """Note that a batch begins to run."""
        slot, entries, size = lease.slot, lease.entries, lease.rows
        tiers = [entry.tier for entry in entries]
        if size != len(entries):
            place = slot.max_weight / slot.max_batch
            tiers = [one.tier for one in entries for _ in range(round(min(one.weight, slot.max_weight) / place))]
        departure = BatchDeparture(
            slot.worker, slot.model, slot.runs.version, lease.granted_at, size, lease.fill, lease.reason,
            tuple([tiers.count(tier) for tier in range(max(tiers) + 1)]),
        )  # fmt: skip
        self._running[slot.worker] = departure
        self._tell(departure)

    def arrived(self, worker: str, seconds: float, outcome: str = ARRIVED) -> None:
        """Note that a worker's batch has ended after `seconds`."""
        departure = self._running.pop(worker, None)
        if departure is not None:
            self._tell(replace(departure, seconds=seconds, outcome=outcome))

    def became(self, slot: Slot, status: WorkerStatus, restarts: int, cause: str = "") -> None:
        """Note a slot's status, if it is new, and the error that led to it."""
        if self._statuses.get(slot.worker) is status:
            return
        self._statuses[slot.worker] = status
        if status is WorkerStatus.OFFLINE:
            del self._statuses[slot.worker]
        cause = "" if status is WorkerStatus.HEALTHY else excerpt(cause)
        self.changed(SlotChange(slot.worker, slot.model, status.value, restarts, cause=cause))

    def changed(self, change: SlotChange) -> None:
        """Note a change."""
        if len(self._changes) < MOST:
            self._changes.append((self._clock(), change))
        else:
            self._untold += 1

    def scaled(self, change: ScalingChange) -> None:
        """Note a decision of the autoscaler."""
        if len(self._scalings) < MOST:
            self._scalings.append((self._clock(), change))

    def take_scalings(self) -> tuple[ScalingChange, ...]:
        """Take the decisions of the autoscaler since the last call."""
        now, told = self._clock(), self._scalings
        self._scalings = []
        return tuple(replace(change, ago=max(now - at, 0.0)) for at, change in told)

    def take(self) -> tuple[tuple[BatchDeparture, ...], tuple[SlotChange, ...], int]:
        """Take the batches and changes since the last call, and the number of those that found no room."""
        now, untold = self._clock(), self._untold
        departures = tuple(self._told.values())
        changes = tuple(replace(change, ago=max(now - at, 0.0)) for at, change in self._changes)
        self._told, self._changes, self._untold = {}, [], 0
        return departures, changes, untold

    def _tell(self, departure: BatchDeparture) -> None:
        key = departure.worker, departure.left
        if key in self._told or len(self._told) < MOST:
            self._told[key] = departure
        else:
            self._untold += 1
