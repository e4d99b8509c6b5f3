"""Reaping of the queues of one process: each when its server wants it, and with it the look at what the servers list."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from headway.brokers.redis.offering import all_of
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.shard_queue import Queue
from headway.model import Cause
from headway.runtime.counters import Counters


class Reaping:
    """Reaping of one process.

    Arguments:
        queues: queues of the process.
        shards: queues that each model is split into.
        counters: counters of retries.
        rng: uniform in [0, 1).
    """

    def __init__(self, queues: QueueTable, shards: int, counters: Counters, rng: Callable[[], float]) -> None:
        self._queues, self._shards = queues, shards
        self._counters, self._rng = counters, rng
        self._due_at: dict[Queue, float] = {}

    async def reap(self) -> None:
        """Reap the queues that are due. Raises BrokerUnavailable when one of them did not answer, after all others have."""
        now = asyncio.get_running_loop().time()
        due = [queue for queue in self._queues.every if self._due_at.get(queue, -math.inf) <= now + 1e-6]
        await all_of(self._queues.look(), *(self._reap(queue) for queue in due))

    @property
    def pause(self) -> float:
        """Seconds until the next queue is due."""
        return max(min(self._due_at.values()) - asyncio.get_running_loop().time(), 0.001)

    def forget(self, queues: Collection[Queue]) -> None:
        """Forget these queues."""
        for queue in queues:
            self._due_at.pop(queue, None)

    async def _reap(self, queue: Queue) -> None:
        due, again = await queue.reap((self._rng(), self._rng()), self._shards)
        self._due_at[queue] = asyncio.get_running_loop().time() + due
        if again:
            self._counters.retries[Cause.LEASE_LOST.value] += again
