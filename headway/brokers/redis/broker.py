"""The broker over Redis. Its queues are in the server, where each atomic step is a function of the library.

Entries go to the shards of their model in turn, and a replayed entry goes to its former shard. A slot claims from its home shard, and
sometimes checks if another shard needs help."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import uuid_utils
from msgspec.structs import replace

from headway.brokers.reap_timer import ReapTimer
from headway.brokers.redis import wire
from headway.brokers.redis.claims import SHARDS, Granted
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.fleet import Registry
from headway.brokers.redis.function_library import CLAIM_SECONDS, REAP_EVERY, REST_SECONDS, STIRS_SECONDS
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.receipts import Offers, Receipt
from headway.brokers.redis.shard_queue import GATHERED, Budgets, Look, Queue, RateLimitCache
from headway.brokers.redis.shard_router import QueueTable, ShardRouter
from headway.brokers.redis.together import all_of
from headway.core import failures, rows
from headway.core import shards as sharding
from headway.core.dedup import task_followed
from headway.core.departure import Load, Policy
from headway.core.locality import Contender
from headway.core.queue_limits import QUEUE_BYTES, QueueLimits
from headway.core.retention import KEPT, KeptLimits
from headway.errors import BrokerUnavailable
from headway.model import (
    BatchFailure,
    BulkDepth,
    Cause,
    Completion,
    DedupKind,
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
    Value,
    WorkerInfo,
)
from headway.ports import Broker
from headway.runtime.counters import BrokerCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import EARLY, until_tick
from headway.runtime.race import end

log = get_logger(__name__)


READ_AGAIN = 0.1  # Seconds after which reading an output is retried if the broker didn't answer.
FIRST = b"0-0"  # Id before all entries of a stream.


_submission: Callable[[Reply], Submission] = attrgetter("tenant", "id", "nonce")


class _Read(msgspec.Struct):
    """Replies from one stream entry that can be delivered together.

    Attributes:
        key: key of the stream.
        born: when the state of the entry's queue was created.
        submissions: all submissions that the stream entry answers.
        token: token of the output that the replies share, if it is stored separately.
        wanted: number of submissions still waiting for the output while it is being read.
    """

    queue: Queue
    key: str
    born: float
    id: bytes
    submissions: list[Submission]
    replies: list[Reply]
    token: str = ""
    wanted: int = 0


@dataclass(slots=True)
class _Stream:
    """Read position in a queue's stream: the `last` id read, which belongs to the queue state created at `epoch`."""

    queue: Queue
    last: bytes = FIRST
    epoch: float = 0.0
    task: asyncio.Task[None] | None = field(default=None)


