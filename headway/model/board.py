"""The departure board: reports of each process on its batches, slots and counts, for the dashboard of any process.

A process posts a notice every second, and more often while somebody watches. One process of the fleet adds the figures of
the whole fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

RUNNING = ""
"""Outcome of a running batch."""
ARRIVED = "ok"
"""Outcome of a batch with outputs. The outcome of a failed batch is its cause."""
GIVEN_BACK = "given back"
"""Outcome of a batch that its slot couldn't run."""


class BatchDeparture(msgspec.Struct, frozen=True, array_like=True):
    """One batch.

    Attributes:
        left: broker instant at which it left the queue.
        size: number of entries, or of rows for tensors.
        fill: share of a full batch that it fills, 0 to 1.
        reason: why it left at that instant.
        tiers: `size` by tier, highest first.
        seconds: seconds of its run, or 0 while it runs.
        outcome: RUNNING, ARRIVED, GIVEN_BACK, or the cause of its failure.
    """

    worker: str
    model: str
    version: str
    left: float
    size: int
    fill: float
    reason: str
    tiers: tuple[int, ...]
    seconds: float = 0.0
    outcome: str = RUNNING


class SlotChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of a slot's status, or of a rollout.

    Attributes:
        worker: id of the worker, or name of the rollout.
        status: new status, which is a value of WorkerStatus, or any text for a rollout.
        restarts: number of times that the worker's process was replaced.
        ago: seconds from the change to its notice.
        cause: last error that led to the change, or empty.
    """

    worker: str
    model: str
    status: str
    restarts: int
    ago: float = 0.0
    cause: str = ""


class ScalingChange(msgspec.Struct, frozen=True, array_like=True):
    """Decision of the autoscaler.

    Attributes:
        before, desired: wanted number of workers before and after the decision.
        direction: `up`, `down`, or `again` for a repeated request for the same number.
        ago: seconds from the decision to its notice.
    """

    model: str
    before: int
    desired: int
    direction: str
    reason: str
    ago: float = 0.0


class RequestFlow(msgspec.Struct, frozen=True, array_like=True):
    """Requests that one process has finished within some `seconds`.

    Attributes:
        answered: answers with an output, by tier.
        refused: refusals, by reason.
        failed: errors other than refusals, by code.
        ended: all finished requests, by model.
        latencies: answers by tier and by bucket of `headway.runtime.counters.SECONDS`.
        retries: entries queued again, by cause.
    """

    seconds: float
    answered: dict[str, int] = {}
    refused: dict[str, int] = {}
    failed: dict[str, int] = {}
    ended: dict[str, int] = {}
    latencies: dict[str, dict[int, int]] = {}
    retries: dict[str, int] = {}


class FleetFigures(msgspec.Struct, frozen=True, array_like=True):
    """Figures of the whole fleet at one instant.

    Attributes:
        waiting: queued entries by tier, highest first.
        oldest: seconds that the oldest entry of each tier has waited.
        capacity: maximum inputs per second of all workers together, or 0 if unknown.
        usable: part of the capacity that is meant to be used.
        workers: number of workers that aren't gone.
    """

    waiting: tuple[int, ...]
    oldest: tuple[float, ...]
    capacity: float
    usable: float
    healthy: int
    workers: int


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """News of one process since its last notice.

    Attributes:
        departures: batches that left or arrived. A batch that did both is listed once.
        untold: number of batches and changes that didn't fit.
        fleet: figures of the fleet, from the only process that records them.
        at: broker instant of the notice, set by the board.
    """

    process: str
    departures: tuple[BatchDeparture, ...] = ()
    changes: tuple[SlotChange, ...] = ()
    untold: int = 0
    flow: RequestFlow | None = None
    fleet: FleetFigures | None = None
    at: float = 0.0
    scalings: tuple[ScalingChange, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.departures or self.changes or self.untold or self.flow or self.fleet or self.scalings)


class Posted(msgspec.Struct, frozen=True):
    """Answer to a notice: whether somebody watches the board, and whether this process records the figures of the fleet."""

    watched: bool
    records: bool


class HistoryRow(msgspec.Struct):
    """Counts of the whole fleet in one step of the board's history, and its figures at that time.

    Attributes:
        step: number of the step, which begins at broker instant `step * headway.core.departure_board.STEP`.
        ended: all finished requests.
        answered: answers with an output.
        failed: errors, including refusals.
        latencies: answers by bucket of `headway.runtime.counters.SECONDS`.
    """

    step: int
    ended: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    latencies: dict[int, int] = {}
    fleet: FleetFigures | None = None
    scalings: list[ScalingChange] = []


class News(msgspec.Struct, frozen=True):
    """News of the board for one reader.

    Attributes:
        notices: notices, oldest first.
        cursor: name of the last notice, after which to read on.
        lost_at: broker instant at which the board started over because the broker lost its data, or 0.
    """

    notices: Sequence[Notice]
    cursor: str
    lost_at: float = 0.0
