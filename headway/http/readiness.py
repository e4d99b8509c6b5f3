"""Whether this process should get traffic, in one word."""

from __future__ import annotations

from collections.abc import Sequence

from headway.model import WorkerInfo, WorkerStatus

SERVING = frozenset(("ok", "degraded"))
"""The words that mean ready."""


def readiness(draining: bool, workers: Sequence[WorkerInfo]) -> str:
    """`ok`: every worker is healthy. `degraded`: some are. `unavailable`: none is. `draining`: shutting down."""
    healthy = sum(worker.status is WorkerStatus.HEALTHY for worker in workers)
    if draining:
        return "draining"
    if not healthy:
        return "unavailable"
    return "ok" if healthy == len(workers) else "degraded"