class Mailbox:
    """All queues' replies to one gateway."""

    def __init__(self, gateway: str, queues: Sequence[Queue]) -> None:
        self._gateway = gateway
        self._streams = [_Stream(queue) for queue in queues]
        self._reads: list[_Read] = []
        self._bringing: dict[asyncio.Task[None], _Read] = {}  # Replies whose outputs are being read.
        self._awaited: dict[Submission, _Read] = {}  # The same by submission, except withdrawn submissions.
        self._acknowledged = 0
        self._arrival = asyncio.Event()
        self._broken: BrokerUnavailable | None = None

    async def replies(self, after: int) -> tuple[Sequence[Reply], int]:
        self._acknowledge(after)
        self._broken = None  # Try again before reporting the failure.
        for stream in self._streams:
            if stream.task is None or stream.task.done():
                stream.task = asyncio.get_running_loop().create_task(self._read_on(stream))
        while not self._reads:
            if self._broken is not None:
                raise self._broken
            self._arrival.clear()
            await self._arrival.wait()
        replies = [reply for read in self._reads for reply in read.replies]
        return replies, self._acknowledged + len(replies)

    def add(self, queues: Iterable[Queue]) -> None:
        """Read from these queues too. If somebody is waiting for replies, start immediately."""
        added = [_Stream(queue) for queue in queues]
        reads = any(stream.task is not None and not stream.task.done() for stream in self._streams)
        self._streams += added
        if reads:
            for stream in added:
                stream.task = asyncio.get_running_loop().create_task(self._read_on(stream))

    async def remove(self, queues: Collection[Queue]) -> None:
        removed = [stream for stream in self._streams if stream.queue in queues]
        self._streams = [stream for stream in self._streams if stream.queue not in queues]
        await end(*(stream.task for stream in removed))

    def forget(self, submissions: Iterable[Submission]) -> None:
        """Stop reading outputs that are only wanted for these submissions. Their replies will have no outputs."""
        for submission in submissions:
            read = self._awaited.pop(submission, None)
            if read is not None:
                read.wanted -= 1

    async def close(self) -> None:
        await end(*(stream.task for stream in self._streams), *self._bringing)

    def _acknowledge(self, cursor: int) -> None:
        done = 0
        for read in self._reads:
            if self._acknowledged + len(read.replies) > cursor:
                break
            self._acknowledged += len(read.replies)
            done += 1
            # Replies from a lost state aren't reported, because another stream entry may have the same id.
            if read.born in (0.0, read.queue.born):
                complete = len(read.replies) == len(read.submissions)
                submissions = read.submissions if complete else list(map(_submission, read.replies))
                outputs = (
                    [read.token.encode() + wire.name_of(*submission) for submission in submissions]
                    if read.token
                    else []
                )
                read.queue.receipts.add(Receipt(self._gateway, read.id, submissions, outputs))
        del self._reads[:done]

    async def _read_on(self, stream: _Stream) -> None:
        try:
            while True:
                if stream.epoch != stream.queue.born:  # The server lost its state, so ids have started over.
                    stream.epoch, stream.last = stream.queue.born, FIRST if stream.epoch else stream.last
                await self._read_once(stream)
        except BrokerUnavailable as exc:
            self._broken = exc
            self._arrival.set()

    async def _read_once(self, stream: _Stream) -> None:
        queue, key = stream.queue, stream.queue.stream_of(self._gateway)
        # After the state was lost, entries of the new state may already have been read.
        known = [*self._reads, *self._bringing.values()] if stream.last == FIRST else []
        for id, fields in await queue.connection.reads.stream(key, stream.last):
            stream.last, apart = id, wire.Apart()
            try:
                replies = wire.read_outcomes(fields, apart)
            except wire.UNREADABLE as exc:
                # Their clients get a timeout. Waiting for a release that can read them would delay all later replies.
                log.error("replies cannot be read", gateway=self._gateway, error=wire.reason(exc))
                continue
            submissions = list(map(_submission, replies))
            if same := [read for read in known if (read.key, read.id, read.submissions) == (key, id, submissions)]:
                for read in same:
                    read.born = queue.born
                continue
            here = [reply for at, reply in enumerate(replies) if at not in apart] if apart else replies
            if here or not replies:
                self._reads.append(_Read(queue, key, queue.born, id, submissions, here))
                self._arrival.set()
            of: dict[tuple[str, int], list[Reply]] = {}
            for at, named in apart.items():
                of.setdefault(named, []).append(replies[at])
            for (name, length), those in of.items():  # An output is read once for all replies that share it.
                read = _Read(queue, key, queue.born, id, submissions, those, name[1:], len(those))
                self._awaited.update((_submission(reply), read) for reply in those)
                task = asyncio.get_running_loop().create_task(self._bring(read, name, length))
                self._bringing[task] = read
                task.add_done_callback(self._bringing.pop)

    async def _bring(self, read: _Read, name: str, length: int) -> None:
        output = await self._output(read, name, length)
        for reply in read.replies:
            self._awaited.pop(_submission(reply), None)
        failure = failures.lost_output() if output is None else None
        read.replies = [replace(reply, output=output, failure=failure) for reply in read.replies]
        self._reads.append(read)
        self._arrival.set()

    async def _output(self, read: _Read, name: str, length: int) -> Value | None:
        """Read an output, and retry until the broker answers. Return None if the output is lost or no longer wanted."""
        while True:
            try:
                return await read.queue.records.output(name, length, read.replies[0].tenant, lambda: read.wanted > 0)
            except BrokerUnavailable as exc:
                self._broken = exc
                self._arrival.set()
                await asyncio.sleep(READ_AGAIN)


T = TypeVar("T")

_SPECIAL = re.compile(r"[*?\[\]\\]")


