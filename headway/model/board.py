"""The departure board: each process reports its batches, slots and counts there, for the dashboards of all processes.

A process posts a notice every second, and more often while somebody is watching. One process also reports the fleet's figures."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

RUNNING = ""  # Outcome of a running batch.
ARRIVED = "ok"  # Outcome of a batch that returned outputs. The outcome of a failed batch is the cause.
GIVEN_BACK = "given back"  # Outcome of a batch that its slot couldn't run.


class BatchDeparture(msgspec.Struct, frozen=True, array_like=True):
    """One batch that left the queue, and may have finished since."""

    worker: str
    model: str
    version: str
    left: float  # Broker time at which it left the queue.
    size: int  # Number of entries, or of rows if the entries are tensors.
    fill: float  # Share of a full batch, from 0 to 1.
    reason: str  # Why it left at that time.
    tiers: tuple[int, ...]  # `size` by tier, highest first.
    seconds: float = 0.0  # Duration of its run, or 0 while it is running.
    outcome: str = RUNNING  # RUNNING, ARRIVED, GIVEN_BACK, or the cause of its failure.


class SlotChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of a slot's status or of a rollout."""

    worker: str  # Id of the worker, or name of the rollout.
    model: str
    status: str  # Value of WorkerStatus, or any text for a rollout.
    restarts: int  # Number of times that the worker's process was replaced.
    ago: float = 0.0  # Seconds from the change to its notice.
    cause: str = ""  # Last error before the change, if it was the cause.


class ScalingChange(msgspec.Struct, frozen=True, array_like=True):
    """One decision of the autoscaler."""

    model: str
    before: int  # Desired number of workers before the decision.
    desired: int  # Desired number of workers after it.
    direction: str  # `up`, `down`, or `again` if the same number is requested once more.
    reason: str
    ago: float = 0.0  # Seconds from the decision to its notice.


class RequestFlow(msgspec.Struct, frozen=True, array_like=True):
    """Requests that one process finished in a period of `seconds`."""

    seconds: float
    answered: dict[str, int] = {}  # Answers with an output, by tier.
    refused: dict[str, int] = {}  # Refusals, by reason.
    failed: dict[str, int] = {}  # Errors other than refusals, by code.
    ended: dict[str, int] = {}  # All finished requests, by model.
    latencies: dict[str, dict[int, int]] = {}  # Answers by tier, then by bucket of `headway.runtime.counters.SECONDS`.
    retries: dict[str, int] = {}  # Entries queued again, by cause.


class FleetFigures(msgspec.Struct, frozen=True, array_like=True):
    """Fleet-wide figures at one point in time."""

    waiting: tuple[int, ...]  # Queued entries by tier, highest first.
    oldest: tuple[float, ...]  # Seconds that the oldest entry of each tier has waited.
    capacity: float  # Maximum inputs per second of all workers in total, or 0 if unknown.
    usable: float  # Capacity times the target utilisation.
    healthy: int
    workers: int  # Number of workers that aren't offline.


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A process's reports since its last notice."""

    process: str
    departures: tuple[BatchDeparture, ...] = ()  # Batches that left or finished. A batch that did both is listed once.
    changes: tuple[SlotChange, ...] = ()
    untold: int = 0  # Number of batches and changes left out for lack of space.
    flow: RequestFlow | None = None
    fleet: FleetFigures | None = None  # Set by the only process that records the fleet's figures.
    at: float = 0.0  # Broker time, set by the board.
    scalings: tuple[ScalingChange, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.departures or self.changes or self.untold or self.flow or self.fleet or self.scalings)


class Posted(msgspec.Struct, frozen=True):
    """Answer to a notice: is somebody watching the board, and should this process record the fleet's figures?"""

    watched: bool
    records: bool


class HistoryRow(msgspec.Struct):
    """One step of the board's history: the fleet's counts in that step, and its figures at that time."""

    step: int  # Number of the step. It begins at broker time `step * headway.core.departure_board.STEP`.
    ended: int = 0  # All finished requests.
    answered: int = 0  # Answers with an output.
    refused: int = 0
    failed: int = 0  # Errors, including refusals.
    latencies: dict[int, int] = {}  # Answers by bucket of `headway.runtime.counters.SECONDS`.
    fleet: FleetFigures | None = None
    scalings: list[ScalingChange] = []


class News(msgspec.Struct, frozen=True):
    """Notices that one reader of the board hasn't seen yet."""

    notices: Sequence[Notice]  # Oldest first.
    cursor: str  # Position of the last notice, from which to continue reading.
    lost_at: float = 0.0  # Broker time at which the board started over because the broker lost its data, or 0.
