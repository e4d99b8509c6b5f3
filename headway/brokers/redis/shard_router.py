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
from headway.model import Entry, WorkerInfo, WorkerStatus, model_and_version

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
        self._spread: dict[str, int] = {}
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

    def apart(self, name: str) -> Sequence[Queue]:
        """Shards where tenants of the model may be, and no slot of this queue is at home: other versions have more slots."""
        spread = self._spread.get(model_and_version(name)[0], 1) if name in self._census else 0
        return self._queues[name][self._in_use(name) : spread]

    def others(self, queue: Queue) -> list[Queue]:
        """Other shards of a model."""
        return [one for one in self._queues[queue.name] if one is not queue]

    def deal(self, entries: Sequence[Entry]) -> list[Queue]:
        """Queue of each entry: the queue it went to before, or the next shard's turn, a part of a batch at a time.

        An entry that has anything in common with others of its tenant goes to the queue of that tenant.
        """
        if self._shards == 1:
            return [self._queue_before(entry) or self._queues[entry.queue][0] for entry in entries]
        counts = Counter(entry.queue for entry in entries)
        parts = {model: sharding.parts(count, self._limits[model].max_batch) for model, count in counts.items()}
        dealt = []
        for position, entry in enumerate(entries):
            queue = self._queue_before(entry)
            if queue is None and (entry.limits or entry.dedup_keys or entry.digest):
                queue = self._of_tenant(entry)
            elif queue is None:
                slots = len(self._census.get(entry.queue, []))
                turn = self._turn + position % parts[entry.queue]
                shard = sharding.in_turn(turn, slots, sharding.active(self._shards, slots))
                queue = self._queues[entry.queue][shard]
            self.place(entry, queue)
            dealt.append(queue)
        self._turn += max(parts.values(), default=0)
        return dealt

    def place(self, entry: Entry, queue: Queue) -> None:
        """Remember the queue of an entry, until its end."""
        self._placed[entry.tenant, entry.id] = queue
        if len(self._placed) > REMEMBERED:
            del self._placed[next(iter(self._placed))]

    def _queue_before(self, entry: Entry) -> Queue | None:
        """The queue that an entry went to before."""
        queue = self._placed.get((entry.tenant, entry.id)) if self._placed else None
        return queue if queue is not None and queue.model == entry.model else None

    def where(self, key: _Key) -> Sequence[Queue]:
        """Queues in which an entry may be, by (tenant, id)."""
        placed = self._placed.get(key)
        return self._every if placed is None else [placed]

    def forget(self, keys: Iterable[_Key]) -> None:
        """Forget entries that have come to their end."""
        if self._placed:
            for key in keys:
                self._placed.pop(key, None)

    def _in_use(self, name: str) -> int:
        return sharding.active(self._shards, len(self._census.get(name, [])))

    def _of_tenant(self, entry: Entry) -> Queue:
        """Queue of what a tenant has in common, in the same shard of all versions of a model."""
        return self._queues[entry.queue][sharding.of_tenant(entry.tenant, self._spread.get(entry.model, 1))]

    def _found_home(self, worker: str, name: str) -> Queue:
        alive = self._census.get(name, [])
        return self._queues[name][sharding.home(worker, alive, self._in_use(name))]

    async def _count(self) -> None:
        census: dict[str, list[str]] = {}
        with contextlib.suppress(BrokerUnavailable):  # Then the last one holds.
            for worker in await self._registry.workers():
                if worker.status is WorkerStatus.HEALTHY:
                    census.setdefault(worker.queue, []).append(worker.worker_id)
            self._census = census
            slots = Counter[str]()
            for name, workers in census.items():
                slots[model_and_version(name)[0]] += len(workers)
            self._spread = {model: sharding.active(self._shards, count) for model, count in slots.items()}
            for name, queues in self._queues.items():
                for queue in queues:
                    queue.in_use, queue.spread = self._in_use(name), self._spread.get(queue.model, 1)