class Lookup:
    """Looks up entries and tasks for one process. If an entry or task isn't in a known queue, the servers are asked for queues that this
    process doesn't know yet or has forgotten."""

    def __init__(self, queues: QueueTable, router: ShardRouter) -> None:
        self._queues, self._router = queues, router

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """See Broker. If there is no tenant, all queues are scanned step by step."""
        if tenant is None:
            await self._look_again()
            states = await all_of(*(_state_of_any(queue, id) for queue in list(self._queues.every)))
            return next((state for state in states if state is not None), None)
        return await self._search(tenant, id, lambda queue, key: queue.records.state(key))

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        return await self._search(tenant, id, lambda queue, key: queue.records.outcome(key))

    async def cancel_task(self, tenant: str, id: str) -> None:
        await self._look_again()
        await all_of(*(queue.cancel_task(wire.key_of(tenant, id)) for queue in list(self._queues.every)))
        self._router.forget([(tenant, id)])

    async def knows(self, tenant: str, id: str) -> bool:
        return await self._search(tenant, id, _name_of) is not None

    async def queue_with(self, tenant: str, id: str) -> QueueName:
        """Return the name of the queue that has a task. If none has it, return the name of the first queue."""
        return await self._search(tenant, id, _name_of) or self._queues.every[0].name

    async def _search(self, tenant: str, id: str, ask: Callable[[Queue, bytes], Awaitable[T | None]]) -> T | None:
        """Ask the queue in which the entry was placed. Then ask all queues, because another entry may now have this id."""
        key, queues = wire.key_of(tenant, id), list(self._router.where((tenant, id)))
        answers = await all_of(*(ask(queue, key) for queue in queues))
        if not any(answers):
            await self._look_again()
            answers = await all_of(*(ask(queue, key) for queue in list(self._queues.every)))
        return next((answer for answer in answers if answer is not None), None)

    async def _look_again(self) -> None:
        await self._router.read_registry()
        await self._queues.look(at_once=True)


async def _name_of(queue: Queue, key: bytes) -> QueueName | None:
    return queue.name if await queue.records.knows(key) else None


async def _state_of_any(queue: Queue, id: str) -> EntryState | None:
    """Return the state of the first entry in a queue that has this id, regardless of its tenant."""
    prefix = wire.prefix_of(queue.connection.prefix, queue.name, queue.shard)
    ending, cursor = _SPECIAL.sub(r"\\\g<0>", id), b"0"
    while True:
        cursor, owners = await queue.connection.call("owners", prefix, cursor, ending)
        for key in owners:
            if (state := await queue.records.state(key)) is not None:
                return state
        if cursor == b"0":
            return None


class TaskIds:
    """Claims task ids for one process."""

    def __init__(self, connection: RedisConnection, lookup: Lookup) -> None:
        self._connection, self._lookup = connection, lookup

    async def offer(
        self, entries: Sequence[Entry], offer: Callable[[Sequence[Entry]], Awaitable[Sequence[Failure | None]]]
    ) -> list[Failure | None]:
        """Claim the ids of entries that require it, then offer all entries whose claim didn't fail. Return the verdicts in
        order. If an entry is refused, its claim expires soon, so that refusals don't take up memory for long."""
        tasks = [position for position, entry in enumerate(entries) if entry.claims]
        claims = dict(zip(tasks, await all_of(*(self._claim(entries[position]) for position in tasks)), strict=True))
        verdicts = [claim if isinstance(claim := claims.get(at), Failure) else None for at in range(len(entries))]
        offered = [position for position, failure in enumerate(verdicts) if failure is None]
        answers = await offer([entries[position] for position in offered])
        for position, answer in zip(offered, answers, strict=True):
            verdicts[position] = answer
        void = [(entries[at], claims[at]) for at in offered if claims.get(at) and verdicts[at] is not None]
        await all_of(*(self._call("unclaim_id", task, mark, math.ceil(CLAIM_SECONDS)) for task, mark in void))
        return verdicts

    async def _claim(self, task: Entry) -> Failure | bytes:
        """Claim a task's id for its model. Returns the claim's mark, an empty mark if the claim isn't new, or a failure."""
        keep = max(dedup_key.keep for dedup_key in task.dedup_keys if dedup_key.kind is DedupKind.TASK)
        void = b""
        while True:
            seconds = math.ceil(task.timeout + keep + CLAIM_SECONDS)
            now = self._connection.clock_text()
            held, owner, *others = await self._call("claim_id", task, now, task.model, seconds, void)
            if not others:
                return b"" if held else bytes(owner)
            [on_its_way] = others
            if await self._lookup.state(task.tenant, task.id) is not None:
                return failures.conflict()
            if await self._lookup.knows(task.tenant, task.id):
                return failures.misuse()
            if on_its_way:
                return failures.conflict()
            void = owner

    async def _call(self, function: str, task: Entry, *arguments: Any) -> Any:
        name = hashlib.blake2b(wire.key_of(task.tenant, task.id), digest_size=16).hexdigest()
        key = f"{self._connection.prefix}:{{id:{name}}}:o"
        return await self._connection.call(function, key, *arguments)


