"""The queues that a process knows, and how a model's load is divided into shards: each slot has a home shard, each entry a queue.

A queue is created when an entry, a worker or a server's list first names it. It is forgotten when no worker and no list has named it
for a while, unless it belongs to one of the process's own models or slots.

Both homes and queues are chosen by a census of the workers that were healthy about a second ago. Processes with the same census make
the same choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from headway.brokers.redis.fleet import Registry
from headway.brokers.redis.shard_queue import Moved, Queue, Verdict
from headway.brokers.redis.together import all_of
from headway.core import batch_cost, failures, rows
from headway.core import shards as sharding
from headway.core.batch_cost import is_news
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import CostLine, DedupKind, Entry, Failure, QueueName, WorkerInfo, WorkerStatus
from headway.runtime.race import end

LIST_QUEUES_EVERY = 10.0  # Seconds between two readings of the server's lists.
FORGET_AFTER = 120.0  # Seconds until a queue that nothing names is forgotten. Restarted servers list nothing at first.


class QueueTable(dict[QueueName, list[Queue]]):
    """Queues of one process by name, one for each shard.

    Attributes:
        added: called with new queues.
        rows: models whose entries have rows or shapes. See `core.rows.counted`.
        untold: by model, the time until which its queues may hold data, unless the registry already knows it.
    """

    def __init__(self, make: Callable[[QueueName, int, QueueLimits], Queue], shards: int) -> None:
        super().__init__()
        self.every: list[Queue] = []
        self.limits: dict[str, QueueLimits] = {}
        self.added: Callable[[Sequence[Queue]], None] = lambda queues: None
        self.rows: set[str] = set()
        self.padded: dict[str, CostLine | None] = {}
        self._strangers = False
        self.untold: dict[str, float] = {}
        self._make, self._shards = make, shards
        self._look_at = -math.inf
        self._own: set[QueueName] = set()
        self._named_at: dict[QueueName, float] = {}
        self._looked: dict[str, float] = {}  # When all shards of each model last answered.
        self._registry_read = -math.inf
        self._former_losses = 0

    @property
    def losses(self) -> int:
        """Number of times that the server has lost a queue. Forgotten queues count too."""
        return self._former_losses + sum(queue.losses for queue in self.every)

    def know(self, models: Mapping[str, QueueLimits], strangers: bool = False) -> None:
        """Add queues for these models. The queues of their versions get the same limits. If `strangers` is set, from
        now on the queues of other models are added too if they hold data."""
        self._strangers |= strangers
        for model, limits in models.items():
            self.limits[model] = limits
            self.has(QueueName(model))
            self._bound(model)

    def count_rows(self, counted: Mapping[str, bool]) -> None:
        """Learn which models have entries with rows or shapes, which matter for weights and for sharing a batch."""
        for model, counts in counted.items():
            if counts is not (model in self.rows):
                (self.rows.add if counts else self.rows.discard)(model)
                self._bound(model)

    def fill_up(self, lines: Mapping[str, CostLine]) -> None:
        """Learn the cost of models that pad their inputs. Their batches then consist of entries of similar weight."""
        for model in self.limits:
            line = lines.get(model)
            if is_news(line, self.padded.get(model)):
                self.padded[model] = line
                self._bound(model)

    def _bound(self, model: str) -> None:
        for queue in self.every:
            if queue.name.model == model:
                queue.limits = self._bounds(model)

    def _bounds(self, model: str) -> QueueLimits:
        limits = self.limits[model].filling_up(self.padded.get(model))
        return limits.counting_rows() if model in self.rows else limits

    def has(self, name: QueueName) -> bool:
        """Return True if there are queues with this name. Queues for another version of a known model are created if needed."""
        if name not in self:
            self._add(name)
        return name in self

    def keep(self, names: Iterable[QueueName]) -> None:
        self._own.update(names)

    def learn(self, names: Iterable[QueueName]) -> None:
        """Add the queues with these names, or record that they were named again. Ignores unknown models."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if self.has(name):
                self._named_at[name] = self._named_at[QueueName(name.model)] = now

    def learn_registry(self, names: Iterable[QueueName], models: Iterable[str]) -> None:
        """Add the queues with these `names`, which workers claim from, and the queues of `models`, which may hold data."""
        self._registry_read = asyncio.get_running_loop().time()
        for model in models:
            if model not in self.limits and self._strangers:
                # Any limits will do, because nobody enqueues for this model here.
                self.know({model: next(iter(self.limits.values()))})
                self._look_at = -math.inf
            self.learn([QueueName(model)])
        self.learn(names)

    async def look(self, at_once: bool = False) -> None:
        """If a look is due or must happen `at_once`, add the queues that the servers list. Some may be unknown to all processes."""
        now = asyncio.get_running_loop().time()
        if at_once or now >= self._look_at:
            self._look_at = now + LIST_QUEUES_EVERY
            await asyncio.gather(*(self._look_at_model(model, now) for model in list(self.limits)))

    async def _look_at_model(self, model: str, now: float) -> None:
        answers = await asyncio.gather(*map(_siblings, self[QueueName(model)]))
        listed = [answer for answer in answers if answer is not None]
        self.learn({name for names, _ in listed for name in names})
        until = max((until for _, until in listed), default=0.0)
        if until or len(listed) == len(answers):
            self.untold[model] = until
        if len(listed) == len(answers) and model in self.limits:
            self._looked[model] = now

    def forget(self) -> Sequence[Queue]:
        """Drop the queues that haven't been named for a long time, and return them."""
        self.learn([name for name in self if name not in self._named_at])
        names = [name for name in self if self._is_past(name)]
        gone = [queue for name in names for queue in self.pop(name)]
        for name in names:
            del self._named_at[name]
            if name == QueueName(name.model):
                del self.limits[name.model], self._looked[name.model]
                self.rows.discard(name.model)
                self.padded.pop(name.model, None)
        if gone:
            self.every[:] = [queue for queues in self.values() for queue in queues]
            self._former_losses += sum(queue.losses for queue in gone)
        return gone

    def _is_past(self, name: QueueName) -> bool:
        """Return True if nothing has named a queue for a long time, although the lists and the registry were read in that time."""
        if name in self._own:
            return False
        looked = self._looked.get(name.model, -math.inf)
        if QueueName(name.model) not in self._own:
            looked = min(looked, self._registry_read)
        return looked - self._named_at[name] > FORGET_AFTER

    def beside(self, queue: Queue, name: QueueName) -> Queue:
        self.learn([name])
        return self[name][queue.shard]

    def _add(self, name: QueueName) -> None:
        if name.model in self.limits:
            limits = self._bounds(name.model)
            self[name] = made = [self._make(name, shard, limits) for shard in range(self._shards)]
            self.every += made
            self.added(made)


