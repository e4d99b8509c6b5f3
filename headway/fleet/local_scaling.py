"""Numbers of workers in the pools of this process, as the autoscaler or its follower sets them.

A slot that leaves claims no more and finishes its batch; a slot that does not start is started again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

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
