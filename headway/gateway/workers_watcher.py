"""Watcher of the workers, for all in a process that go by what they report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.core.likeness import nearest
from headway.model import WorkerInfo, WorkerStatus
from headway.ports import Registry
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic, PeriodicResource

READ_WORKERS_EVERY = 0.5
"""Seconds between two looks at the workers."""
log = get_logger(__name__)
ALONE_FOR = 30.0
"""Seconds for which a zone must have no worker before it is warned of, as workers may come later than gateways."""


class Learner(Protocol):
    """Whatever goes by the reports of workers."""

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""


class WorkersWatcher(PeriodicResource):
    """Watcher of the workers; see `headway.app.lifecycle.Resource`.

    Arguments:
        learners: told of the workers in this order, as the first may change which models are served.
        registry: broker that knows the workers.
        clock: monotonic seconds.
        every: returns the seconds until the next look.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        registry: Registry,
        clock: Callable[[], float],
        every: Callable[[], float] = lambda: READ_WORKERS_EVERY,
    ) -> None:
        self._learners = learners
        self._registry = registry
        super().__init__(Periodic("kinds of models", self.look, clock, every=every))

    async def look(self) -> None:
        """Look at the workers once."""
        self.learn(await self._registry.workers())

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""
        for learner in self._learners:
            learner.learn(workers)


class ZoneCheck:
    """Check of a gateway's zone, a learner: one that never had a worker while others have some was most likely mistyped.

    Arguments:
        zone: zone of the gateway; empty: none.
        clock: monotonic seconds.
    """

    def __init__(self, zone: str, clock: Callable[[], float]) -> None:
        self._zone, self._clock = zone, clock
        self._alone_since: float | None = None
        self._told = self._had_some = False

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of where the workers are; each time that none is in the zone of the gateway, that is logged once."""
        zones = {one.zone for one in workers if one.status is not WorkerStatus.OFFLINE}
        if not zones or self._zone in zones:
            self._alone_since, self._told = None, False
            self._had_some = self._had_some or self._zone in zones
            return
        now = self._clock()
        since = self._alone_since = now if self._alone_since is None else self._alone_since
        if not self._told and now - since >= ALONE_FOR:
            self._told = True
            self._warn(zones)

    def _warn(self, zones: set[str]) -> None:
        named = sorted(zones - {""})
        near = nearest(self._zone, named)
        if self._had_some:
            hint = "Its workers have left. Start some there, unless the zone is given up."
        else:
            hint = f"Did you mean {near[0]}?" if near else "Set --zone to that of the workers nearby."
        log.warning("no worker is in the zone of this gateway; workers of other zones answer",
                    zone=self._zone, zones=", ".join(named), hint=hint)  # fmt: skip
