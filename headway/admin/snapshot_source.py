"""Source of snapshots: asks the broker, and keeps the last answer for when the broker is out of reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.admin import snapshot
from headway.admin.process import ProcessView
from headway.admin.snapshot import Snapshot
from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable
from headway.model import WorkerInfo
from headway.runtime.periodic import Periodic, PeriodicResource

KEEP_EVERY = 16.0
"""Longest pause between snapshots that nobody asked for, in seconds; taken to have one when the broker goes away.

The first pause is 1 s and each is twice as long as the last, because a fleet changes most while it starts."""


class SnapshotSource(PeriodicResource):
    """Source of one process's snapshots. `learn` is called with the workers of each."""

    def __init__(self, process: ProcessView, learn: Callable[[Sequence[WorkerInfo]], None]) -> None:
        self._process = process
        self._learn = learn
        self._last: Snapshot | None = None
        self._taken_at = 0.0
        self._pause = 0.5
        super().__init__(Periodic("snapshots", self._take, process.clock, what="", every=self._every))

    async def fresh(self) -> Snapshot:
        """Return the fleet as it is now. Raises BrokerUnavailable if the broker doesn't answer."""
        self._last = await within_answer_time(snapshot.collect(self._process, self._learn))
        self._taken_at = self._process.clock()
        return self._last

    async def latest(self) -> Snapshot:
        """Return the fleet as it is now; while the broker is out of reach, as it was last known. Raises BrokerUnavailable if
        nothing is known."""
        try:
            return await self.fresh()
        except BrokerUnavailable as exc:
            known = self.known(str(exc))
            if known is None:
                raise
            return known

    def known(self, away: str) -> Snapshot | None:
        """Return the fleet as it was last known, aged, with why there is no newer snapshot; None if nothing is known."""
        if self._last is None:
            return None
        age = self._process.clock() - self._taken_at
        return snapshot.aged(self._last, age, away)

    async def _take(self) -> None:
        await self.fresh()

    def _every(self) -> float:
        self._pause = min(2 * self._pause, KEEP_EVERY)
        return self._pause
