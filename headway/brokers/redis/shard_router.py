"""Shards of a model's load: the home of each slot, and the queue of each entry.

Both follow from a census of the workers that were healthy about a second ago. Processes with the same census choose alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from headway.brokers.redis.fleet import Registry
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.shard_queue import Moved, Queue, Verdict
from headway.brokers.redis.together import all_of
from headway.core import batch_cost, failures, rows
from headway.core import shards as sharding
from headway.errors import BrokerUnavailable
from headway.model import DedupKind, Entry, Failure, QueueName, WorkerInfo, WorkerStatus
from headway.runtime.race import end

CENSUS_AGE = 1.0
"""Seconds for which a census is valid."""
REMEMBERED = 100_000
"""Maximum number of entries whose queue is remembered."""
MOVES = 4
"""Maximum number of queues to offer an entry to. The flight that it wants to join may end and begin elsewhere meanwhile."""

_Key = tuple[str, str]
_MODEL_AND_VERSION = attrgetter("model", "version")


class ShardRouter:
    """Router of one process. It chooses the home of each slot and the queue of each entry."""

    def __init__(self, queues: QueueTable, shards: int, registry: Registry, rng: Callable[[], float]) -> None:
        self._queues = queues
        self._registry = registry
        self._shards = shards
        self._census: dict[QueueName, list[str]] = {}
        self._counted_at = -math.inf
        self._counting: asyncio.Task[None] | None = None
        self._spread: dict[str, int] = {}
        self._homes: dict[tuple[QueueName, str], Queue] = {}
        self._backends: dict[str, tuple[int, int, str]] = {}
        self._turn = int(rng() * 1_000_003)
        self._placed: dict[_Key, Queue] = {}

    @property
    def alone(self) -> bool:
        return self._shards == 1  # Then there is no choice.

    async def close(self) -> None:
        await end(self._counting)

    async def count(self, wait: bool = False) -> None:
        """Start a new census if it is due. Only waits for it if asked to `wait`, or if the last census is too old to be used."""
        if self.alone:
            return
        loop = asyncio.get_running_loop()
        age = loop.time() - self._counted_at
        if age >= CENSUS_AGE and (self._counting is None or self._counting.done()):
            self._counted_at = loop.time()
            self._counting = loop.create_task(self._count())
        if self._counting is not None and (wait or not self._census or age >= 2 * CENSUS_AGE):
            await asyncio.wait({self._counting})

    async def census(self, rest: float) -> float:
        """Start a new census if it is due. Returns the seconds until the next call, which are infinite if there is no choice."""
        await self.count()
        return math.inf if self.alone else max(rest, CENSUS_AGE)

    def home(self, worker: str, name: QueueName) -> Queue:
        """Return the home shard of a slot. Only `move` changes it."""
        return self._homes.get((name, worker)) or self._found_home(worker, name)

    def move(self, worker: WorkerInfo) -> Queue | None:
        """Move a slot to its home by the last census. Returns its former home if that is another shard."""
        home = self._found_home(worker.worker_id, worker.queue)
        self._queues.keep([worker.queue])
        key = (worker.queue, worker.worker_id)
        before, self._homes[key] = self._homes.get(key), home
        return before if before is not home else None

    def renewed(self, worker: WorkerInfo) -> bool:
        """Return True if a slot's backend has changed since the last call."""
        if worker.status is not WorkerStatus.HEALTHY:
            return False
        before, self._backends[worker.worker_id] = self._backends.get(worker.worker_id), worker.backend
        return before != worker.backend

    def apart(self, name: QueueName) -> Sequence[Queue]:
        """Return the shards that may have entries for a queue's slots but are home to none of them.

        The model's tenants are spread over these shards too if another version has more slots.
        """
        spread = self._spread.get(name.model, 1) if name in self._census else 0
        return self._queues[name][self._in_use(name) : spread]

    async def offer(self, entries: Sequence[Entry]) -> list[Failure | None]:
        """Offer entries to their queues, which must exist. Returns the verdicts in order, None for an admitted entry.

        All versions of a model share idempotency keys, tasks and chosen ids. So a queue checks in the same step whether another
        version's queue knows the entry's. Then the entry is offered to that queue.
        """
        await self.count()
        result: list[Failure | None] = [None] * len(entries)
        dealt, offered = self._deal(entries), list(entries)
        if not dealt or dealt.count(dealt[0]) < len(dealt):
            answers = await _verdicts(offered, dict(enumerate(dealt)))
        else:
            verdicts = await dealt[0].enqueue(entries)
            if verdicts.count(None) == len(verdicts):  # The usual case.
                return result
            answers = [(position, dealt[0], verdict) for position, verdict in enumerate(verdicts)]
        for turn in range(MOVES):
            moved: dict[int, Queue] = {}
            for position, queue, verdict in answers:
                if isinstance(verdict, Moved):
                    moved[position] = self._queues.beside(queue, verdict.queue)
                    offered[position] = _without_identical(entries[position])
                    self._place(entries[position], moved[position])
                else:
                    result[position] = verdict
            if not moved or turn == MOVES - 1:
                break
            answers = await _verdicts(offered, moved)
        for position in moved:
            result[position] = failures.conflict()
        refused = [entry for entry, verdict in zip(entries, result, strict=True) if verdict is not None]
        self.forget((entry.tenant, entry.id) for entry in refused)
        return result

    async def offer_bulk(self, entries: Sequence[Entry]) -> list[Failure | None]:
        """Offer bulk entries to their queues, which must exist. Returns the verdicts in order, None for an admitted entry."""
        await self.count()
        result: list[Failure | None] = [None] * len(entries)
        for position, _, verdict in await _verdicts(entries, dict(enumerate(self._deal(entries))), "enqueue_bulk"):
            result[position] = verdict if isinstance(verdict, Failure) else None
        refused = [entry for entry, verdict in zip(entries, result, strict=True) if verdict is not None]
        self.forget((entry.tenant, entry.id) for entry in refused)
        return result

    def _deal(self, entries: Sequence[Entry]) -> list[Queue]:
        """Choose a queue for each entry: the queue that it went to before, else the next shard in turn.

        Each shard gets part of a batch before the turn moves on.
        """
        if self.alone and not self._placed:
            if len(set(map(_MODEL_AND_VERSION, entries))) == 1:  # The usual case.
                return [self._queues[entries[0].queue][0]] * len(entries)
            return [self._queues[entry.queue][0] for entry in entries]
        if self.alone:
            return [self._queue_before(entry) or self._queues[entry.queue][0] for entry in entries]
        counts = Counter(entry.queue for entry in entries)
        limits = self._queues.limits
        parts = {name: sharding.parts(count, limits[name.model].max_batch) for name, count in counts.items()}
        dealt = []
        paying = {entry.nonce for entry in entries if entry.count > 1 and entry.limits}
        for position, entry in enumerate(entries):
            queue = self._queue_before(entry)
            if queue is None:
                turn = self._turn + position % parts[entry.queue]
                queue = self._in_turn(entry, turn, entry.payer in paying)
            self._place(entry, queue)
            dealt.append(queue)
        self._turn += max(parts.values(), default=0)
        return dealt

    def _in_turn(self, entry: Entry, turn: int, paid: bool) -> Queue:
        """Choose the tenant's queue if the entry can share limits or outcomes, else the queue whose turn it is.

        An entry is `paid` if its limits are charged to another entry that comes with it.
        """
        name = entry.queue
        if paid or entry.limits or entry.dedup_keys or entry.digest:
            return self._queues[name][sharding.of_tenant(entry.tenant, self._spread.get(entry.model, 1))]
        slots = len(self._census.get(name, []))
        return self._queues[name][sharding.in_turn(turn, slots, sharding.active(self._shards, slots))]

    def _place(self, entry: Entry, queue: Queue) -> None:
        self._placed[entry.tenant, entry.id] = queue
        if len(self._placed) > REMEMBERED:
            del self._placed[next(iter(self._placed))]

    def _queue_before(self, entry: Entry) -> Queue | None:
        queue = self._placed.get((entry.tenant, entry.id)) if self._placed else None
        return queue if queue is not None and queue.name.model == entry.model else None

    def where(self, key: _Key) -> Sequence[Queue]:
        """Return the queues that an entry may be in."""
        placed = self._placed.get(key)
        return self._queues.every if placed is None else [placed]

    def forget(self, keys: Iterable[_Key]) -> None:
        if self._placed:
            for key in keys:
                self._placed.pop(key, None)

    def forget_queues(self, queues: Collection[Queue]) -> None:
        self._placed = {key: queue for key, queue in self._placed.items() if queue not in queues}

    def _in_use(self, name: QueueName) -> int:
        return sharding.active(self._shards, len(self._census.get(name, [])))

    def _found_home(self, worker: str, name: QueueName) -> Queue:
        return self._queues[name][sharding.home(worker, self._census.get(name, []), self._in_use(name))]

    async def _count(self) -> None:
        with contextlib.suppress(BrokerUnavailable):  # Keep the last census.
            await self.read_registry()

    async def read_registry(self) -> Sequence[WorkerInfo]:
        """Read the registry, take a census of its workers, and add the queues of workers and of models that may hold data."""
        untold, self._queues.untold = self._queues.untold, {}
        try:
            workers, models = await self._registry.look(untold)
        except BrokerUnavailable:
            self._queues.untold = untold | self._queues.untold
            raise
        self._queues.count_rows(rows.counted(workers))
        self._queues.fill_up(batch_cost.padded(workers))
        self._queues.learn_registry({worker.queue for worker in workers}, models)
        self._learn(workers)
        return workers

    def _learn(self, workers: Sequence[WorkerInfo]) -> None:
        if self.alone:
            return
        census: dict[QueueName, list[str]] = {}
        for worker in workers:
            if worker.status is WorkerStatus.HEALTHY:
                census.setdefault(worker.queue, []).append(worker.worker_id)
        self._census, slots = census, Counter[str]()
        for name, there in census.items():
            slots[name.model] += len(there)
        self._spread = {model: sharding.active(self._shards, count) for model, count in slots.items()}
        for name, queues in self._queues.items():
            in_use, served = self._in_use(name), name in census
            for queue in queues:
                queue.in_use, queue.spread, queue.served = in_use, self._spread.get(name.model, 1), served


def _without_identical(entry: Entry) -> Entry:
    """Drop an entry's dedup keys for identical requests, because versions never share those."""
    kept = tuple(dedup_key for dedup_key in entry.dedup_keys if dedup_key.kind is not DedupKind.SAME)
    return replace(entry, dedup_keys=kept)


async def _verdicts(
    entries: Sequence[Entry], queues: dict[int, Queue], function: str = "enqueue"
) -> list[tuple[int, Queue, Verdict]]:
    groups: dict[Queue, list[int]] = {}
    for position, queue in queues.items():
        groups.setdefault(queue, []).append(position)
    calls = (
        queue.enqueue([entries[position] for position in positions], function) for queue, positions in groups.items()
    )
    answers = [await next(calls)] if len(groups) == 1 else await all_of(*calls)
    return [
        (position, queue, verdict)
        for (queue, positions), answer in zip(groups.items(), answers, strict=True)
        for position, verdict in zip(positions, answer, strict=True)
    ]
