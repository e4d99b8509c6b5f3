"""One queue in the server: a model's only queue, or one shard of several."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.codes import QueueSettings, RefusalCode, Standing
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.brokers.redis.function_library import RULE_AGE
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
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    QueueName,
    Reply,
    Slot,
    Value,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)


_OUTPUT = attrgetter("output")


MOST_BYTES = 64 << 20  # Maximum bytes of outputs in the replies of one batch, without outputs stored apart.
PART_BYTES = 8 << 20  # Bytes of outputs in one step. A larger output gets a step of its own.
NONE_APART: Mapping[int, str] = MappingProxyType({})
TOO_MUCH = "the outputs of its batch come to more than {most} MiB, and there was no room for this one; try again"


class LeaseCompletions:
    """Completions of one queue's leases. `learn` is called with the packed load that each completion returns."""

    def __init__(
        self, steps: Steps, connection: RedisConnection, values: LargeValues, key: str, learn: Callable[[bytes], None]
    ) -> None:
        self._steps, self._connection, self._values = steps, connection, values
        self._key, self._learn = key, learn

    async def complete(
        self, fence: int, lease: Lease, items: Sequence[ItemResult], waited: Sequence[float]
    ) -> Completion:
        """End a lease with the result of each entry and the seconds that each `waited`. Large outputs come last. After
        BrokerUnavailable, some entries may have been answered."""
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
                last = []  # The lease is over, so the completion will be fenced.
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
        """Store outputs apart. Return the items, and the kind and token of each stored output by position. If the server has no
        room for an output, it stays in its reply or becomes a failure, and is no longer `storable`."""
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
        """Answer entries ahead of the lease's completion. Returns their number, or None if the lease is no longer valid."""
        positions = wire.encode(list(outcomes.positions))
        answer = await self._steps.call("deliver", fence, positions, *self._arguments(outcomes))
        if not answer:
            await self._drop(outcomes.apart.values())
        return int(answer[0]) if answer else None

    async def _leave_out(self, fence: int, sizes: Mapping[int, int], size: int, delivered: int) -> Completion:
        """End a lease whose other entries were answered. `sizes` has the positions and output bytes of entries to run again."""
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
        keeps = not outcomes.shared or not self._connection.memory_pressure
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
    """Turn outputs into failures if the replies of a batch would carry more than `most` bytes. Tenants share the bytes, and the
    smallest outputs of a tenant come first. Outputs at the positions `apart` don't count."""
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
        head: bytes that precede a kept or shared reply of a single entry.
        shared: for each entry with dedup keys its position, the worth and bytes of its outcome, the number of its gateway in `runs`
            (from 1), and the Lua indexes at which its reply there begins and ends.
        ran: version of the model and code that ran the entries, or empty if none is shared.
        bad: positions and packed failures of items that failed.
        apart: kind and token of each output stored apart, by position.
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
    """Pack the outcomes of the entries at some positions. `names` has kind and token of each output stored apart, by position."""
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
    """Split the items' positions into steps of `most` bytes of outputs. The `large` outputs come last and delay no others."""
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
    """Return the total length of the outputs. Texts count in characters, others in bytes."""
    return sum(map(len, filter(None, map(_OUTPUT, items))))


def _bytes(output: Value | None) -> int:
    return len(octets(output)) if isinstance(output, str) and not output.isascii() else len(output or b"")


GRAIN = 0.0005  # Minimum delay of a timer in seconds.


class _Sleeper:
    """Slot that waits for a wake-up."""

    __slots__ = ("at", "timer", "woken")

    def __init__(self) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at = math.inf
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    def set(self, at: float, delay: float) -> None:
        """Wake in `delay` seconds, at instant `at`, unless an earlier instant is set."""
        if at < self.at:
            if self.timer is not None:
                self.timer.cancel()
            self.at = at
            self.timer = asyncio.get_running_loop().call_later(max(delay, GRAIN), self.wake)


class Wakeups:
    """Wake-ups of one queue for the slots of this process. `learn` is called with the packed load of each wake-up."""

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
        """Drop the wake-ups of a slot that claims."""
        self._rung.pop(worker, None)

    async def sleep(self, worker: str, until: float | None) -> None:
        """Return when the slot is woken, or at instant `until`. Raises BrokerUnavailable."""
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
                message = await self._connection.pop(self._key)
                if message is not None:
                    self._wake(message)
        except BrokerUnavailable as exc:
            # Nothing suspends before this task ends, so later callers see that it doesn't run, and start it again.
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


