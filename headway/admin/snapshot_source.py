"""Source of the fleet's snapshots: asks the broker, and knows the last answer for as long as the broker is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from headway.admin import snapshot
from headway.admin.process import ProcessView
from headway.admin.snapshot import Snapshot
from headway.errors import BrokerUnavailable
from headway.http.readiness import soon
from headway.model import WorkerInfo
from headway.runtime.resource import BareResource
from headway.runtime.supervisor import Supervisor, heed_cancellation
from headway.runtime.ticks import until_tick

KEEP_EVERY = 15.0
"""Seconds between two snapshots that are taken while nobody asks, so that there is one when the broker goes away."""
FIRST_AFTER = 1.0
"""Seconds between the first two; each further pause is twice as long, as a fleet changes most while it comes up."""


class SnapshotSource(BareResource):
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
        self._stopped = asyncio.Event()

    def start(self, supervisor: Supervisor) -> None:
        """Take a snapshot now and then."""
        supervisor.start("snapshots", self._run)

    async def close(self) -> None:
        """See Resource."""
        self._stopped.set()

    async def fresh(self) -> Snapshot:
        """Fleet as it is now.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        found = await soon(snapshot.collect(self._process, self._learn))
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

    async def _run(self) -> None:
        pause = FIRST_AFTER
        while not self._stopped.is_set():
            with contextlib.suppress(BrokerUnavailable):  # Others tell of it, each once.
                await self.fresh()
            heed_cancellation()
            await asyncio.sleep(until_tick(FIRST_AFTER) + pause - FIRST_AFTER)
            pause = min(2 * pause, KEEP_EVERY)
