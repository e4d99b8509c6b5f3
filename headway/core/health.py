"""Freshness of a worker, from the age of its last heartbeat.

A worker that is killed says nothing any more. Three heartbeats that fail to come are enough to believe it, so that
limits tighten within 3 s: its capacity is published and heard of half a second later each. A process that only stood
still for that long counts again with its next heartbeat; nothing of what it runs is given away before its lease ends.

A worker that rests says so, and beats half as often. It is given as long beyond the heartbeat that fails to come: a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headway.model import Departed, EndKind, ProcessInfo, WorkerInfo, WorkerStatus

HEARTBEAT_EVERY = 0.5
"""Seconds between heartbeats of a worker that works, and at the same ticks between the looks of whoever goes by them."""
REST_EVERY = 1.0
"""Seconds between heartbeats, and between looks, of who rests: a third of a lease."""
STANDBY_EVERY = 2.0
"""Seconds between heartbeats, and between looks, of a process that rests; see `headway.fleet.pace`."""
REST_AFTER = 3.0
"""Seconds after its last batch, or its last change, from which a worker rests."""
DEGRADED_AFTER = 1.5
"""Seconds without a heartbeat after which a worker that works is not believed any more."""
OFFLINE_AFTER = 10.0
DEPARTED_SECONDS = 600.0
"""Seconds for which it is known of a process that is gone how that ended."""
MOST_DEPARTED = 200
"""Most of these that are known; the oldest go first."""
SILENT_AFTER = 3.0
"""Seconds after which a process that says nothing no longer counts: three heartbeats. One that rests is given as long beyond the first that
fails to come."""
UNKNOWN_FOR = 10.0
"""Seconds for which a model or version that was there counts as not known, once the registry has lost its workers without a word.

So long may a worker take to say again that it is there after the broker has lost its state. Workers that leave say so.
"""
MEMORY_SCARCE = 0.9
"""Share of its memory in use above which a worker counts as lost capacity."""
MEMORY_AMPLE = 0.85
"""Share below which it counts again."""
MEMORY_GROWN = 0.02
"""Share that must have come to what a GPU's models took when they were loaded, where that alone is near MEMORY_SCARCE."""


def judged(status: WorkerStatus, age: float, every: float = HEARTBEAT_EVERY) -> WorkerStatus:
    """Return the status to believe: what the worker reported, unless it has been silent for `age` seconds.

    What is not loaded sends no heartbeats. `every`: see WorkerInfo.
    """
    if age >= OFFLINE_AFTER and status is not WorkerStatus.COLD:
        return WorkerStatus.OFFLINE
    if age >= DEGRADED_AFTER + grace(every) and status is WorkerStatus.HEALTHY:
        return WorkerStatus.DEGRADED
    return status


def grace(every: float) -> float:
    """Return the seconds for which a worker that beats `every` so many seconds may be silent beyond DEGRADED_AFTER."""
    return max(every - HEARTBEAT_EVERY, 0.0)


def degraded_at(worker: WorkerInfo) -> float:
    """Return the instant from which a healthy worker is not believed any more unless it beats again."""
    return worker.last_heartbeat + DEGRADED_AFTER + grace(worker.every)


def believed(worker: WorkerInfo, now: float) -> WorkerInfo:
    """Return the line of the registry as it is to be believed at instant `now`."""
    status = judged(worker.status, now - worker.last_heartbeat, worker.every)
    if status is worker.status:
        return worker
    return msgspec.structs.replace(worker, status=status, reason="no heartbeat")


def heard(members: Sequence[ProcessInfo]) -> Sequence[ProcessInfo]:
    """Return the processes that are still heard of. The newest heartbeat says what time it is: after an outage of the broker all are as old."""
    newest = max((member.last_seen for member in members), default=0.0)
    return [one for one in members if newest - one.last_seen < SILENT_AFTER + one.every - REST_EVERY]


def lost(member: ProcessInfo) -> Departed:
    """Return the end of a process that was not heard of any more."""
    reason = (
        f"nothing was heard of it for {OFFLINE_AFTER:g} s: it was killed, stands still, or lost the way to the broker"
    )
    return Departed(
        id=member.id, role=member.role, host=member.host, pid=member.pid, ending=EndKind.LOST, reason=reason,
        at=member.last_seen,
    )  # fmt: skip


def latest(departed: Iterable[Departed], members: Iterable[ProcessInfo]) -> list[Departed]:
    """Return the last end of each that has not come back, newest first."""
    back = {member.id for member in members}
    last = {one.id: one for one in sorted(departed, key=lambda one: one.at) if one.id not in back}
    return [*reversed(last.values())]


def scarce(used: float, before: bool, settled: float = 0.0) -> bool:
    """Decide whether memory with a share `used` counts as scarce.

    Arguments:
        used: share in use, 0 to 1.
        before: whether it did until now.
        settled: share that is always in use, as by a model that takes all of a GPU's memory at once. A smaller load would
            not free it, so that it does not count.
    """
    if used > max(MEMORY_SCARCE, settled + MEMORY_GROWN):
        return True
    return before and used >= max(MEMORY_AMPLE, settled + MEMORY_GROWN / 2)