async def _siblings(queue: Queue) -> tuple[Sequence[QueueName], float] | None:
    """Return the queues that a server lists, and the time after which none holds data. None if the server doesn't answer."""
    with contextlib.suppress(BrokerUnavailable):
        return await queue.siblings()
    return None


CENSUS_AGE = 1.0  # Seconds for which a census is valid.
REMEMBERED = 100_000  # Maximum number of entries whose queue is remembered.
MOVES = 4  # Maximum number of queues that an entry is offered to. The flight that it joins may begin anew elsewhere meanwhile.

_Key = tuple[str, str]
_MODEL_AND_VERSION = attrgetter("model", "version")


class ShardRouter:
    """Router of one process. It chooses the home shard of each slot and the queue for each entry."""

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
        return self._shards == 1  # In this case there is nothing to choose.

    async def close(self) -> None:
        await end(self._counting)

    async def count(self, wait: bool = False) -> None:
        """Start a new census if one is due. Wait for it only if `wait` is set, or if the last census is too old to be used."""
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
        """Start a new census if one is due. Returns the seconds until the next call, or infinity if there is only one shard."""
        await self.count()
        return math.inf if self.alone else max(rest, CENSUS_AGE)

    def home(self, worker: str, name: QueueName) -> Queue:
        """Return the home shard of a slot. Only `move` changes it."""
        return self._homes.get((name, worker)) or self._home_by_census(worker, name)

    def move(self, worker: WorkerInfo) -> Queue | None:
        """Move a slot to its home according to the last census. Returns its former home if that is another shard."""
        home = self._home_by_census(worker.worker_id, worker.queue)
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
        """Return the shards that may have entries for a queue's slots but are home to none of them. There may be such
        shards if other versions have slots too, because the model's tenants are then divided among more shards."""
        spread = self._spread.get(name.model, 1) if name in self._census else 0
        return self._queues[name][self._in_use(name) : spread]

    async def offer(self, entries: Sequence[Entry]) -> list[Failure | None]:
        """Offer entries to their queues, which must exist. Returns the verdicts in order, with None for each admitted
        entry. All versions of a model share idempotency keys, tasks and chosen ids. So each queue also checks if another
        version's queue knows one of these. If so, the entry is offered to that queue."""
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
        """Offer bulk entries to their queues, which must exist. Returns the verdicts in order, with None for each admitted entry."""
        await self.count()
        result: list[Failure | None] = [None] * len(entries)
        for position, _, verdict in await _verdicts(entries, dict(enumerate(self._deal(entries))), "enqueue_bulk"):
            result[position] = verdict if isinstance(verdict, Failure) else None
        refused = [entry for entry, verdict in zip(entries, result, strict=True) if verdict is not None]
        self.forget((entry.tenant, entry.id) for entry in refused)
        return result

    def _deal(self, entries: Sequence[Entry]) -> list[Queue]:
        """Choose a queue for each entry: its former queue or, if it has none, the next shard's. If there are many entries,
        they are split evenly over several shards."""
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
        """Choose the tenant's queue if the entry can share limits or outcomes, otherwise the queue whose turn it is. Pass
        `paid` if another entry of the same request is charged for this one."""
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
        """Return the queues that may contain an entry."""
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

    def _home_by_census(self, worker: str, name: QueueName) -> Queue:
        return self._queues[name][sharding.home(worker, self._census.get(name, []), self._in_use(name))]

    async def _count(self) -> None:
        with contextlib.suppress(BrokerUnavailable):  # Keep the last census.
            await self.read_registry()

    async def read_registry(self) -> Sequence[WorkerInfo]:
        """Read the registry and return its workers. Also count them, and add their queues and those of all models that the
        registry names."""
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
    """Drop the dedup keys for identical requests, because versions never share answers to those."""
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
