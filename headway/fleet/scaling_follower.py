"""Follower of the autoscaler in a process with workers: takes its share of the number that the leader publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from headway.config.checks import LOCAL
from headway.core.capacity import Freshness
from headway.core.scaling.shares import shares
from headway.fleet.local_scaling import LocalScaling
from headway.ports import Fleet
from headway.runtime.logger import get_logger
from headway.runtime.periodic import PERIOD, Periodic, PeriodicResource

log = get_logger(__name__)


class ScalingFollower(PeriodicResource):
    """Follower in one process, as a resource of it; see `headway.app.lifecycle.Resource`.

    Arguments:
        process: id of the process.
        models: models whose workers it has.
        pools: sets their numbers in this process.
        fleet: fleet that knows the numbers of all.
        clock: monotonic seconds.
    """

    def __init__(
        self, process: str, models: Collection[str], pools: LocalScaling, fleet: Fleet, clock: Callable[[], float]
    ) -> None:
        self._process, self._models, self._pools, self._fleet = process, models, pools, fleet
        self._clock, self._freshness = clock, Freshness(clock())
        self._warned: set[tuple[str, str]] = set()
        """Models with the drivers of their controller that were warned of."""
        super().__init__(Periodic("scaling follower", self._follow, clock, every=PERIOD))

    async def _follow(self) -> None:
        capacities, members = await asyncio.gather(self._fleet.capacities(), self._fleet.members())
        for one in capacities:
            model, scaling = one.model, one.scaling
            if model not in self._models or scaling is None or not self._freshness.hear(one, self._clock()):
                continue
            of_each = {member.id: member.scalable[model] for member in members if model in member.scalable}
            if self._process not in of_each:
                continue
            self._warn_of_other(model, scaling.driver)
            self._pools.scale(model, shares(scaling.desired, of_each)[self._process])

    def _warn_of_other(self, model: str, driver: str) -> None:
        """Warn once of a controller that was not told that processes scale their own workers."""
        if driver in ("", LOCAL) or (model, driver) in self._warned:
            return
        self._warned.add((model, driver))
        log.warning(
            "this process scales its own workers, and its controller was told otherwise; its number is followed all the "
            "same: give both --autoscale local, and bounds and rules to the controller",
            model=model,
            controller=driver,
        )