LEAST_PAUSE = 0.001  # Minimum seconds between two reaps.


class Reaping:
    """Reaps the queues that one process knows."""

    def __init__(self, queues: QueueTable, shards: int, counters: BrokerCounts, rng: Callable[[], float]) -> None:
        self._queues, self._shards = queues, shards
        self._counters, self._rng = counters, rng
        self._due_at: dict[Queue, float] = {}
        self._watched_until: dict[Queue, float] = {}  # Time until which some process is known to watch each queue.
        self._stirred: set[Queue] = set()  # Queues with activity since their last reap began.
        self._mine: set[Queue] = set()  # Queues of which this process was the reaper when it last asked.
        self._timer = ReapTimer(self._reap_early)
        self._rest = 0.0

    @property
    def reaps(self) -> bool:
        """True if this process is the reaper of any of its queues."""
        return bool(self._mine)

    async def reap(self, rest: float) -> float:
        """Reap the queues that are due. Returns the seconds until the next queue is due. An idle queue is due again after
        `rest` seconds, or earlier if it gets entries. If `rest` is 0, no queue counts as idle. Raises BrokerUnavailable if
        a queue didn't answer. All other queues are reaped nevertheless."""
        self._rest = rest
        await self._reap_due(look=True)
        now, at = asyncio.get_running_loop().time(), min(self._due_at.values())
        if rest:
            self._timer.tell(at)
        return max(at - now, LEAST_PAUSE)

    def stirred(self, queue: Queue) -> None:
        """Record activity in a queue. It is reaped soon, unless some process is watching it anyway."""
        now = asyncio.get_running_loop().time()
        self._stirred.add(queue)  # A reap in progress may have missed the activity.
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
        """Reap ahead of the regular reap. Skips unresponsive servers; the regular reap retries them."""
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
        elif calm and (due >= REST_SECONDS * (1 - EARLY) or not reaps):  # Coincides with other periodic calls.
            due = until_tick(rest) + max(math.floor(due / rest + EARLY) - 1, 0) * rest
        self._due_at[queue] = now + due
        self._watched_until[queue] = now if calm else now + STIRS_SECONDS
        if again:
            self._counters.retries[Cause.LEASE_LOST.value] += again


LEAST_LINGER = 0.001
IN_USE = 1.0  # Seconds after the last offer for which a queue counts as in use.
MOST_PAUSE = 0.4  # Maximum seconds between two looks at other shards. The pause doubles while a slot is idle.
APART_FROM = 64 << 10  # Default size in bytes above which a value is stored separately.
_MODEL_AND_VERSION, _CLAIMS = attrgetter("model", "version"), attrgetter("claims")
RUNNING = 1_000  # Maximum number of running leases whose waits are remembered.


class _UnansweredClaim(msgspec.Struct):
    """Unanswered claim. It may have been granted, so it is repeated at the same shard."""

    queue: Queue
    token: str


