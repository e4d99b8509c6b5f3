"""Driver that makes the pools of workers in this process larger and smaller.

A slot that leaves claims no more and finishes its batch; a slot that does not start is started again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from headway.errors import ScalingRefused, ScalingUnavailable
from headway.ports import ScalingDriver
from headway.runtime.logger import get_logger

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


class LocalScaling(ScalingDriver):
    """Driver of this process's own workers. See `headway.ports.ScalingDriver`.

    Arguments:
        pools: pool of each model.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools
        self._asked: dict[str, int] = {}
        self._resizing: set[asyncio.Task[None]] = set()

    async def current(self, model: str) -> int:
        return self._asked.get(model, self._pool(model).size)

    async def scale(self, model: str, workers: int) -> None:
        """See ScalingDriver. What leaves is not waited for."""
        pool = self._pool(model)
        if workers > pool.most:
            raise ScalingRefused(
                f"{workers} workers of {model}: there are devices for {pool.most}. Name more, or lower --max-workers."
            )
        if not pool.serving:
            raise ScalingUnavailable(f"the workers of {model} do not serve yet, or no more")
        self._asked[model] = workers
        task = asyncio.get_running_loop().create_task(self._resize(model, pool, workers), name=f"resize {model}")
        self._resizing.add(task)
        task.add_done_callback(self._resizing.discard)

    async def _resize(self, model: str, pool: Pool, workers: int) -> None:
        try:
            await pool.resize(workers)
        except Exception as exc:
            log.exception("a pool of workers cannot be resized", model=model, workers=workers, error=str(exc))

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            raise ScalingRefused(
                f"{model!r} has no workers in this process. Serve it here, or choose another --autoscale."
            )
        return pool