SHARDS = 256  # Maximum number of shards of a model. A lease's fence is the queue's fence times SHARDS, plus the shard.
MOST_ENTRIES = 256  # Maximum number of entries in one call, because a step blocks the server.
GATHERING, GATHERED = 0.1, 0.004
"""Share of the headway for which entries may gather while a slot may be free, and its maximum in seconds."""
GATHERING_BUSY, GATHERED_BUSY = 0.5, 0.012
"""Share and maximum while no slot is free. Longer gathering would delay verdicts, and entries would miss a slot that is free early."""
AHEAD = 0.001  # Seconds by which entries must be in the queue before a slot is free.
TRIES = 4  # Maximum number of times in a row that a claim may ask for a newer rule.
KEPT_SHARE = 0.25  # Maximum share of a server's `maxmemory` for kept outcomes, so they never cause a refusal.
ROOM_SHARE = 0.5  # Maximum share of a server's `maxmemory` for large entries, so room is left for small entries.

_STATES = {Standing.AT_END: None, Standing.WAITING: EntryState.QUEUED, Standing.RUNNING: EntryState.PROCESSING}

_INPUT = attrgetter("input")


class Budgets:
    """Byte budgets of the queues. On one server all queues share them, and in a cluster each queue gets a part. `kept` is the
    budget of each server. `queues` returns the number of all queues, `shards` is that of each model."""

    def __init__(
        self, connection: RedisConnection, kept: KeptLimits, queue_bytes: int, shards: int, queues: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._kept, self._queue_bytes = kept, queue_bytes
        self._shards, self._queues = shards, queues
        self._kept_now: tuple[tuple[int, int], KeptLimits] | None = None

    def kept(self) -> KeptLimits:
        """Return the budgets of kept outcomes for one queue."""
        memory_now = servers, memory = self._connection.servers, self._connection.smallest_memory
        if self._kept_now is not None and self._kept_now[0] == memory_now:
            return self._kept_now[1]
        parts = self._shards if self._connection.clustered else 1
        kept = self._kept.within(int(KEPT_SHARE * memory) * min(servers, parts)) if memory else self._kept
        kept = kept.split(parts)
        self._kept_now = memory_now, kept
        return kept

    def room(self) -> int:
        servers, memory = self._connection.servers, self._connection.smallest_memory
        room = min(self._queue_bytes, int(ROOM_SHARE * memory) * servers) if memory else self._queue_bytes
        return room // max(self._queues(), 1) if self._connection.clustered else room


class RateLimitCache:
    """Lower bounds on rate-limit debts. Other processes can only add to a debt. Instants are the event loop's."""

    def __init__(self) -> None:
        self._debts = RateDebts()
        self._clock: Callable[[], float] | None = None

    def learn(self, limits: Sequence[Limit], owed: Sequence[float], asked: float) -> None:
        """Note the seconds owed to each limit at instant `asked`."""
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


class Granted(msgspec.Struct, frozen=True):
    """Lease from the server. `waited` has the seconds that each entry waited. `unreadable` is why one can't be read, or empty."""

    lease: Lease
    waited: Sequence[float]
    unreadable: str = ""


class Moved(msgspec.Struct, frozen=True):
    """Verdict that another version's queue knows the entry's id, or a dedup key of the entry."""

    queue: QueueName


Verdict = Failure | Moved | None  # Verdict of a queue on an entry, which is None if the entry is admitted.


class Look(msgspec.Struct):
    """Load of a queue, depth and longest wait in seconds of each tier, and bulk entries if there ever were any."""

    load: Load
    tiers: list[tuple[int, float]]
    bulk: BulkDepth | None = None


class Queue:
    """One queue in the server.

    Attributes:
        born: instant at which the server's state of this queue began, or 0 if unknown. It changes when the state is lost.
        offered_at: event loop instant of the last offer.
        in_use: number of shards over which the queue's load is spread.
        spread: number of shards over which the model's tenants are spread.
        served: True if any shard had healthy slots for the queue's entries at the last census.
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
        self.offered_at = self._free_at = -math.inf
        self._headway = -1.0
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
        self._debts = debts
        self._steps = Steps(connection, self._key, self._head)
        self.completions = LeaseCompletions(self._steps, connection, values, self._key, self._learn)
        self._load: tuple[float, Load] | None = None
        self.receipts = Receipts(self._tell, offers)
        self.stirred: Callable[[], None] = lambda: None
        self.wakeups = Wakeups(connection, f"{self._key}b:{connection.process}", self.now, self._learn)

    def now(self) -> float:
        """Return an estimate of the server's present instant."""
        return self._steps.clock.now()

    def stream_of(self, gateway: str) -> str:
        return f"{self._key}r:{gateway}"

    async def close(self) -> None:
        """Stop listening, and try to acknowledge replies to the server."""
        await self.wakeups.close()
        await self.receipts.close()

    @property
    def counts(self) -> int:
        """Number of counters over which a limit shared by tenants is spread."""
        return self.spread if self.connection.clustered else 1

    def linger(self, now: float) -> float:
        """Return the seconds for which entries may gather from event loop instant `now`, longest while no slot is free."""
        busy = min(self._free_at - AHEAD - now, max(GATHERING_BUSY * self._headway, GATHERED), GATHERED_BUSY)
        return max(min(GATHERING * self._headway, GATHERED), busy)

    async def enqueue(self, entries: Sequence[Entry], function: str = "enqueue") -> list[Verdict]:
        """Offer entries, by `enqueue` or `enqueue_bulk`. Returns the verdicts in order."""
        verdicts: list[Verdict] = []
        for start in range(0, len(entries), MOST_ENTRIES):
            verdicts += await self._enqueue_part(entries[start : start + MOST_ENTRIES], function)
        return verdicts

    def rate_limit_debt(self, limit: Limit) -> float:
        return self._debts.seconds(limit)

    async def _enqueue_part(self, entries: Sequence[Entry], function: str, digested: bool = False) -> list[Verdict]:
        """Offer entries in one call. Pass `digested` if the server has their inputs and asked for their digests."""
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
        now, born, self._headway, free_in = wire.read_numbers(numbers)
        self.offered_at, self._free_at = began, began + free_in
        self._heed(now, born)
        if owed:
            self._debts.learn(limits, wire.read_numbers(owed), began)
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
        if not await self.connection.is_scarce():
            try:
                if large:
                    await self._values.bring(self._key, large)
                return await self._call(function, *arguments)
            except OutOfMemory:  # The call did nothing. Entries that the server knows must not be refused.
                pass
        return await self._call("enqueue_known", *arguments)

    async def claim(self, slot: Slot, policy: Policy, token: str, guest: bool) -> Granted | NoWork:
        """Claim the batch that leaves now, or learn when to claim again. A repeated claim has the same `token`. A slot is a
        `guest` if its home is another shard."""
        self.wakeups.forget(slot.worker)
        name = f"{self.connection.process}\0{slot.worker}"
        self.wakeups.start()
        loop, took = asyncio.get_running_loop(), 0.0
        for _ in range(TRIES):
            began = loop.time()
            rule = self._rule(policy, took)
            answer = await self._steps.claim("claim", name, slot.max_batch, token, int(guest), rule)
            if answer[0] == b"lease":
                return await self._granted(slot, answer)
            self._learn(answer[-1])
            took = loop.time() - began
            if answer[0] == b"wait":
                [until] = wire.read_numbers(answer[1])
                return NoWork(None if math.isinf(until) else until)
        return NoWork(self.now() + RULE_AGE)

    async def release(self, fence: int, lease: Lease, failure: BatchFailure | None, rng: float = 0.0) -> int | None:
        """End a lease without outputs. Returns the number of entries that run again, or None if the lease was no longer valid."""
        arguments = () if failure is None else (wire.pack_failure(failure, lease), rng)
        answer = await self._call("release", fence, *arguments)
        self.stirred()
        return int(answer[0]) if answer else None

    async def extend(self, fence: int) -> bool:
        return bool(await self._call("extend", fence))

    async def withdraw(self, names: Sequence[bytes], gateway: str) -> None:
        for start in range(0, len(names), MOST_ENTRIES):
            self._note(await self._call("withdraw", gateway, *names[start : start + MOST_ENTRIES]))
        self.stirred()

    async def cancel_task(self, key: bytes) -> None:
        self._note(await self._call("cancel_task", key))
        self.stirred()

    async def state(self, key: bytes) -> EntryState | None:
        """Return the state of an entry, or None if it has its outcome or is unknown."""
        return _STATES[await self._call("stage", key)]

    async def outcome(self, key: bytes, again: bool = True) -> Reply | EntryState | None:
        """Return the outcome of a task, or its state if it has no outcome yet."""
        standing, *fields = await self._call("recall", key)
        if not fields:
            return _STATES[standing]
        apart = wire.Apart()
        [reply] = wire.read_outcomes(dict(zip(fields[::2], fields[1::2], strict=True)), apart)
        if not apart:
            return reply
        name, length = apart[0]
        output = await self.output_of(name, length, reply.tenant)
        if output is not None:
            return replace(reply, output=output)
        # The outcome was forgotten since, or its output is lost. Asking again makes the server forget an outcome without output.
        if again:
            return await self.outcome(key, again=False)
        return replace(reply, failure=failures.lost_output())

    async def knows(self, key: bytes) -> bool:
        standing, *fields = await self._call("recall", key)
        return bool(fields) or _STATES[standing] is not None

    async def unlisten(self, worker: str) -> None:
        """Note that a slot no longer waits for a wake-up."""
        self.wakeups.forget(worker)
        self._note(await self._call("unlisten", f"{self.connection.process}\0{worker}"))

    async def heartbeat(self, worker: WorkerInfo, renewed: bool) -> None:
        """Report the status and the warm-up batches of a home slot. Pass `renewed` if its backend has changed."""
        standing = {WorkerStatus.HEALTHY: 1, WorkerStatus.COLD: 2}.get(worker.status, 0)
        slot = worker.worker_id, standing, worker.share, int(renewed), grace(worker.every), worker.runs.target
        self._note(await self._steps.join("beat", *slot, *itertools.chain.from_iterable(worker.warm_up)))

    async def forget(self, worker: str) -> None:
        """Drop a worker whose home is another shard from now on."""
        self._note(await self._steps.join("forget", worker))

    async def look(self) -> Look:
        instants, load, tiers, *bulk = await self._steps.share("look")
        instant = self._note(instants)
        waits = [(depth, instant - float(since)) for depth, since in zip(tiers[::2], tiers[1::2], strict=True)]
        look = Look(wire.read_load(load)[2], waits)
        if bulk:
            waiting, delayed, busy, held = bulk
            model, version = self.name.model, self.name.version
            look.bulk = BulkDepth(model, int(waiting), int(delayed), version, int(busy), float(held))
        return look

    async def glance(self) -> tuple[int, int]:
        """Return the depth of the queue and the number of its home slots."""
        depth, slots, *_ = wire.read_numbers(await self._call("glance"))
        return int(depth), int(slots)

    async def siblings(self) -> tuple[Sequence[QueueName], float]:
        """Return the model's queues that may hold data, and the instant until which they may. Ask the queue for any version."""
        until, endings = await self._steps.join("siblings")
        return [wire.queue_of(self.name.model, ending) for ending in endings], float(until)

    async def contender(self, model: str) -> Contender:
        *_, depth, slack, seconds = wire.read_numbers(await self._call("glance"))
        return Contender(model, slack, seconds, depth > 0)

    async def reap(self, rng: float, shards: int = 1, rests: bool = False) -> tuple[float, int, bool, bool]:
        """Reap. If the caller `rests` while the queue is at rest, the next call may be far off.

        Returns the seconds until the next call, the number of entries of lost leases that run again, whether the queue is at rest,
        and whether this process is the one that reaps it.
        """
        numbers, again, calm, reaps = await self._steps.join("reap", self.connection.process, rng, shards, int(rests))
        now, born, due = wire.read_numbers(numbers)
        self._heed(now, born)
        return due, int(again), bool(calm), bool(reaps)

    async def _tell(self, receipt: Receipt) -> None:
        self._note(await self._call("acknowledge", *receipt.packed))

    def _head(self) -> tuple[object, ...]:
        key = self.in_use, self.served, self._budgets.kept(), self._budgets.room(), self.limits
        if self._settings[0] != key:
            self._settings = key, QueueSettings.packed(*key, self._lease_seconds, self._counts_key)
        return self.connection.clock_text(), self._settings[1]

    def _call(self, function: str, *arguments: object) -> Awaitable[Any]:
        return self._steps.call(function, *arguments)

    def _note(self, instants: bytes) -> float:
        """Note the packed instant and birth that a call returned, and return the instant."""
        now, born = wire.read_numbers(instants)
        self._heed(now, born)
        return now

    def _heed(self, now: float, born: float) -> None:
        """Learn the server's clock and the queue's birth. A new birth means that the queue's state was lost."""
        self._steps.clock.learn(now)
        if born != self.born:
            if self.born != 0.0:
                self.losses += 1
                self.receipts.clear()
                self._debts.forget()
                self.wakeups.wake_all()  # The server no longer knows who listens.
            self.born = born

    def _learn(self, load: bytes) -> None:
        now, born, known = wire.read_load(load)
        self._load = now, known
        self._heed(now, born)

    def _rule(self, policy: Policy, took: float) -> bytes:
        """Pack the rule for the last known load, or no rule if the load is too old. The rule's instant is later by the seconds
        that the last call `took`, so that a distant server doesn't find it too old."""
        if self._load is None:
            return wire.pack_rule(0.0, 0, None)
        stamp, load = self._load
        if self.now() - stamp > RULE_AGE:
            return wire.pack_rule(0.0, 0, None)
        return wire.pack_rule(stamp + took, load.slots, policy.rule(load))

    async def output_of(
        self, name: str, length: int, tenant: str, wanted: Callable[[], bool] = lambda: True
    ) -> Value | None:
        """Read a tenant's output that is stored apart, or return None if it is gone or no longer `wanted`."""
        return await self._values.output_of(self._key, name, length, tenant, wanted)

    async def _granted(self, slot: Slot, answer: list[Any]) -> Granted | NoWork:
        _, numbers, reason, arrivals, payloads = answer
        now, fence, left_at, ends, time_left, attempt = wire.read_numbers(numbers)
        self._steps.clock.learn(now)
        entries: list[Entry] = []
        unreadable = ""
        waited = [left_at - arrived for arrived in wire.read_numbers(arrivals)]
        try:
            stored = entry_wire.read_payloads(payloads)
            inputs: Sequence[entry_wire.Apart | None] = [None] * len(stored)
            if list in map(type, map(_INPUT, stored)) and any(entry.apart for entry in stored):
                inputs = await self._inputs(int(fence), stored)
                lost = [at for at, entry in enumerate(stored) if entry.apart and inputs[at] is None]
                if lost:
                    log.info("inputs of a batch are missing", worker=slot.worker, count=len(lost), of=len(stored))
                if lost and not await self._call("lose", int(fence), wire.encode(lost)):
                    return NoWork(self.now())
                kept = [at for at in range(len(stored)) if at not in lost]
                stored, inputs = [stored[at] for at in kept], [inputs[at] for at in kept]
                waited = [waited[at] for at in kept]
            entries = [entry_wire.entry_of(entry, apart) for entry, apart in zip(stored, inputs, strict=True)]
        except wire.UNREADABLE as exc:
            unreadable = f"an entry cannot be read: {wire.reason(exc)}"
        lease = Lease(
            fence=int(fence) * SHARDS + self.shard,
            slot=slot,
            entries=tuple(entries),
            reason=reason.decode(),
            granted_at=left_at,
            expires_at=ends,
            time_left=time_left,
            attempt=int(attempt),
        )
        return Granted(lease, waited, unreadable)

    async def _inputs(self, fence: int, stored: Sequence[entry_wire.StoredEntry]) -> Sequence[entry_wire.Apart | None]:
        """Read the inputs of entries that are stored apart, with None for other entries. Renew the lease meanwhile."""
        reading = asyncio.ensure_future(asyncio.gather(*(self._values.input_of(self._key, entry) for entry in stored)))
        # If `extend` fails first, nobody retrieves this exception.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait({reading}, timeout=self._lease_seconds / 3))[0]:
                await self.extend(fence)
            return await reading
        finally:
            reading.cancel()


def _refusal(entry: Entry, why: int, detail: bytes) -> Failure:
    if why >= RefusalCode.OVER:
        return failures.over(Over(entry.limits[why - RefusalCode.OVER], float(detail)))
    return wire.refusal(why, 0.0, detail) if why == RefusalCode.CULPRIT else wire.refusal(why, float(detail))
