"""Resize the worker pools of this process, as its own controller or a leader elsewhere decides.

A slot finishes its batch before it is taken away. A slot that fails to start is tried again for as long as it is wanted.
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
    """Worker slots whose number can change; see `headway.worker.pool`."""

    @property
    def size(self) -> int:
        """Number of slots that serve or are starting."""

    @property
    def most(self) -> int:
        """Number of slots that there are devices for."""

    @property
    def serving(self) -> bool:
        """True once the pool can be resized."""

    async def resize(self, size: int) -> None:
        """Serve with `size` slots. Return once the slots that are taken away have finished."""


class LocalScaling:
    """The pools of this process by model, and the size that each was asked for last."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools
        self._asked: dict[str, int] = {}
        self._resizing: set[asyncio.Task[None]] = set()

    def current(self, model: str) -> int:
        """Return the size that was asked for last, or else the pool's size; 0 for a model without a pool."""
        pool = self._pools.get(model)
        return 0 if pool is None else self._asked.get(model, pool.size)

    def scale(self, model: str, workers: int) -> None:
        """Start to resize a model's pool, to no more workers than there are devices. Leave a pool alone that has not started yet,
        as the caller asks again shortly."""
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
            log.exception("could not resize a pool of workers", model=model, workers=workers, error=str(exc))


class ScalingFollower(PeriodicResource):
    """Resource that resizes the pools of `models` by the published numbers; see `headway.app.lifecycle.Resource`."""

    def __init__(
        self, process: str, models: Collection[str], pools: LocalScaling, fleet: Fleet, clock: Callable[[], float]
    ) -> None:
        self._process, self._models, self._pools, self._fleet = process, models, pools, fleet
        self._clock, self._freshness = clock, Freshness(clock())
        self._warned: set[tuple[str, str]] = set()
        """Pairs of a model and a driver that the log has warned about."""
        super().__init__(Periodic("scaling follower", self._follow, clock, every=PERIOD))

    async def _follow(self) -> None:
        capacities, members = await asyncio.gather(self._fleet.capacities(), self._fleet.members())
        for capacity in capacities:
            model, scaling = capacity.model, capacity.scaling
            if model not in self._models or scaling is None or not self._freshness.hear(capacity, self._clock()):
                continue
            scalable = {member.id: member.scalable[model] for member in members if model in member.scalable}
            if self._process not in scalable:
                continue
            self._warn_of_other(model, scaling.driver)
            self._pools.scale(model, shares(scaling.desired, scalable)[self._process])

    def _warn_of_other(self, model: str, driver: str) -> None:
        """Warn once about a controller whose driver is another, as it doesn't know that processes scale their own workers."""
        if driver in ("", LOCAL) or (model, driver) in self._warned:
            return
        self._warned.add((model, driver))
        log.warning(
            "this process scales its own workers, but its controller is set to another driver; the controller's number is "
            "followed all the same: start both with --autoscale local, and set the bounds and rules on the controller",
            model=model,
            controller=driver,
        )
