"""How fresh a worker is, from the age of its last heartbeat."""

from __future__ import annotations

import msgspec

from headway.model import WorkerInfo, WorkerStatus

BEAT_EVERY = 1.0
"""Seconds between heartbeats."""
DEGRADED_AFTER = 3.0
OFFLINE_AFTER = 10.0


def judged(status: WorkerStatus, age: float) -> WorkerStatus:
    """The status to believe: what the worker said of itself, unless it has been silent for `age` seconds."""
    if age >= OFFLINE_AFTER:
        return WorkerStatus.OFFLINE
    if age >= DEGRADED_AFTER and status is WorkerStatus.HEALTHY:
        return WorkerStatus.DEGRADED
    return status


def believed(worker: WorkerInfo, now: float) -> WorkerInfo:
    """A line of the registry as it is to be believed at instant `now`."""
    status = judged(worker.status, now - worker.last_heartbeat)
    return worker if status is worker.status else msgspec.structs.replace(worker, status=status)
