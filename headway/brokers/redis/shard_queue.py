"""One queue in the server: a model's only queue, or one of its shards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.claims import Claims, Granted, LastLoad
from headway.brokers.redis.codes import QueueSettings, RefusalCode
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.brokers.redis.entry_records import EntryRecords
from headway.brokers.redis.large_values import LargeValues, digest_of, length_of
from headway.brokers.redis.receipts import NOTHING_READ, Offers, Receipt, Receipts
from headway.brokers.redis.steps import Steps
from headway.core import failures
from headway.core.departure import Load, Policy
from headway.core.health import grace
from headway.core.locality import Contender
from headway.core.queue_limits import QueueLimits
from headway.core.ratelimit import Over, RateDebts
from headway.core.retention import KeptLimits, weight
from headway.core.values import octets
from headway.errors import BrokerUnavailable
from headway.model import (
    BatchFailure,
    BulkDepth,
    Completion,
    Entry,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    QueueName,
    Slot,
    Value,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)


_OUTPUT = attrgetter("output")


MOST_BYTES = 64 << 20  # Maximum bytes of outputs in the replies of one batch, except separately stored outputs.
PART_BYTES = 8 << 20  # Bytes of outputs in one step. A larger output gets a separate step.
NONE_APART: Mapping[int, str] = MappingProxyType({})
TOO_MUCH = "the outputs of its batch are more than {most} MiB in total, and there was no room for this one; try again"


class LeaseCompletions:
    """Completes the leases of one queue. `learn` is called with the packed load that each completion returns."""

    def __init__(
        self, steps: Steps, connection: RedisConnection, values: LargeValues, key: str, learn: Callable[[bytes], None]
    ) -> None:
        self._steps, self._connection, self._values = steps, connection, values
        self._key, self._learn = key, learn

    async def complete(
        self, fence: int, lease: Lease, items: Sequence[ItemResult], waited: Sequence[float]
    ) -> Completion:
        """End a lease with the result of each entry. `waited` has the seconds that each entry waited. Large outputs are sent
        last. If this raises BrokerUnavailable, some entries may have been answered."""
        large, delivered = self._large(items), 0
        left_out: dict[int, int] = {}
        if None in map(_OUTPUT, items):
            left_out = {position: item.left_out for position, item in enumerate(items) if item.left_out}
        storable = set(large)
        items = fitting(lease.entries, items, storable)
        *ahead, last = parts(items, large)
        if left_out:
            ahead = [[position for position in positions if position not in left_out] for positions in (*ahead, last)]
            last = []
        for positions in ahead:
            items, apart = await self._store(lease, items, positions, storable)
            answered = await self._deliver(fence, pack(lease, items, waited, positions, apart))
            if answered is None:
                last = []  # The lease is no longer valid, so the completion will be fenced.
                break
            delivered += answered
        if left_out:
            return await self._leave_out(fence, left_out, len(items), delivered)
        items, apart = await self._store(lease, items, last, storable)
        settled = await self._complete(fence, pack(lease, items, waited, last, apart))
        if delivered:
            departed = max(settled.departed - delivered, 0)
            settled = Completion(settled.answered + delivered, departed, settled.fenced)
        return settled

    def _large(self, items: Sequence[ItemResult]) -> Collection[int]:
        if length_of_all(items) <= self._values.threshold:  # The usual case.
            return ()
        return {position for position, item in enumerate(items) if self._values.is_large(item.output)}

    async def _store(
        self, lease: Lease, items: Sequence[ItemResult], positions: Sequence[int], storable: set[int]
    ) -> tuple[Sequence[ItemResult], Mapping[int, str]]:
        """Store outputs separately. Return the items, and each stored output's kind and token by position. If the server has no
        room for an output, it stays in its reply or becomes a failure, and its position is removed from `storable`."""
        wanted = [position for position in positions if position in storable] if storable else []
        if not wanted:
            return items, NONE_APART
        apart: dict[int, str] = {}

        async def store(position: int, output: Value) -> None:
            with contextlib.suppress(OutOfMemory):
                apart[position] = await self._values.bring_output(self._key, output, lease.entries[position].tenant)

        outputs = [(position, items[position].output) for position in wanted]
        await asyncio.gather(*(store(position, output) for position, output in outputs if output is not None))
        if len(apart) < len(wanted):
            storable.difference_update(position for position in wanted if position not in apart)
            items = fitting(lease.entries, items, storable)
        return items, apart

    async def _deliver(self, fence: int, outcomes: Outcomes) -> int | None:
        """Answer entries before the lease is completed. Returns how many, or None if the lease is no longer valid."""
        positions = wire.encode(list(outcomes.positions))
        answer = await self._steps.call("deliver", fence, positions, *self._arguments(outcomes))
        if not answer:
            await self._drop(outcomes.apart.values())
        return int(answer[0]) if answer else None

    async def _leave_out(self, fence: int, sizes: Mapping[int, int], size: int, delivered: int) -> Completion:
        """End a lease in which some entries must run again. `sizes` maps their positions to their outputs' sizes in bytes."""
        answer = await self._steps.call("leave_out", fence, wire.encode(list(sizes.items())))
        if not answer:
            return Completion(0, 0, fenced=True)
        again, load = answer
        self._learn(load)
        return Completion(delivered, max(size - delivered - int(again), 0))

    async def _complete(self, fence: int, outcomes: Outcomes) -> Completion:
        answer = await self._steps.call("complete", fence, *self._arguments(outcomes))
        if not answer:
            await self._drop(outcomes.apart.values())
            return Completion(0, 0, fenced=True)
        answered, departed, load = answer
        self._learn(load)
        return Completion(answered, departed)

    def _arguments(self, outcomes: Outcomes) -> list[object]:
        arguments: list[object] = [len(outcomes.runs)]
        for gateway, run in outcomes.runs.items():
            arguments += (gateway, run)
        keeps = not outcomes.shared or not self._connection.memory.pressure
        apart = [(position, name[1:]) for position, name in outcomes.apart.items()]
        arguments += (len(outcomes.shared), int(keeps), outcomes.head, wire.encode(apart) if apart else b"")
        arguments.append(outcomes.ran)
        for outcome in outcomes.shared:
            arguments += outcome
        for position, failure in outcomes.bad:
            arguments += (position, failure)
        return arguments

    async def _drop(self, names: Iterable[str]) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._connection.drop([f"{self._key}R:{name[1:]}" for name in names])


