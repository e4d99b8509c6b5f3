"""The broker over Redis: its queues are in the server, where each atomic step is a function of the library.

Entries are dealt to the shards of their model in turn, and a replayed entry goes where it went before. A slot claims at its
home shard, and checks from time to time whether another shard needs help.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter

import msgspec
import uuid_utils
from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.fleet import Registry
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.lookup import Lookup, TaskIds
from headway.brokers.redis.mailbox import Mailbox
from headway.brokers.redis.queue_table import QueueTable
from headway.brokers.redis.reaping import LEAST_PAUSE, Reaping
from headway.brokers.redis.receipts import Offers
from headway.brokers.redis.shard_queue import GATHERED, SHARDS, Budgets, Granted, Look, Queue, RateLimitCache
from headway.brokers.redis.shard_router import ShardRouter
from headway.brokers.redis.together import all_of
from headway.core import failures, rows
from headway.core import shards as sharding
from headway.core.dedup import task_followed
from headway.core.departure import Load, Policy
from headway.core.locality.turns import Contender
from headway.core.memory_room import QUEUE_BYTES
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KEPT, KeptLimits
from headway.errors import BrokerUnavailable
from headway.model import (
    BatchFailure,
    BulkDepth,
    Cause,
    Completion,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    QueueName,
    Reply,
    Slot,
    Submission,
    TierDepth,
    WorkerInfo,
)
from headway.ports import Broker
from headway.runtime.counters import BrokerCounts
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

LEAST_LINGER = 0.001
IN_USE = 1.0
"""Seconds after its last offer for which a queue counts as in use."""
MOST_PAUSE = 0.4
"""Maximum seconds between two looks at other shards. The pause doubles while a slot rests."""
APART_FROM = 64 << 10
"""Default for the bytes above which a value is stored apart."""
_MODEL_AND_VERSION, _CLAIMS = attrgetter("model", "version"), attrgetter("claims")
RUNNING = 1_000
"""Maximum number of running leases whose waits are remembered."""


class _UnansweredClaim(msgspec.Struct):
    """Claim without an answer. It may have been granted, so it is repeated at the same shard."""

    queue: Queue
    token: str


class RedisBroker(Broker):
    """Broker over Redis. `headway.ports.Broker` describes its methods and laws.

    Each model has `shards` queues. `kept` is a budget per server. `queue_bytes` bounds the large entries without an outcome.
    """

    remote = True

    def __init__(
        self,
        connection: RedisConnection,
        models: Mapping[str, QueueLimits],
        counters: BrokerCounts,
        rng: Callable[[], float],
        shards: int = 1,
        lease_seconds: float = 3.0,
        kept: KeptLimits = KEPT,
        queue_bytes: int = QUEUE_BYTES,
        apart_from: float = APART_FROM,
    ) -> None:
        self._connection = connection
        self._values = LargeValues(connection, apart_from)
        self._connection.process = connection.process or str(uuid_utils.uuid7())
        self._counters, self._rng = counters, rng
        self._lease_seconds, self._shards = lease_seconds, shards
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers, self._offers = itertools.count(), Offers()
        self._debts = None if connection.clustered else RateLimitCache()
        """Debts of the limits that all queues share, or None if each queue counts for itself."""
        if self._debts is not None:  # Every request calls this, so it takes no detour.
            self.rate_limit_debt = self._debts.seconds  # type: ignore[method-assign]
        self._queues = QueueTable(self._make_queue, shards)
        self._queues.added = self._hear_of
        self._every = self._queues.every
        self._budgets = Budgets(connection, kept, queue_bytes, shards, lambda: len(self._every))
        self._registry = Registry(connection)
        self._router = ShardRouter(self._queues, shards, self._registry, rng)
        self._lookup = Lookup(self._queues, self._router)
        self._task_ids = TaskIds(connection, self._lookup)
        self._reaping = Reaping(self._queues, shards, counters, rng)
        self._queues.keep(map(QueueName, models))
        self.know(models)
        self._doubts: dict[Slot, _UnansweredClaim] = {}
        self._idle_at: dict[Slot, Queue] = {}
        self._hints: dict[Slot, Queue] = {}
        self._looked_at: dict[Slot, float] = {}
        self._turns: dict[str, int] = {}
        self._waited: dict[tuple[Queue, int], Sequence[float]] = {}

    def rate_limit_debt(self, limit: Limit) -> float:
        """See Broker. Only used if each queue counts for itself."""
        owed = 0.0
        for queues in self._queues.values():
            of_shards, counts = [queue.rate_limit_debt(limit) for queue in queues], queues[0].counts
            owed = max(owed, sum(of_shards) / counts if limit.name == "tier" and counts > 1 else max(of_shards))
        return owed

    @property
    def linger(self) -> float:
        """See Broker. At most GATHERED if there are several models, so that one with long batches doesn't delay the others."""
        now = asyncio.get_running_loop().time()
        least = min((queue.linger(now) for queue in self._every if now - queue.offered_at < IN_USE), default=0.0)
        return max(least if len(self._queues.limits) == 1 else min(least, GATHERED), LEAST_LINGER)

    @property
    def epoch(self) -> str:
        if not any(queue.born for queue in self._every):
            return ""
        return str(self._queues.losses)

    @property
    def memory_pressure(self) -> bool:
        return self._connection.memory_pressure

    @property
    def kept(self) -> KeptLimits:
        """See Broker. In a cluster these are the budgets of one queue, because each server counts only its own outcomes."""
        return self._budgets.kept()

    @property
    def near(self) -> None:
        """See RequestQueue. The server is always another process."""

    @property
    def apart_from(self) -> float:
        return self._values.threshold

    @property
    def queue_names(self) -> Collection[QueueName]:
        return self._queues.keys()

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        self._queues.know(models, others)

    def _make_queue(self, name: QueueName, shard: int, limits: QueueLimits) -> Queue:
        made = Queue(
            self._connection,
            name,
            shard,
            limits,
            lease_seconds=self._lease_seconds,
            budgets=self._budgets,
            values=self._values,
            offers=self._offers,
            debts=RateLimitCache() if self._debts is None else self._debts,
        )
        made.stirred = partial(self._reaping.stirred, made)
        return made

    def _hear_of(self, added: Sequence[Queue]) -> None:
        for box in self._mailboxes.values():
            box.add(added)

    async def close(self) -> None:
        """Stop listening and reading. The connection to the server stays open."""
        await self._reaping.close()
        await self._router.close()
        for box in self._mailboxes.values():
            await box.close()
        await all_of(*(queue.close() for queue in self._every))

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        asked = set(map(_MODEL_AND_VERSION, entries))
        if not all(self._queues.has(QueueName(*name)) for name in asked):
            return await self._enqueue_known(entries)
        offer = self._offers.begin(entries)
        try:
            if any(map(_CLAIMS, entries)):
                return await self._task_ids.offer(entries, self._router.offer)
            return await self._router.offer(entries)
        finally:
            self._offers.end(offer)

    async def enqueue_bulk(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        known = [entry for entry in entries if self._queues.has(entry.queue)]
        if len(known) < len(entries):
            await self._router.read_registry()
            known = [entry for entry in entries if self._queues.has(entry.queue)]
        names = {entry.queue for entry in known}  # A queue may be forgotten meanwhile.
        offer = self._offers.begin(known)
        try:
            verdicts = iter(await self._router.offer_bulk(known))
        finally:
            self._offers.end(offer)
        return [next(verdicts) if entry.queue in names else failures.not_here(entry.model) for entry in entries]

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        if not self._queues.has(slot.queue):
            return NoWork(None)
        if slot.helps:
            return await self._help(slot, policy)
        home = self._router.home(slot.worker, slot.queue)
        doubt = self._doubts.get(slot)
        if doubt is not None:
            queue = doubt.queue
        elif self._router.alone:
            queue = home
        else:
            hint = self._hints.pop(slot, None)
            queue = (self._apart(slot) or home) if hint is None else hint
        if queue is not home:
            claimed = await self._claim_from(queue, slot, policy, guest=True)
            if isinstance(claimed, Lease):
                await self._unlisten(slot)  # Otherwise a wake-up of this busy slot would be wasted.
                return claimed
        self._idle_at[slot] = home
        claimed = await self._claim_from(home, slot, policy, guest=False)
        if isinstance(claimed, Lease):
            self._idle_at.pop(slot, None)
        return claimed

    async def _unlisten(self, slot: Slot) -> None:
        idle_at = self._idle_at.get(slot)
        if idle_at is not None:
            with contextlib.suppress(BrokerUnavailable):
                await idle_at.unlisten(slot.worker)
                self._idle_at.pop(slot, None)

    def _apart(self, slot: Slot) -> Queue | None:
        """At every second claim, return a shard that is no slot's home but may have entries for the slot, if there is any."""
        queues = self._router.apart(slot.queue)
        if not queues:
            return None
        turn = self._turns[slot.worker] = self._turns.get(slot.worker, 0) + 1
        if turn % 2:
            return None
        return queues[turn // 2 % len(queues)]

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        homes = [(slot.model, self._router.home(slot.worker, slot.queue)) for slot in slots]
        return await all_of(*(queue.contender(model) for model, queue in homes))

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        home = self._router.home(slot.worker, slot.queue)
        idle_at = self._idle_at.get(slot, home)
        if idle_at is not home:  # The slot's home changed since its claim.
            await idle_at.unlisten(slot.worker)
            return
        sleeping = asyncio.ensure_future(home.wakeups.sleep(slot.worker, until))
        helping = None if self._router.alone else asyncio.ensure_future(self._look_around(slot, home))
        try:
            await asyncio.wait({sleeping, helping} if helping else {sleeping}, return_when=asyncio.FIRST_COMPLETED)
            if sleeping.done():
                await sleeping
        except asyncio.CancelledError:
            await self._unlisten(slot)
            raise
        finally:
            if helping is not None or not sleeping.done():
                await end(sleeping, helping)

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        if len(items) != len(lease.entries):
            raise ValueError(f"{len(items)} items for a lease of {len(lease.entries)} entries: one each, in order")
        queue, fence = self._queue_of(lease)
        waited = self._waited.get((queue, lease.fence)) or [0.0] * len(items)
        settled = await queue.completions.complete(fence, lease, items, waited)
        self._waited.pop((queue, lease.fence), None)
        return settled

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        queue, fence = self._queue_of(lease)
        again = await queue.release(fence, lease, failure, self._rng())
        self._waited.pop((queue, lease.fence), None)
        if again and failure is not None:
            self._counters.retries[failure.cause.value] += again
        return again is not None

    async def extend(self, lease: Lease) -> bool:
        queue, fence = self._queue_of(lease)
        return await queue.extend(fence)

    async def withdraw(self, submissions: Sequence[Submission], gateway: str) -> None:
        if (box := self._mailboxes.get(gateway)) is not None:
            box.forget(submissions)
        groups: dict[Queue, list[bytes]] = {}
        for submission in submissions:
            for queue in self._router.where(submission[:2]):
                groups.setdefault(queue, []).append(wire.name_of(*submission))
        await all_of(*(queue.withdraw(names, gateway) for queue, names in groups.items()))
        self._router.forget(submission[:2] for submission in submissions)

    async def probe(self, gateway: str) -> None:
        """See Broker. Withdrawing an unknown submission is a write that changes nothing."""
        await self.withdraw([("", gateway, 0)], gateway)

    async def takes_reads_only(self) -> bool:
        return await self._connection.takes_reads_only()

    async def cancel_task(self, tenant: str, id: str) -> None:
        await self._lookup.cancel_task(tenant, id)

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        box = self._mailboxes.get(gateway)
        if box is None:
            box = self._mailboxes[gateway] = Mailbox(gateway, self._every)
        replies, cursor = await box.replies(after)
        self._router.forget((reply.tenant, reply.id) for reply in replies)
        return replies, cursor

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        return await self._lookup.state(tenant, id)

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        return await self._lookup.outcome(tenant, id)

    async def heartbeat(self, worker: WorkerInfo) -> None:
        await self._router.count(wait=True)
        if rows.counted([worker]).get(worker.model):
            self._queues.count_rows({worker.model: True})
        if not self._queues.has(worker.queue):
            await self._registry.record(worker)
            return
        before = self._router.move(worker)
        if before is not None:
            before.wakeups.wake(worker.worker_id)  # It sleeps at its old home but is needed at the new one.
        home = self._router.home(worker.worker_id, worker.queue)
        await all_of(home.heartbeat(worker, self._router.renewed(worker)), self._registry.record(worker))
        if before is not None:
            await before.forget(worker.worker_id)
            await before.unlisten(worker.worker_id)

    async def workers(self) -> Sequence[WorkerInfo]:
        """See Broker. Also adds the queues that the workers claim from."""
        return await self._router.read_registry()

    async def depths(self) -> Sequence[TierDepth]:
        sums: dict[tuple[QueueName, int], tuple[int, float]] = {}
        for queue, look in await self._look():
            for tier, (depth, waited) in enumerate(look.tiers):
                known, longest = sums.get((queue.name, tier), (0, 0.0))
                sums[queue.name, tier] = known + depth, max(longest, waited)
        return [
            TierDepth(name.model, tier, depth, oldest, name.version) for (name, tier), (depth, oldest) in sums.items()
        ]

    async def bulk_queues(self) -> Sequence[BulkDepth]:
        depths: dict[QueueName, BulkDepth] = {}
        for queue, look in await self._look():
            if (bulk := look.bulk) is not None:
                if (before := depths.get(queue.name)) is not None:
                    waiting, delayed = before.waiting + bulk.waiting, before.delayed + bulk.delayed
                    busy, held = before.busy + bulk.busy, min(before.held, bulk.held)
                    bulk = replace(bulk, waiting=waiting, delayed=delayed, busy=busy, held=held)
                depths[queue.name] = bulk
        return [*depths.values()]

    async def loads(self) -> Mapping[QueueName, Load]:
        loads: dict[QueueName, list[Load]] = {}
        for queue, look in await self._look():
            loads.setdefault(queue.name, []).append(look.load)
        return {name: sharding.load_of(each) for name, each in loads.items()}

    async def reap(self, rest: float = 0.0) -> float:
        pauses = await all_of(self._router.census(rest), self._reaping.reap(rest))
        if self._reaping.reaps:
            self._connection.look_soon()  # Memory must be watched even while no request comes.
        if gone := {*self._queues.forget()}:
            await self._forget(gone)
        return max(min(pauses), LEAST_PAUSE)

    async def _forget(self, queues: Collection[Queue]) -> None:
        log.info("queues are forgotten", queues=sorted({str(queue.name) for queue in queues}))
        self._router.forget_queues(queues)
        self._reaping.forget(queues)
        self._hints = {slot: queue for slot, queue in self._hints.items() if queue not in queues}
        self._doubts = {slot: doubt for slot, doubt in self._doubts.items() if doubt.queue not in queues}
        self._waited = {key: waits for key, waits in self._waited.items() if key[0] not in queues}
        await all_of(*(box.remove(queues) for box in self._mailboxes.values()))
        await all_of(*(queue.close() for queue in queues))

    async def _enqueue_known(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Offer the entries whose models have queues, and refuse the others."""
        entries = [await self._placed(entry) for entry in entries]
        known = [entry for entry in entries if self._queues.has(entry.queue)]
        names = {entry.queue for entry in known}
        answers = iter(await self.enqueue(known) if known else ())
        return [next(answers) if entry.queue in names else failures.not_here(entry.model) for entry in entries]

    async def _placed(self, entry: Entry) -> Entry:
        """Give a follower without a model the queue of its task."""
        if entry.model or not (task := task_followed(entry)):
            return entry
        queue = await self._lookup.queue_with(entry.tenant, task)
        return replace(entry, model=queue.model, version=queue.version)

    async def _claim_from(self, queue: Queue, slot: Slot, policy: Policy, guest: bool) -> Lease | NoWork:
        doubt = self._doubts.pop(slot, None)
        again = doubt is not None and doubt.queue is queue
        if doubt is None or not again:
            doubt = _UnansweredClaim(queue, f"{self._connection.process}:{next(self._numbers)}")
        try:
            claimed = await queue.claim(slot, policy, doubt.token, guest)
        except BrokerUnavailable:
            if not (guest and again):  # A guest gives an unreachable shard up after two tries.
                self._doubts[slot] = doubt
            raise
        if isinstance(claimed, NoWork):
            return claimed
        self._waited[queue, claimed.lease.fence] = claimed.waited
        if len(self._waited) > RUNNING:
            del self._waited[next(iter(self._waited))]
        if claimed.unreadable:
            return await self._refuse_batch(claimed)
        return claimed.lease

    async def _help(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """Claim for a slot whose home is another queue."""
        for queue in self._queues[slot.queue]:
            claimed = await self._claim_from(queue, slot, policy, guest=True)
            if isinstance(claimed, Lease):
                return claimed
        return NoWork(None)

    async def _refuse_batch(self, claimed: Granted) -> NoWork:
        """Give back a batch with an entry that this release can't read. Retries isolate the entry, or find a worker that can."""
        worker = claimed.lease.slot.worker
        log.error("a batch cannot be read", worker=worker, error=claimed.unreadable)
        await self.release(claimed.lease, BatchFailure(Cause.BAD_OUTPUT, claimed.unreadable, worker))
        return NoWork(claimed.lease.granted_at)

    async def _look_around(self, slot: Slot, home: Queue) -> None:
        """Return when another shard needs help, and remember that shard for the next claim."""
        loop = asyncio.get_running_loop()
        start, pause = int(self._rng() * SHARDS), sharding.LOOK_ELSEWHERE_EVERY
        others = [queue for queue in self._queues[slot.queue] if queue is not home]
        for turn in itertools.count(start):
            # At high load rests are short, so the first look must come early in a rest.
            await asyncio.sleep(max(self._looked_at.get(slot, -math.inf) + pause - loop.time(), 0.0))
            self._looked_at[slot] = loop.time()
            pause = min(2 * pause, MOST_PAUSE) if turn > start and not self._router.apart(slot.queue) else pause
            queue = others[turn % len(others)]
            with contextlib.suppress(BrokerUnavailable):
                if sharding.behind(*await queue.glance(), slot.max_batch):
                    self._hints[slot] = queue
                    return

    async def _look(self) -> list[tuple[Queue, Look]]:
        queues = list(self._every)  # Queues may be added before the answers come.
        return list(zip(queues, await all_of(*(queue.look() for queue in queues)), strict=True))

    def _queue_of(self, lease: Lease) -> tuple[Queue, int]:
        fence, shard = divmod(lease.fence, SHARDS)
        name = lease.slot.queue
        if name not in self._queues:
            self._queues.learn([name])
        return self._queues[name][shard], fence
