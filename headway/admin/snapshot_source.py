"""Source of the fleet's snapshots: asks the broker, and knows the last answer for as long as the broker is away."""

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
"""Seconds between two snapshots that are taken while nobody asks, so that there is one when the broker goes away.

The first two are a second apart; each further pause is twice as long, as a fleet changes most while it comes up."""


class SnapshotSource(PeriodicResource):
    """Source of one process's snapshots. It is a resource of a process whose broker can go away; see `headway.app.lifecycle.Resource`.

    Arguments:
        process: view of the process.
        learn: is told of the workers of each snapshot.
    """

    def __init__(self, process: ProcessView, learn: Callable[[Sequence[WorkerInfo]], None]) -> None:
        self._process = process
        self._learn = learn
        self._last: Snapshot | None = None
        self._taken_at = 0.0
        self._pause = 0.5
        super().__init__(Periodic("snapshots", self._take, process.clock, what="", every=self._every))

    async def fresh(self) -> Snapshot:
        """Fleet as it is now.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        found = await within_answer_time(snapshot.collect(self._process, self._learn))
        self._last, self._taken_at = found, self._process.clock()
        return found

    async def latest(self) -> Snapshot:
        """Fleet as it is now or, while the broker is away, as it was last known.

        Raises:
            BrokerUnavailable: the broker does not answer, and nothing is known.
        """
        try:
            return await self.fresh()
        except BrokerUnavailable as exc:
            known = self.known(str(exc))
            if known is None:
                raise
            return known

    def known(self, away: str) -> Snapshot | None:
        """Fleet as it was last known, with its age and why there is no later one; None when nothing is known."""
        if self._last is None:
            return None
        age = self._process.clock() - self._taken_at
        return snapshot.aged(self._last, age, away)

    async def _take(self) -> None:
        await self.fresh()

    def _every(self) -> float:
        self._pause = min(2 * self._pause, KEEP_EVERY)
        return self._pause