def fitting(
    entries: Sequence[Entry], items: Sequence[ItemResult], apart: Collection[int] = (), most: int = MOST_BYTES
) -> Sequence[ItemResult]:
    """Turn outputs into failures if the replies of a batch would have more than `most` bytes. Tenants share the bytes, and a tenant's
    smallest outputs are kept first. Outputs at the positions in `apart` don't count."""
    if 4 * length_of_all(items) <= most:  # The usual case. No character takes more than 4 bytes.
        return items
    sizes = [0 if position in apart else _bytes(item.output) for position, item in enumerate(items)]
    if sum(sizes) <= most:
        return items
    used: dict[str, int] = {}
    order = []
    for position in sorted(range(len(items)), key=sizes.__getitem__):
        tenant = entries[position].tenant
        used[tenant] = used.get(tenant, 0) + sizes[position]
        order.append((used[tenant], position))
    fitted, room = list(items), most
    for _, position in sorted(order):
        if sizes[position] <= room:
            room -= sizes[position]
        else:
            fitted[position] = ItemResult(None, TOO_MUCH.format(most=most >> 20), fault=True)
    failed = sum(after is not before for after, before in zip(fitted, items, strict=True))
    log.warning("outputs of a batch do not fit into one completion", size=len(items), failed=failed, bytes=sum(sizes))
    return fitted


class Outcomes(msgspec.Struct, frozen=True):
    """Packed outcomes of some entries of a lease.

    Attributes:
        runs: packed replies by gateway.
        head: bytes to put before a kept or shared reply to a single entry.
        shared: a tuple for each entry with dedup keys: its position; the usefulness (Worth) and size of its outcome; the number
            (from 1) of the item in `runs` that has its reply; and the Lua indexes of the reply's first and last byte there.
        ran: version and code that ran the entries, or empty if no outcome is shared.
        bad: positions and packed failures of items that failed.
        apart: kind and token of each separately stored output, by position.
    """

    positions: Sequence[int]
    runs: dict[str, bytes]
    head: bytes
    shared: Sequence[tuple[int, int, int, int, int, int]]
    ran: str
    bad: Sequence[tuple[int, bytes]]
    apart: Mapping[int, str]


