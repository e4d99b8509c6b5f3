"""Freshness of a worker, from the age of its last heartbeat.

A worker that is killed says nothing any more. Three heartbeats that fail to come are enough to believe it, so that
limits tighten within 3 s: its capacity is published and heard of half a second later each. A process that only stood
still for that long counts again with its next heartbeat; nothing of what it runs is given away before its lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.model import ProcessInfo, WorkerInfo, WorkerStatus

HEARTBEAT_EVERY = 0.5
"""Seconds between heartbeats."""
DEGRADED_AFTER = 1.5
OFFLINE_AFTER = 10.0
SILENT_AFTER = 3.0
"""Seconds after which a process that says nothing no longer counts: three heartbeats of processes."""
UNKNOWN_FOR = 10.0
"""Seconds for which a model or version that was there counts as not known, once the registry has lost its workers without a word.

So long may a worker take to say again that it is there after the broker has lost its state. Workers that leave say so.
"""
MEMORY_SCARCE = 0.9
"""Share of its memory in use above which a worker counts as lost capacity."""
MEMORY_AMPLE = 0.85
"""Share below which it counts again."""


def judged(status: WorkerStatus, age: float) -> WorkerStatus:
    """Status to believe: what the worker reported, unless it has been silent for `age` seconds.

    What is not loaded sends no heartbeats.
    """
    if age >= OFFLINE_AFTER and status is not WorkerStatus.COLD:
        return WorkerStatus.OFFLINE
    if age >= DEGRADED_AFTER and status is WorkerStatus.HEALTHY:
        return WorkerStatus.DEGRADED
    return status


def believed(worker: WorkerInfo, now: float) -> WorkerInfo:
    """Line of the registry as it is to be believed at instant `now`."""
    status = judged(worker.status, now - worker.last_heartbeat)
    if status is worker.status:
        return worker
    return msgspec.structs.replace(worker, status=status, reason="no heartbeat")


def heard(members: Sequence[ProcessInfo]) -> Sequence[ProcessInfo]:
    """Processes that are still heard of. The newest heartbeat says what time it is: after an outage of the broker all are as old."""
    newest = max((member.last_seen for member in members), default=0.0)
    return [member for member in members if newest - member.last_seen < SILENT_AFTER]


def scarce(used: float, before: bool) -> bool:
    """Decide whether memory with a share `used` counts as scarce. `before`: whether it did until now."""
    return used > MEMORY_SCARCE or (before and used >= MEMORY_AMPLE)
