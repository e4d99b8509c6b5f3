"""Reaping: each queue of this process is reaped when its server asks for it. The lists of queues are read along with it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection

from headway.brokers.reap_timer import ReapTimer
from headway.brokers.redis.function_library import REAP_EVERY, REST_SECONDS, STIRS_SECONDS
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.shard_queue import Queue
from headway.brokers.redis.together import all_of
from headway.errors import BrokerUnavailable
from headway.model import Cause
from headway.runtime.counters import BrokerCounts
from headway.runtime.periodic import EARLY, until_tick

LEAST_PAUSE = 0.001
"""Minimum seconds between two reaps."""


class Reaping:
    """Reaping of one process."""

    def __init__(self, queues: QueueTable, shards: int, counters: BrokerCounts, rng: Callable[[], float]) -> None:
        self._queues, self._shards = queues, shards
        self._counters, self._rng = counters, rng
        self._due_at: dict[Queue, float] = {}
        self._watched_until: dict[Queue, float] = {}
        """Instant until which some process is known to watch each queue."""
        self._stirred: set[Queue] = set()
        """Queues with activity since their last reap began."""
        self._mine: set[Queue] = set()
        """Queues that this process reaped when it last asked."""
        self._timer = ReapTimer(self._reap_early)
        self._rest = 0.0

    @property
    def reaps(self) -> bool:
        """True if this process reaps any of its queues."""
        return bool(self._mine)

    async def reap(self, rest: float) -> float:
        """Reap the queues that are due. Returns the seconds until the next queue is due.

        A queue at rest is due again after `rest` seconds, or sooner if it gets entries. At 0, no queue rests.

        Raises:
            BrokerUnavailable: a queue didn't answer. All others are reaped.
        """
        self._rest = rest
        await self._reap_due(look=True)
        now, at = asyncio.get_running_loop().time(), min(self._due_at.values())
        if rest:
            self._timer.tell(at)
        return max(at - now, LEAST_PAUSE)

    def stirred(self, queue: Queue) -> None:
        """Note activity in a queue. The queue is reaped soon, unless some process watches it all the time."""
        now = asyncio.get_running_loop().time()
        self._stirred.add(queue)  # A reap under way may have missed the activity.
        if self._rest and self._watched_until.get(queue, math.inf) <= now and self._due_at[queue] > now + REAP_EVERY:
            self._due_at[queue] = now + REAP_EVERY
            self._timer.move_up(now + REAP_EVERY, now)

    def forget(self, queues: Collection[Queue]) -> None:
        for queue in queues:
            self._due_at.pop(queue, None)
            self._watched_until.pop(queue, None)
            self._stirred.discard(queue)
            self._mine.discard(queue)

    async def close(self) -> None:
        await self._timer.close()

    async def _reap_due(self, *, look: bool) -> None:
        now = asyncio.get_running_loop().time()
        due = [queue for queue in self._queues.every if self._due_at.get(queue, -math.inf) <= now + 1e-6]
        looks = [self._queues.look()] if look else []
        await all_of(*looks, *(self._reap(queue) for queue in due))

    async def _reap_early(self) -> tuple[float, float]:
        """Reap ahead of the regular reap, which tries silent servers again."""
        with contextlib.suppress(BrokerUnavailable):
            await self._reap_due(look=False)
        now = asyncio.get_running_loop().time()
        return min((at for at in self._due_at.values() if at > now), default=math.inf), now

    async def _reap(self, queue: Queue) -> None:
        self._stirred.discard(queue)
        rests, rest = self._rest > 0.0, self._rest or REST_SECONDS
        due, again, calm, reaps = await queue.reap(self._rng(), self._shards, rests)
        (self._mine.add if reaps else self._mine.discard)(queue)
        now = asyncio.get_running_loop().time()
        if calm and queue in self._stirred:
            due = min(due, REAP_EVERY)
        elif calm and (due >= REST_SECONDS * (1 - EARLY) or not reaps):  # Joins other periodic calls.
            due = until_tick(rest) + max(math.floor(due / rest + EARLY) - 1, 0) * rest
        self._due_at[queue] = now + due
        self._watched_until[queue] = now if calm else now + STIRS_SECONDS
        if again:
            self._counters.retries[Cause.LEASE_LOST.value] += again