def pack(
    lease: Lease,
    items: Sequence[ItemResult],
    waited: Sequence[float],
    positions: Sequence[int],
    names: Mapping[int, str] = NONE_APART,
) -> Outcomes:
    """Pack the outcomes of the entries at these positions. `names` has the kind and token of separately stored outputs."""
    apart = {position: names[position] for position in positions if position in names} if names else {}
    runs: dict[str, list[wire.WireReply]] = {}
    worths: dict[int, tuple[int, int]] = {}
    bad: list[tuple[int, bytes]] = []
    worker, version = lease.slot.worker, lease.slot.runs.version
    for position in positions:
        entry, item, failure = lease.entries[position], items[position], None
        if item.output is None:
            failure = failures.item_failure(item)
        if failure is not None and not item.elsewhere:
            stored_failure = wire.WireFailure("item", item.error or "", worker, "", version, lease.batch_id)
            bad.append((position, wire.encode(stored_failure)))
        reply = wire.WireReply(
            position, entry.id, entry.tenant, item.output, failure, waited[position], entry.nonce, tokens=item.tokens
        )  # fmt: skip
        if position in apart:
            reply = replace(reply, output=(apart[position], _bytes(item.output)))
        runs.setdefault(entry.gateway, []).append(reply)
        if entry.dedup_keys:
            worths[position] = wire.worth(failure), weight(item.output)
    if not worths:
        packed = {
            gateway: wire.encode(wire.WireRun(wire.SCHEMA, worker, version, replies))
            for gateway, replies in runs.items()
        }
        return Outcomes(positions, packed, b"", (), "", bad, apart)
    packed, shared = {}, []
    for number, (gateway, replies) in enumerate(runs.items(), 1):
        packed[gateway], spans = wire.pack_run(worker, version, replies)
        for reply, (begin, stop) in zip(replies, spans, strict=True):
            if reply.position in worths:
                shared.append((reply.position, *worths[reply.position], number, begin + 1, stop))
    ran = f"{version}#{lease.slot.runs.target}"
    return Outcomes(positions, packed, wire.head_of_one(worker, version), shared, ran, bad, apart)


def parts(items: Sequence[ItemResult], large: Collection[int] = (), most: int = PART_BYTES) -> Sequence[Sequence[int]]:
    """Return the positions of the items, divided into steps with at most `most` bytes of outputs, or a single larger output.
    The `large` outputs get the last steps, so that they delay no others."""
    positions = range(len(items))
    if not large and 4 * length_of_all(items) <= most:
        return [positions]
    steps: list[list[int]] = []
    for chosen in ([position for position in positions if position not in large], sorted(large)):
        room = -1
        for position in chosen:
            size = _bytes(items[position].output)
            if size > room:
                steps.append([])
                room = most
            steps[-1].append(position)
            room = max(room - size, 0)
    return steps or [positions]


def length_of_all(items: Sequence[ItemResult]) -> int:
    """Return the total length of the outputs: characters for strings, bytes for other values."""
    return sum(map(len, filter(None, map(_OUTPUT, items))))


def _bytes(output: Value | None) -> int:
    return len(octets(output)) if isinstance(output, str) and not output.isascii() else len(output or b"")


GRAIN = 0.0005  # Minimum delay of a timer in seconds.


class _Sleeper:
    """Slot that is waiting to be woken."""

    __slots__ = ("at", "timer", "woken")

    def __init__(self) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at = math.inf
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    def set(self, at: float, delay: float) -> None:
        """Wake at the time `at`, `delay` seconds from now, unless an earlier time is set."""
        if at < self.at:
            if self.timer is not None:
                self.timer.cancel()
            self.at = at
            self.timer = asyncio.get_running_loop().call_later(max(delay, GRAIN), self.wake)


