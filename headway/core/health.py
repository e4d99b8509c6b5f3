"""Judges whether a worker is up by the age of its last heartbeat.

A killed worker counts as healthy until three heartbeats are missing, 1.5 s after its last. Limits are lowered within 3 s,
because publishing and reading the lower capacity take half a second each. A worker that was merely suspended is healthy again
from its next heartbeat, and keeps its batches until their leases expire. An idle worker sends half as many heartbeats, and
counts as healthy until 2 s after the last. In both cases, a worker has one second left after the first missing heartbeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headway.model import Departed, EndKind, ProcessInfo, WorkerInfo, WorkerStatus

HEARTBEAT_EVERY = 0.5  # Seconds between the heartbeats of a busy worker, and between checks of heartbeats.
REST_EVERY = 1.0  # Seconds between heartbeats, and between checks, of a resting worker: a third of a lease.
STANDBY_EVERY = 2.0  # Seconds between heartbeats, and between checks, of a resting process; see `headway.fleet.pace`.
REST_AFTER = 3.0  # Seconds after its last batch, or its last change, from which a worker rests.
DEGRADED_AFTER = 1.5  # Seconds without a heartbeat after which a busy worker no longer counts as healthy.
OFFLINE_AFTER = 10.0
DEPARTED_SECONDS = 600.0  # Seconds for which the ends of processes are remembered.
MOST_DEPARTED = 200  # Limit on the remembered ends. The oldest are dropped first.
SILENT_AFTER = 3.0  # Seconds without a heartbeat after which a process that sends one every REST_EVERY is gone.
UNKNOWN_FOR = 10.0  # A model that loses all workers isn't gone for this many seconds: they may register again.
MEMORY_SCARCE = 0.9  # Share of its memory in use above which a worker counts as lost capacity.
MEMORY_AMPLE = 0.85  # Share in use below which it counts again.
MEMORY_GROWN = 0.02  # If loaded models alone take about MEMORY_SCARCE, memory is scarce above their share plus this.


def judged(status: WorkerStatus, age: float, every: float = HEARTBEAT_EVERY) -> WorkerStatus:
    """Return the reported status, or OFFLINE or DEGRADED if the worker has been silent for too long. `age` is how long it has
    been silent, and `every` the period of its heartbeats, in seconds. A COLD worker, whose model isn't loaded, sends none and
    stays COLD."""
    if age >= OFFLINE_AFTER and status is not WorkerStatus.COLD:
        return WorkerStatus.OFFLINE
    if age >= DEGRADED_AFTER + grace(every) and status is WorkerStatus.HEALTHY:
        return WorkerStatus.DEGRADED
    return status


def grace(every: float) -> float:
    """Return how many seconds a worker with this heartbeat period may be silent in addition to DEGRADED_AFTER."""
    return max(every - HEARTBEAT_EVERY, 0.0)


def degraded_at(worker: WorkerInfo) -> float:
    """Return the time at which a healthy worker no longer counts as healthy, unless it sends a heartbeat."""
    return worker.last_heartbeat + DEGRADED_AFTER + grace(worker.every)


def believed(worker: WorkerInfo, now: float) -> WorkerInfo:
    """Return a worker's registry entry with its status as judged at time `now`."""
    status = judged(worker.status, now - worker.last_heartbeat, worker.every)
    if status is worker.status:
        return worker
    return msgspec.structs.replace(worker, status=status, reason="no heartbeat")


def heard(members: Sequence[ProcessInfo]) -> Sequence[ProcessInfo]:
    """Return the processes that aren't silent. Silence is measured up to the newest heartbeat of all processes, because after
    an outage every heartbeat is old."""
    newest = max((member.last_seen for member in members), default=0.0)
    return [member for member in members if newest - member.last_seen < SILENT_AFTER + member.every - REST_EVERY]


def lost(member: ProcessInfo) -> Departed:
    """Return the record of departure for a process that has stopped sending heartbeats."""
    reason = f"no heartbeat for {OFFLINE_AFTER:g} s: it was killed, is stuck, or lost its connection to the broker"
    return Departed(
        id=member.id, role=member.role, host=member.host, pid=member.pid, ending=EndKind.LOST, reason=reason,
        at=member.last_seen,
    )  # fmt: skip


def latest(departed: Iterable[Departed], members: Iterable[ProcessInfo]) -> list[Departed]:
    """Return the last departure of each process that hasn't come back, newest first."""
    back = {member.id for member in members}
    last = {end.id: end for end in sorted(departed, key=lambda end: end.at) if end.id not in back}
    return [*reversed(last.values())]


def scarce(used: float, before: bool, settled: float = 0.0) -> bool:
    """Return True if memory is scarce, given the share in use and whether it was scarce at the last check (`before`). `settled`
    is the share that is always in use, for example by a model that allocates all memory: less load frees none of it."""
    if used > max(MEMORY_SCARCE, settled + MEMORY_GROWN):
        return True
    return before and used >= max(MEMORY_AMPLE, settled + MEMORY_GROWN / 2)
