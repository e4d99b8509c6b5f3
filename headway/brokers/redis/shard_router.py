"""Shards of a model's load: the home of each slot, and the queue of each entry.

Both go by a census: the workers that were healthy about a second ago. Processes that have counted the same workers
agree without asking one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway.brokers.redis.registry import Registry
from headway.brokers.redis.shard_queue import Queue
from headway.core import shards as sharding
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import Entry, WorkerInfo, WorkerStatus

CENSUS_AGE = 1.0
"""Seconds for which a census is good."""
REMEMBERED = 100_000
"""Most entries whose queue is remembered."""

_Key = tuple[str, str]


class ShardRouter:
    """Router of one process: it chooses the home of each slot and the queue of each entry.

    Arguments:
        queues: queues of each model, one for each shard.
        limits: bounds of the queues.
        every: all queues.
        shards: queues of each model.
        registry: worker registry.
        rng: uniform in [0, 1).
    """

    def __init__(
        self,
        queues: Mapping[str, Sequence[Queue]],
        limits: Mapping[str, QueueLimits],
        every: Sequence[Queue],
        shards: int,
        registry: Registry,
        rng: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._limits = limits
        self._registry = registry
        self._shards = shards
        self._every = every
        self._census: dict[str, list[str]] = {}
        self._counted_at = -math.inf
        self._counting: asyncio.Task[None] | None = None
        self._homes: dict[tuple[str, str], Queue] = {}
        self._turn = int(rng() * 1_000_003)
        self._placed: dict[_Key, Queue] = {}

    async def close(self) -> None:
        """Stop counting workers."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def count(self, wait: bool = False) -> None:
        """Count the workers anew, when that is due.

        The call returns at once unless `wait` is set, or the last census is too old to go by meanwhile, as after a
        rest.
        """
        if self._shards == 1:
            return
        loop = asyncio.get_running_loop()
        age = loop.time() - self._counted_at
        if age >= CENSUS_AGE and (self._counting is None or self._counting.done()):
            self._counted_at = loop.time()
            self._counting = loop.create_task(self._count())
        if self._counting is not None and (wait or not self._census or age >= 2 * CENSUS_AGE):
            await asyncio.wait({self._counting})

    def home(self, worker: str, model: str) -> Queue:
        """Home shard of a slot, which `move` changes."""
        return self._homes.get((model, worker)) or self._found_home(worker, model)

    def move(self, worker: WorkerInfo) -> Queue | None:
        """Give a slot the home that it has by the last census. Returns its former home if that was another."""
        home = self._found_home(worker.worker_id, worker.queue)
        key = (worker.queue, worker.worker_id)
        before, self._homes[key] = self._homes.get(key), home
        return before if before is not home else None

    def others(self, queue: Queue) -> list[Queue]:
        """Other shards of a model."""
        return [one for one in self._queues[queue.name] if one is not queue]

    def deal(self, entries: Sequence[Entry]) -> list[Queue]:
        """Queue of each entry: the queue it went to before, or the next shard's turn, a part of a batch at a time.

        An entry that has anything in common with others of its tenant goes to the queue of that tenant.
        """
        if self._shards == 1:
            return [self._queues[entry.queue][0] for entry in entries]
        counts = Counter(entry.queue for entry in entries)
        parts = {model: sharding.parts(count, self._limits[model].max_batch) for model, count in counts.items()}
        dealt = []
        for position, entry in enumerate(entries):
            key = (entry.tenant, entry.id)
            queue = self._placed.get(key)
            if queue is None and (entry.limits or entry.dedup_keys or entry.digest):
                queue = self._placed[key] = self._of_tenant(entry)
            elif queue is None:
                slots = len(self._census.get(entry.queue, []))
                turn = self._turn + position % parts[entry.queue]
                shard = sharding.in_turn(turn, slots, sharding.active(self._shards, slots))
                queue = self._placed[key] = self._queues[entry.queue][shard]
            if len(self._placed) > REMEMBERED:
                del self._placed[next(iter(self._placed))]
            dealt.append(queue)
        self._turn += max(parts.values(), default=0)
        return dealt

    def where(self, key: _Key) -> Sequence[Queue]:
        """Queues in which an entry may be, by (tenant, id)."""
        placed = self._placed.get(key)
        return self._every if placed is None else [placed]

    def forget(self, keys: Iterable[_Key]) -> None:
        """Forget entries that have come to their end."""
        if self._placed:
            for key in keys:
                self._placed.pop(key, None)

    def _in_use(self, model: str) -> int:
        return sharding.active(self._shards, len(self._census.get(model, [])))

    def _of_tenant(self, entry: Entry) -> Queue:
        return self._queues[entry.queue][sharding.of_tenant(entry.tenant, self._in_use(entry.queue))]

    def _found_home(self, worker: str, model: str) -> Queue:
        alive = self._census.get(model, [])
        return self._queues[model][sharding.home(worker, alive, sharding.active(self._shards, len(alive)))]

    async def _count(self) -> None:
        census: dict[str, list[str]] = {}
        with contextlib.suppress(BrokerUnavailable):  # Then the last one holds.
            for worker in await self._registry.workers():
                if worker.status is WorkerStatus.HEALTHY:
                    census.setdefault(worker.queue, []).append(worker.worker_id)
            self._census = census
            for model, queues in self._queues.items():
                for queue in queues:
                    queue.in_use = self._in_use(model)