class Wakeups:
    """Wake-ups from one queue for the slots of this process. `learn` is called with the packed load in each wake-up."""

    def __init__(
        self, connection: RedisConnection, key: str, now: Callable[[], float], learn: Callable[[bytes], None]
    ) -> None:
        self._connection = connection
        self._key = key
        self._now = now
        self._learn = learn
        self._sleepers: dict[str, _Sleeper] = {}
        self._rung: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._read_on())

    def forget(self, worker: str) -> None:
        """Drop a slot's pending wake-up, because the slot doesn't need it any more."""
        self._rung.pop(worker, None)

    async def sleep(self, worker: str, until: float | None) -> None:
        """Wait until the slot is woken, or until the time `until`. Raises BrokerUnavailable."""
        self.start()
        sleeper = self._sleepers[worker] = _Sleeper()
        try:
            for at in (until, self._rung.pop(worker, None)):
                if at is not None:
                    sleeper.set(at, at - self._now())
            await sleeper.woken
        finally:
            if sleeper.timer is not None:
                sleeper.timer.cancel()
            if self._sleepers.get(worker) is sleeper:
                del self._sleepers[worker]

    def wake(self, worker: str) -> None:
        sleeper = self._sleepers.get(worker)
        if sleeper is not None:
            sleeper.wake()

    def wake_all(self) -> None:
        for sleeper in self._sleepers.values():
            sleeper.wake()

    async def close(self) -> None:
        self._closed = True
        await end(self._task)

    async def _read_on(self) -> None:
        try:
            while True:
                message = await self._connection.reads.pop(self._key)
                if message is not None:
                    self._wake(message)
        except BrokerUnavailable as exc:
            # This task ends without suspending again, so later callers see that it isn't running, and restart it.
            for sleeper in self._sleepers.values():
                if not sleeper.woken.done():
                    sleeper.woken.set_exception(exc)

    def _wake(self, message: bytes) -> None:
        try:
            at, load, worker = wire.read_wakeup(message)
        except wire.UNREADABLE as exc:
            log.error("a wake-up cannot be read", error=wire.reason(exc))
            return
        self._learn(load)
        sleeper = self._sleepers.get(worker)
        if sleeper is None:
            self._rung[worker] = min(at, self._rung.get(worker, math.inf))
        elif at == 0.0:
            sleeper.wake()
        else:
            sleeper.set(at, at - self._now())


MOST_ENTRIES = 256  # Maximum number of entries in one call, because a step blocks the server.
GATHERING, GATHERED = 0.1, 0.004  # Gathering time if a slot may be free: share of the headway, and maximum in seconds.
GATHERING_BUSY, GATHERED_BUSY = 0.5, 0.012  # The same while no slot is free. With more, entries could miss a slot.
AHEAD = 0.001  # Seconds by which entries must be in the queue before a slot is free.
KEPT_SHARE = 0.25  # Maximum share of a server's `maxmemory` for kept outcomes, so that they never cause a refusal.
ROOM_SHARE = 0.5  # Maximum share of a server's `maxmemory` for large entries, so that there is room for small entries.


