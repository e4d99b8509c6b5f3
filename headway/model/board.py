"""The departure board: reports of each process on its batches, slots and counts, for the dashboard of any process.

A process posts a notice every second, and more often while somebody watches. One process of the fleet adds the figures of
the whole fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

RUNNING = ""  # Outcome of a running batch.
ARRIVED = "ok"  # Outcome of a batch with outputs. The outcome of a failed batch is its cause.
GIVEN_BACK = "given back"  # Outcome of a batch that its slot couldn't run.


class BatchDeparture(msgspec.Struct, frozen=True, array_like=True):
    """One batch that left, and perhaps arrived."""

    worker: str
    model: str
    version: str
    left: float  # Broker instant at which it left the queue.
    size: int  # Number of entries, or of rows for tensors.
    fill: float  # Share of a full batch, 0 to 1.
    reason: str  # Why it left at that instant.
    tiers: tuple[int, ...]  # `size` by tier, highest first.
    seconds: float = 0.0  # Seconds of its run, or 0 while it runs.
    outcome: str = RUNNING  # RUNNING, ARRIVED, GIVEN_BACK, or the cause of its failure.


class SlotChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of a slot's status, or of a rollout."""

    worker: str  # Id of the worker, or name of the rollout.
    model: str
    status: str  # Value of WorkerStatus, or any text for a rollout.
    restarts: int  # Number of times that the worker's process was replaced.
    ago: float = 0.0  # Seconds from the change to its notice.
    cause: str = ""  # Last error that led to the change, or empty.


class ScalingChange(msgspec.Struct, frozen=True, array_like=True):
    """Decision of the autoscaler."""

    model: str
    # Wanted number of workers before and after the decision.
    before: int
    desired: int
    direction: str  # `up`, `down`, or `again` for a repeated request for the same number.
    reason: str
    ago: float = 0.0  # Seconds from the decision to its notice.


class RequestFlow(msgspec.Struct, frozen=True, array_like=True):
    """Requests that one process has finished within some `seconds`."""

    seconds: float
    answered: dict[str, int] = {}  # Answers with an output, by tier.
    refused: dict[str, int] = {}  # Refusals, by reason.
    failed: dict[str, int] = {}  # Errors other than refusals, by code.
    ended: dict[str, int] = {}  # All finished requests, by model.
    latencies: dict[str, dict[int, int]] = {}  # Answers by tier and by bucket of `headway.runtime.counters.SECONDS`.
    retries: dict[str, int] = {}  # Entries queued again, by cause.


class FleetFigures(msgspec.Struct, frozen=True, array_like=True):
    """Figures of the whole fleet at one instant."""

    waiting: tuple[int, ...]  # Queued entries by tier, highest first.
    oldest: tuple[float, ...]  # Seconds that the oldest entry of each tier has waited.
    capacity: float  # Maximum inputs per second of all workers together, or 0 if unknown.
    usable: float  # Capacity times the target utilisation.
    healthy: int
    workers: int  # Number of workers that aren't gone.


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """News of one process since its last notice."""

    process: str
    departures: tuple[BatchDeparture, ...] = ()  # Batches that left or arrived. A batch that did both is listed once.
    changes: tuple[SlotChange, ...] = ()
    untold: int = 0  # Number of batches and changes that didn't fit.
    flow: RequestFlow | None = None
    fleet: FleetFigures | None = None  # Figures of the fleet, from the only process that records them.
    at: float = 0.0  # Broker instant, set by the board.
    scalings: tuple[ScalingChange, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.departures or self.changes or self.untold or self.flow or self.fleet or self.scalings)


class Posted(msgspec.Struct, frozen=True):
    """Answer to a notice: whether somebody watches the board, and whether this process records the figures of the fleet."""

    watched: bool
    records: bool


class HistoryRow(msgspec.Struct):
    """Counts of the whole fleet in one step of the board's history, and its figures at that time."""

    step: int  # Number of the step, which begins at broker instant `step * headway.core.departure_board.STEP`.
    ended: int = 0  # All finished requests.
    answered: int = 0  # Answers with an output.
    refused: int = 0
    failed: int = 0  # Errors, including refusals.
    latencies: dict[int, int] = {}  # Answers by bucket of `headway.runtime.counters.SECONDS`.
    fleet: FleetFigures | None = None
    scalings: list[ScalingChange] = []


class News(msgspec.Struct, frozen=True):
    """News of the board for one reader."""

    notices: Sequence[Notice]  # Oldest first.
    cursor: str  # Name of the last notice, after which to read on.
    lost_at: float = 0.0  # Broker instant at which the board started over because the broker lost its data, or 0.
