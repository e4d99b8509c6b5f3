"""Numbers of workers in the pools of this process, and the follower that sets them where the leader is elsewhere.

A slot that leaves claims no more and finishes its batch; a slot that does not start is started again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from headway.config.settings import LOCAL
from headway.core.capacity import Freshness
from headway.core.scaling.shares import shares
from headway.ports import Fleet
from headway.runtime.logger import get_logger
from headway.runtime.periodic import PERIOD, Periodic, PeriodicResource

log = get_logger(__name__)


class Pool(Protocol):
    """Pool of slots that can become more or fewer; see `headway.worker.pool`."""

    @property
    def size(self) -> int:
        """Number of slots that serve or start."""

    @property
    def most(self) -> int:
        """Most slots that there can be."""

    @property
    def serving(self) -> bool:
        """Whether it can be resized."""

    async def resize(self, size: int) -> None:
        """Serve with so many slots; returns when those that leave have gone."""


class LocalScaling:
    """Numbers of workers in the pools of this process.

    Arguments:
        pools: pool of each model.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools
        self._asked: dict[str, int] = {}
        self._resizing: set[asyncio.Task[None]] = set()

    def current(self, model: str) -> int:
        """Return the number that was asked for last, or else that of the slots; 0 for a model without a pool."""
        pool = self._pools.get(model)
        return 0 if pool is None else self._asked.get(model, pool.size)

    def scale(self, model: str, workers: int) -> None:
        """Begin to have so many workers, as far as there are devices.

        Nothing happens while the pool has yet to start: callers look again anyway.
        """
        pool = self._pools.get(model)
        if pool is None or not pool.serving or (workers := min(workers, pool.most)) == self.current(model):
            return
        self._asked[model] = workers
        task = asyncio.get_running_loop().create_task(self._resize(model, pool, workers), name=f"resize {model}")
        self._resizing.add(task)
        task.add_done_callback(self._resizing.discard)

    async def _resize(self, model: str, pool: Pool, workers: int) -> None:
        try:
            await pool.resize(workers)
        except Exception as exc:
            log.exception("a pool of workers cannot be resized", model=model, workers=workers, error=str(exc))


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