class Budgets:
    """Byte budgets of the queues. On a single server all queues share them. In a cluster each queue gets a part. `kept` is the budget
    of each server, `shards` the number of shards of each model. `queues` returns the total number of queues."""

    def __init__(
        self, connection: RedisConnection, kept: KeptLimits, queue_bytes: int, shards: int, queues: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._kept, self._queue_bytes = kept, queue_bytes
        self._shards, self._queues = shards, queues
        self._kept_now: tuple[tuple[int, int], KeptLimits] | None = None

    def kept(self) -> KeptLimits:
        """Return one queue's budgets for kept outcomes."""
        memory_now = servers, memory = self._connection.memory.servers, self._connection.memory.smallest
        if self._kept_now is not None and self._kept_now[0] == memory_now:
            return self._kept_now[1]
        parts = self._shards if self._connection.clustered else 1
        kept = self._kept.within(int(KEPT_SHARE * memory) * min(servers, parts)) if memory else self._kept
        kept = kept.split(parts)
        self._kept_now = memory_now, kept
        return kept

    def room(self) -> int:
        servers, memory = self._connection.memory.servers, self._connection.memory.smallest
        room = min(self._queue_bytes, int(ROOM_SHARE * memory) * servers) if memory else self._queue_bytes
        return room // max(self._queues(), 1) if self._connection.clustered else room


class RateLimitCache:
    """Lower bounds on rate-limit debts. Other processes can only increase a debt. Times are the event loop's."""

    def __init__(self) -> None:
        self._debts = RateDebts()
        self._clock: Callable[[], float] | None = None

    def learn(self, limits: Sequence[Limit], owed: Sequence[float], asked: float) -> None:
        """Learn how many seconds were owed to each limit at the time `asked`."""
        until = self._debts.tats
        self._clock = self._clock or asyncio.get_running_loop().time
        for limit, seconds in zip(limits, owed, strict=True):
            until[limit.id] = max(asked + seconds, until.get(limit.id, 0.0))
        self._debts.tidy(asked)

    def forget(self) -> None:
        self._debts = RateDebts()

    def seconds(self, limit: Limit) -> float:
        until = self._debts.tats.get(limit.id)
        if until is None or self._clock is None:
            return 0.0
        owed = until - self._clock()
        return owed if owed > 0.0 else 0.0


class Gathering:
    """Decides how long entries for one queue may gather before they are offered. Times are the event loop's."""

    def __init__(self) -> None:
        self.offered_at = self._free_at = -math.inf
        self._headway = -1.0

    def learn(self, offered_at: float, headway: float, free_in: float) -> None:
        """Learn from an answer to an offer: the queue's headway, and the seconds until a slot is free."""
        self.offered_at, self._free_at, self._headway = offered_at, offered_at + free_in, headway

    def linger(self, now: float) -> float:
        """Return the number of seconds from `now` for which entries may gather. It is largest while no slot is free."""
        busy = min(self._free_at - AHEAD - now, max(GATHERING_BUSY * self._headway, GATHERED), GATHERED_BUSY)
        return max(min(GATHERING * self._headway, GATHERED), busy)


class Moved(msgspec.Struct, frozen=True):
    """Verdict that the queue of another version knows the entry's id or one of its dedup keys."""

    queue: QueueName


Verdict = Failure | Moved | None  # A queue's verdict on an entry. None if the entry is admitted.


class Look(msgspec.Struct):
    """State of a queue at one moment: `load`, the depth and longest wait (in seconds) of each tier, and, if there ever were any
    bulk entries, their numbers."""

    load: Load
    tiers: list[tuple[int, float]]
    bulk: BulkDepth | None = None


class Queue:
    """One queue in the server.

    Attributes:
        born: server time at which this queue's state was created, or 0 if unknown. It changes if the state is lost.
        losses: number of times that the state was lost.
        in_use: number of shards among which the queue's load is divided.
        spread: number of shards among which the model's tenants are divided.
        served: True if any shard had healthy slots for the queue's entries at the last census.
        stirred: called after activity in the queue.
    """

    def __init__(
        self,
        connection: RedisConnection,
        name: QueueName,
        shard: int,
        limits: QueueLimits,
        lease_seconds: float,
        budgets: Budgets,
        values: LargeValues,
        offers: Offers,
        debts: RateLimitCache,
    ) -> None:
        self.connection = connection
        self.name, self.shard = name, shard
        self.born = 0.0
        self.losses = 0
        self.gathering = Gathering()
        self._key = wire.prefix_of(connection.prefix, name, shard)
        self.in_use = self.spread = 1
        self.served = False
        self.limits = limits
        self._lease_seconds = lease_seconds
        self._budgets = budgets
        self._values = values
        self._settings: tuple[tuple[int, bool, KeptLimits, int, QueueLimits] | None, str] = None, ""
        counted_at = wire.prefix_of(connection.prefix, QueueName(name.model), shard)
        self._counts_key = f"{counted_at}w" if connection.clustered else f"{connection.prefix}:{{limits}}:w"
        self.debts = debts
        self._steps = Steps(connection, self._key, self._head)
        load = LastLoad(self._steps.clock, self._learn_times)
        self._claims = Claims(self._steps, load, values, self._key, shard, lease_seconds)
        self.completions = LeaseCompletions(self._steps, connection, values, self._key, load.learn)
        self.records = EntryRecords(self._steps, values, self._key)
        self.receipts = Receipts(self._acknowledge, offers)
        self.stirred: Callable[[], None] = lambda: None
        clock = self._steps.clock
        self.wakeups = Wakeups(connection, f"{self._key}b:{connection.process}", clock.now, load.learn)

    def stream_of(self, gateway: str) -> str:
        return f"{self._key}r:{gateway}"

    async def close(self) -> None:
        """Stop listening, and try to report the last receipts."""
        await self.wakeups.close()
        await self.receipts.close()

    @property
    def counts(self) -> int:
        """Number of counters among which a limit shared by tenants is divided."""
        return self.spread if self.connection.clustered else 1

    async def enqueue(self, entries: Sequence[Entry], function: str = "enqueue") -> list[Verdict]:
        """Offer entries with the function `enqueue` or `enqueue_bulk`. Returns the verdicts in order."""
        verdicts: list[Verdict] = []
        for start in range(0, len(entries), MOST_ENTRIES):
            verdicts += await self._enqueue_part(entries[start : start + MOST_ENTRIES], function)
        return verdicts

    async def _enqueue_part(self, entries: Sequence[Entry], function: str, digested: bool = False) -> list[Verdict]:
        """Offer entries in one call. Pass `digested` if the server already has their inputs and asked for their digests."""
        receipt = self.receipts.take(entries[0].gateway)
        read, limits = NOTHING_READ if receipt is None else receipt.packed, entry_wire.limits_of(entries)
        packed, large, rare = entry_wire.pack_small(entries, self._values.threshold)
        for position, entry in large.items():
            name = self._values.name_of(entry)
            token = name[1:] + (digest_of(entry) if digested else "")
            packed[position] = entry_wire.pack_head(entry, token.encode())
            packed[position + 1] = entry_wire.pack_entry(entry, name, length_of(entry))
        extras = entry_wire.pack_extras(entries, limits, self.counts, rare)
        began = asyncio.get_running_loop().time()
        try:
            answer = await self._enqueue(function, () if digested else [*large.values()], [*read, extras, *packed])
        except BrokerUnavailable:
            self.receipts.keep(receipt)
            raise
        self.stirred()
        numbers, refused, owed = answer
        now, born, headway, free_in = wire.read_numbers(numbers)
        self.gathering.learn(began, headway, free_in)
        self._learn_times(now, born)
        if owed:
            self.debts.learn(limits, wire.read_numbers(owed), began)
        result: list[Verdict] = [None] * len(entries)
        undigested = []
        for position, wait, why in zip(refused[::3], refused[1::3], refused[2::3], strict=True):
            if why == RefusalCode.UNDIGESTED:
                undigested.append(position)
            elif why == RefusalCode.MOVED:
                result[position] = Moved(wire.queue_of(self.name.model, wait))
            else:
                result[position] = _refusal(entry_wire.payer_of(entries, position), why, wait)
        if undigested:
            verdicts = await self._enqueue_part([entries[position] for position in undigested], function, digested=True)
            for position, verdict in zip(undigested, verdicts, strict=True):
                result[position] = verdict
        return result

    async def _enqueue(self, function: str, large: Sequence[Entry], arguments: Sequence[object]) -> Any:
        if not await self.connection.memory.is_scarce():
            try:
                if large:
                    await self._values.bring(self._key, large)
                return await self._steps.call(function, *arguments)
            except OutOfMemory:  # The call did nothing. But entries that the server already knows must not be refused.
                pass
        return await self._steps.call("enqueue_known", *arguments)

    async def claim(self, slot: Slot, policy: Policy, token: str, guest: bool) -> Granted | NoWork:
        self.wakeups.forget(slot.worker)
        self.wakeups.start()
        name = f"{self.connection.process}\0{slot.worker}"
        return await self._claims.claim(name, slot, policy, token, guest)

    async def release(self, fence: int, lease: Lease, failure: BatchFailure | None, rng: float = 0.0) -> int | None:
        """End a lease without outputs. Returns how many entries run again, or None if the lease was no longer valid."""
        arguments = () if failure is None else (wire.pack_failure(failure, lease), rng)
        answer = await self._steps.call("release", fence, *arguments)
        self.stirred()
        return int(answer[0]) if answer else None

    async def extend(self, fence: int) -> bool:
        return bool(await self._steps.call("extend", fence))

    async def withdraw(self, names: Sequence[bytes], gateway: str) -> None:
        for start in range(0, len(names), MOST_ENTRIES):
            self._learn(await self._steps.call("withdraw", gateway, *names[start : start + MOST_ENTRIES]))
        self.stirred()

    async def cancel_task(self, key: bytes) -> None:
        self._learn(await self._steps.call("cancel_task", key))
        self.stirred()

    async def unlisten(self, worker: str) -> None:
        """Tell the server that a slot no longer waits to be woken."""
        self.wakeups.forget(worker)
        self._learn(await self._steps.call("unlisten", f"{self.connection.process}\0{worker}"))

    async def heartbeat(self, worker: WorkerInfo, renewed: bool) -> None:
        """Report the status and warm-up batches of a slot whose home is this queue. Pass `renewed` if its backend has changed."""
        standing = {WorkerStatus.HEALTHY: 1, WorkerStatus.COLD: 2}.get(worker.status, 0)
        slot = worker.worker_id, standing, worker.share, int(renewed), grace(worker.every), worker.runs.target
        self._learn(await self._steps.join("beat", *slot, *itertools.chain.from_iterable(worker.warm_up)))

    async def forget(self, worker: str) -> None:
        """Drop a worker whose home is now another shard."""
        self._learn(await self._steps.join("forget", worker))

    async def look(self) -> Look:
        times, load, tiers, *bulk = await self._steps.share("look")
        now = self._learn(times)
        waits = [(depth, now - float(since)) for depth, since in zip(tiers[::2], tiers[1::2], strict=True)]
        look = Look(wire.read_load(load)[2], waits)
        if bulk:
            waiting, delayed, busy, held = bulk
            model, version = self.name.model, self.name.version
            look.bulk = BulkDepth(model, int(waiting), int(delayed), version, int(busy), float(held))
        return look

    async def glance(self) -> tuple[int, int]:
        """Return the depth of the queue, and the number of slots whose home it is."""
        depth, slots, *_ = wire.read_numbers(await self._steps.call("glance"))
        return int(depth), int(slots)

    async def siblings(self) -> tuple[Sequence[QueueName], float]:
        """Return the model's queues that may hold data, and the time after which none of them does. Only the queue for any
        version knows this."""
        until, endings = await self._steps.join("siblings")
        return [wire.queue_of(self.name.model, ending) for ending in endings], float(until)

    async def contender(self, model: str) -> Contender:
        *_, depth, slack, seconds = wire.read_numbers(await self._steps.call("glance"))
        return Contender(model, slack, seconds, depth > 0)

    async def reap(self, rng: float, shards: int = 1, rests: bool = False) -> tuple[float, int, bool, bool]:
        """Reap. Returns the seconds until the next call is due, the number of entries of lost leases that run again, whether
        the queue is idle, and whether this process is its reaper. If the queue is idle and the caller `rests`, the next call
        may be due much later."""
        numbers, again, calm, reaps = await self._steps.join("reap", self.connection.process, rng, shards, int(rests))
        now, born, due = wire.read_numbers(numbers)
        self._learn_times(now, born)
        return due, int(again), bool(calm), bool(reaps)

    async def _acknowledge(self, receipt: Receipt) -> None:
        self._learn(await self._steps.call("acknowledge", *receipt.packed))

    def _head(self) -> tuple[object, ...]:
        key = self.in_use, self.served, self._budgets.kept(), self._budgets.room(), self.limits
        if self._settings[0] != key:
            self._settings = key, QueueSettings.packed(*key, self._lease_seconds, self._counts_key)
        return self.connection.clock_text(), self._settings[1]

    def _learn(self, times: bytes) -> float:
        """Learn from the two packed times that a call returned (see `_learn_times`), and return the first."""
        now, born = wire.read_numbers(times)
        self._learn_times(now, born)
        return now

    def _learn_times(self, now: float, born: float) -> None:
        """Learn the server's time, and when the queue's state was created. If the latter has changed, the state was lost."""
        self._steps.clock.learn(now)
        if born != self.born:
            if self.born != 0.0:
                self.losses += 1
                self.receipts.clear()
                self.debts.forget()
                self.wakeups.wake_all()  # The server no longer knows which slots are listening.
            self.born = born


def _refusal(entry: Entry, why: int, detail: bytes) -> Failure:
    if why >= RefusalCode.OVER:
        return failures.over(Over(entry.limits[why - RefusalCode.OVER], float(detail)))
    return wire.refusal(why, 0.0, detail) if why == RefusalCode.CULPRIT else wire.refusal(why, float(detail))