class RedisBroker(Broker):
    """Broker over Redis. Its methods and guarantees are in `headway.ports.Broker`. Each model has `shards` queues. `kept` is
    the budget of each server. `queue_bytes` limits the total size of large entries that have no outcome yet."""

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
        self._values = LargeValues(connection.values, apart_from)
        self._connection.process = connection.process or str(uuid_utils.uuid7())
        self._counters, self._rng = counters, rng
        self._lease_seconds, self._shards = lease_seconds, shards
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers, self._offers = itertools.count(), Offers()
        # Debts of the limits if all queues share them, or None if each queue keeps its own counts.
        self._debts = None if connection.clustered else RateLimitCache()
        if self._debts is not None:  # Every request calls this, so avoid an indirection.
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
        """See Broker. Only used if each queue keeps its own rate-limit counts."""
        owed = 0.0
        for queues in self._queues.values():
            of_shards, counts = [queue.debts.seconds(limit) for queue in queues], queues[0].counts
            owed = max(owed, sum(of_shards) / counts if limit.name == "tier" and counts > 1 else max(of_shards))
        return owed

    @property
    def linger(self) -> float:
        """See Broker. At most GATHERED if there are several models, so that a model with long batches doesn't delay others."""
        now = asyncio.get_running_loop().time()
        least = min(
            (queue.gathering.linger(now) for queue in self._every if now - queue.gathering.offered_at < IN_USE),
            default=0.0,
        )
        return max(least if len(self._queues.limits) == 1 else min(least, GATHERED), LEAST_LINGER)

    @property
    def epoch(self) -> str:
        if not any(queue.born for queue in self._every):
            return ""
        return str(self._queues.losses)

    @property
    def memory_pressure(self) -> bool:
        return self._connection.memory.pressure

    @property
    def kept(self) -> KeptLimits:
        """See Broker. In a cluster these are the budgets of one queue, because each server only counts its own outcomes."""
        return self._budgets.kept()

    @property
    def near(self) -> None:
        """See RequestQueue. None, because the server is always another process."""

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
        names = set(map(_MODEL_AND_VERSION, entries))
        if not all(self._queues.has(QueueName(*name)) for name in names):
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
        names = {entry.queue for entry in known}  # A queue may be forgotten during the offer.
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
                await self._unlisten(slot)  # Otherwise a wake-up would be wasted on this busy slot.
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
        """On every second call, return a shard that is no slot's home but may have entries for this slot. Otherwise None."""
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
        if idle_at is not home:  # The slot's home has changed since its claim.
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
            raise ValueError(f"{len(items)} items for {len(lease.entries)} entries; pass one item per entry, in order")
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
        """See Broker. Withdraws an unknown submission, which is a write that changes nothing."""
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
            before.wakeups.wake(worker.worker_id)  # It is asleep at its old home, but is needed at the new one.
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
            self._connection.memory.look_soon()  # Memory must be watched even while there are no requests.
        if gone := {*self._queues.forget()}:
            await self._forget(gone)
        return max(min(pauses), LEAST_PAUSE)

    async def _forget(self, queues: Collection[Queue]) -> None:
        log.info("forgetting queues", queues=sorted({str(queue.name) for queue in queues}))
        self._router.forget_queues(queues)
        self._reaping.forget(queues)
        self._hints = {slot: queue for slot, queue in self._hints.items() if queue not in queues}
        self._doubts = {slot: doubt for slot, doubt in self._doubts.items() if doubt.queue not in queues}
        self._waited = {key: waits for key, waits in self._waited.items() if key[0] not in queues}
        await all_of(*(box.remove(queues) for box in self._mailboxes.values()))
        await all_of(*(queue.close() for queue in queues))

    async def _enqueue_known(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        entries = [await self._placed(entry) for entry in entries]
        known = [entry for entry in entries if self._queues.has(entry.queue)]
        names = {entry.queue for entry in known}
        answers = iter(await self.enqueue(known) if known else ())
        return [next(answers) if entry.queue in names else failures.not_here(entry.model) for entry in entries]

    async def _placed(self, entry: Entry) -> Entry:
        """Return the entry with its model filled in. A follower that names none gets the model and version of its task's queue."""
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
            if not (guest and again):  # A guest gives up on an unreachable shard after two tries.
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
        """Release a batch with an entry that this release can't read. Retries isolate it, or find a worker that can read it."""
        worker = claimed.lease.slot.worker
        log.error("a batch cannot be read", worker=worker, error=claimed.unreadable)
        await self.release(claimed.lease, BatchFailure(Cause.BAD_OUTPUT, claimed.unreadable, worker))
        return NoWork(claimed.lease.granted_at)

    async def _look_around(self, slot: Slot, home: Queue) -> None:
        """Wait until another shard needs help, and remember that shard for the next claim."""
        loop = asyncio.get_running_loop()
        start, pause = int(self._rng() * SHARDS), sharding.LOOK_ELSEWHERE_EVERY
        others = [queue for queue in self._queues[slot.queue] if queue is not home]
        for turn in itertools.count(start):
            # At high load slots are idle only briefly, so the first look must be early.
            await asyncio.sleep(max(self._looked_at.get(slot, -math.inf) + pause - loop.time(), 0.0))
            self._looked_at[slot] = loop.time()
            pause = min(2 * pause, MOST_PAUSE) if turn > start and not self._router.apart(slot.queue) else pause
            queue = others[turn % len(others)]
            with contextlib.suppress(BrokerUnavailable):
                if sharding.behind(*await queue.glance(), slot.max_batch):
                    self._hints[slot] = queue
                    return

    async def _look(self) -> list[tuple[Queue, Look]]:
        queues = list(self._every)  # Queues may be added before the answers arrive.
        return list(zip(queues, await all_of(*(queue.look() for queue in queues)), strict=True))

    def _queue_of(self, lease: Lease) -> tuple[Queue, int]:
        fence, shard = divmod(lease.fence, SHARDS)
        name = lease.slot.queue
        if name not in self._queues:
            self._queues.learn([name])
        return self._queues[name][shard], fence
