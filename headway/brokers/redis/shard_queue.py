"""One queue in the server: a model's, or one shard of it. Each method is one call of the library."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.brokers.redis import wire
from headway.brokers.redis.codes import QueueSettings, RefusalCode, Standing
from headway.brokers.redis.completion import Outcomes
from headway.brokers.redis.connection import OutOfMemory, RedisConnection
from headway.brokers.redis.function_library import RULE_AGE
from headway.brokers.redis.rate_limit_cache import RateLimitCache
from headway.brokers.redis.wakeups import Wakeups
from headway.core import failures
from headway.core.departure import Load, Policy
from headway.core.queue_limits import QueueLimits
from headway.core.ratelimit import Over
from headway.core.retention import KeptLimits
from headway.errors import BrokerUnavailable
from headway.model import (
    BatchFailure,
    Completion,
    Entry,
    EntryState,
    Failure,
    Lease,
    Limit,
    NoWork,
    Reply,
    Slot,
    WorkerInfo,
    WorkerStatus,
)

SHARDS = 256
"""Most shards of a model. A fence is the queue's own times this, plus the shard."""
READ_DELAY = 0.05
"""Longest time in seconds before the server hears what was read. Mostly the next enqueue tells it."""
MOST_ENTRIES = 256
"""Most entries in one call, since a step must not keep the server from others."""
TRIES = 4
"""Most times in a row that a claim may be asked for a newer rule."""

_NOTHING_READ = ("", "", 0)
_STATES = {Standing.AT_END: None, Standing.WAITING: EntryState.QUEUED, Standing.RUNNING: EntryState.PROCESSING}


@dataclass(slots=True)
class Receipt:
    """Position up to which a gateway has read its stream, and the names of the submissions that were replied to."""

    gateway: str
    last: bytes
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Granted:
    """Lease from the server, with the seconds that each entry has waited."""

    lease: Lease
    waited: Sequence[float]
    unreadable: str = ""


@dataclass(slots=True)
class Look:
    """Load of a queue, and by tier its depth and the seconds that its oldest entry has waited."""

    load: Load
    tiers: list[tuple[int, float]]


class Queue:
    """One queue in the server.

    Arguments:
        connection: connection to the server.
        name: name of the queue, which is that of the model unless it is for one version.
        shard: number of the shard.
        limits: bounds of the queue.
        lease_seconds: seconds for which a lease lasts.
        kept: returns the budgets of kept outcomes.

    Attributes:
        born: instant at which the server's state of this queue began; another one after it was lost. 0: not known yet.
        losses: number of times that it was lost.
        headway: seconds between departures, below 0 when the policy does not space them.
        in_use: shards that the model's load is spread over now.
        limits: bounds of the queue.
    """

    def __init__(
        self,
        connection: RedisConnection,
        name: str,
        shard: int,
        limits: QueueLimits,
        lease_seconds: float,
        kept: Callable[[], KeptLimits],
    ) -> None:
        self.connection = connection
        self.name = name
        self.shard = shard
        self.born = 0.0
        self.losses = 0
        self.headway = -1.0
        self._key = f"{connection.prefix}:{{{name}:{shard}}}:"
        self.in_use = 1
        self.limits = limits
        self._lease_seconds = lease_seconds
        self._kept_limits = kept
        self._settings: tuple[tuple[int, KeptLimits, QueueLimits] | None, str] = None, ""
        self._counts_key = f"{self._key}w" if connection.clustered else f"{connection.prefix}:{{limits}}:w"
        self._rate_limit_cache = RateLimitCache()
        self._offset = 0.0
        self._load: tuple[float, Load] | None = None
        self._receipts: dict[str, Receipt] = {}
        self._telling: asyncio.Task[None] | None = None
        self.wakeups = Wakeups(connection, f"{self._key}b:{connection.process}", self.now, self._learn)

    def now(self) -> float:
        """Instant on the server's clock, as far as it is known."""
        return asyncio.get_running_loop().time() + self._offset

    def stream_of(self, gateway: str) -> str:
        """Key of the stream of a gateway's replies."""
        return f"{self._key}r:{gateway}"

    async def close(self) -> None:
        """Stop listening. The server is told what was read, if it can be."""
        await self.wakeups.close()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        with contextlib.suppress(BrokerUnavailable):
            while self._receipts:
                await self._acknowledge(self._receipts.popitem()[1])

    @property
    def counts(self) -> int:
        """Number of counts that a limit that spans tenants is spread over."""
        return self.in_use if self.connection.clustered else 1

    async def enqueue(self, entries: Sequence[Entry]) -> list[Failure | None]:
        """Offer entries. Returns the verdicts in order, None for an admitted one."""
        verdicts_: list[Failure | None] = []
        for start in range(0, len(entries), MOST_ENTRIES):
            verdicts_ += await self._enqueue_part(entries[start : start + MOST_ENTRIES])
        return verdicts_

    def rate_limit_debt(self, limit: Limit) -> float:
        """Seconds owed to a limit, as far as this process knows."""
        return self._rate_limit_cache.seconds(limit.id, asyncio.get_running_loop().time())

    async def _enqueue_part(self, entries: Sequence[Entry]) -> list[Failure | None]:
        receipt = self._receipts.pop(entries[0].gateway, None)
        read = _NOTHING_READ if receipt is None else (receipt.gateway, receipt.last, len(receipt.names), *receipt.names)
        arguments: list[object] = [*read, wire.pack_extras(entries, self.counts)]
        for entry in entries:
            arguments += (wire.pack_head(entry), wire.pack_entry(entry))
        began = asyncio.get_running_loop().time()
        try:
            answer = await self._enqueue(arguments)
        except BrokerUnavailable:
            self._keep(receipt)
            raise
        told, refused, owed = answer
        now, born, self.headway = wire.read_numbers(told)
        self._heed(now, born)
        if owed:
            self._rate_limit_cache.learn(wire.limits_of(entries), wire.read_numbers(owed), began)
        result: list[Failure | None] = [None] * len(entries)
        for position, wait, why in zip(refused[::3], refused[1::3], refused[2::3], strict=True):
            result[position] = _refusal(entries[position], why, float(wait))
        return result

    async def _enqueue(self, arguments: Sequence[object]) -> Any:
        if not await self.connection.is_scarce():
            try:
                return await self._call("enqueue", *arguments)
            except OutOfMemory:  # Nothing was done. What is known already must not be refused.
                pass
        return await self._call("enqueue_known", *arguments)

    async def claim(self, slot: Slot, policy: Policy, token: str, guest: bool) -> Granted | NoWork:
        """Claim the batch that leaves now, or learn when to claim again.

        Arguments:
            slot: the slot that claims.
            policy: policy that decides when the batch leaves.
            token: name of the claim, the same when it is repeated.
            guest: whether the slot is at home elsewhere.
        """
        self.wakeups.forget(slot.worker)
        name = f"{self.connection.process}\0{slot.worker}"
        self.wakeups.start()
        loop, took = asyncio.get_running_loop(), 0.0
        for _ in range(TRIES):
            began = loop.time()
            rule = self._rule(policy, took)
            answer = await self.connection.claim(
                "claim", self._key, *self._head(), name, slot.max_batch, token, int(guest), rule
            )
            if answer[0] == b"lease":
                return self._granted(slot, answer)
            self._learn(answer[-1])
            took = loop.time() - began
            if answer[0] == b"wait":
                [until] = wire.read_numbers(answer[1])
                return NoWork(None if math.isinf(until) else until)
        return NoWork(self.now() + RULE_AGE)

    async def deliver(self, fence: int, outcomes: Outcomes) -> int | None:
        """Answer some entries of a lease ahead of its completion.

        Returns how many were answered, None when the lease was no longer valid.
        """
        answer = await self._call("deliver", fence, wire.encode(list(outcomes.positions)), *self._arguments(outcomes))
        return int(answer[0]) if answer else None

    async def complete(self, fence: int, outcomes: Outcomes) -> Completion:
        """End a lease with outputs: those of all entries that have not been answered."""
        answer = await self._call("complete", fence, *self._arguments(outcomes))
        if not answer:
            return Completion(0, 0, fenced=True)
        answered, departed, load = answer
        self._learn(load)
        return Completion(answered, departed)

    def _arguments(self, outcomes: Outcomes) -> list[object]:
        arguments: list[object] = [len(outcomes.runs)]
        for gateway, run in outcomes.runs.items():
            arguments += (gateway, run)
        keeps = not outcomes.shared or not self.connection.memory_pressure
        arguments += (len(outcomes.shared), int(keeps), outcomes.head)
        for one in outcomes.shared:
            arguments += one
        for position, failure in outcomes.bad:
            arguments += (position, failure)
        return arguments

    async def release(self, fence: int, failure: BatchFailure | None, rng: tuple[float, float]) -> int | None:
        """End a lease without outputs.

        Returns the number of entries that run again, None when the lease was no longer valid.
        """
        rest = () if failure is None else (wire.pack_failure(failure), *rng)
        answer = await self._call("release", fence, *rest)
        return int(answer[0]) if answer else None

    async def extend(self, fence: int) -> bool:
        """Renew a lease."""
        return bool(await self._call("extend", fence))

    async def withdraw(self, names: Sequence[bytes], gateway: str) -> None:
        """Let go of submissions of a gateway."""
        for start in range(0, len(names), MOST_ENTRIES):
            self._note(await self._call("withdraw", gateway, *names[start : start + MOST_ENTRIES]))

    async def cancel_task(self, key: bytes) -> None:
        """Forget a task."""
        self._note(await self._call("cancel_task", key))

    async def state(self, key: bytes) -> EntryState | None:
        """State of an entry; None when it has its outcome, or is not known."""
        return _STATES[await self._call("stage", key)]

    async def outcome(self, key: bytes) -> Reply | EntryState | None:
        """Outcome of a task, or its state while it has none."""
        standing, *fields = await self._call("recall", key)
        if not fields:
            return _STATES[standing]
        [reply] = wire.read_outcomes(dict(zip(fields[::2], fields[1::2], strict=True)))
        return reply

    async def unlisten(self, worker: str) -> None:
        """Note that a slot no longer waits to be woken."""
        self.wakeups.forget(worker)
        self._note(await self._call("unlisten", f"{self.connection.process}\0{worker}"))

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """Note whether a slot that is at home here is healthy, and what batches took when it started."""
        healthy, runs = int(worker.status is WorkerStatus.HEALTHY), itertools.chain.from_iterable(worker.warm_up)
        self._note(await self._call("beat", worker.worker_id, healthy, worker.share, *runs))

    async def forget(self, worker: str) -> None:
        """Drop a worker that is at home elsewhere from now on."""
        self._note(await self._call("forget", worker))

    async def look(self) -> Look:
        """Load and depths of the queue."""
        instants, load, tiers = await self._call("look")
        instant = self._note(instants)
        waits = [(depth, instant - float(since)) for depth, since in zip(tiers[::2], tiers[1::2], strict=True)]
        return Look(wire.read_load(load)[2], waits)

    async def glance(self) -> tuple[int, int]:
        """Depth of the queue, and number of slots at home."""
        depth, slots = await self._call("glance")
        return depth, slots

    async def reap(self, rng: tuple[float, float], shards: int = 1) -> tuple[float, int]:
        """Reap. Returns the seconds until the next call, and the number of entries of lost leases that run again."""
        told, again = await self._call("reap", self.connection.process, *rng, shards)
        now, born, due = wire.read_numbers(told)
        self._heed(now, born)
        return due, int(again)

    def read(self, receipt: Receipt) -> None:
        """Note what a gateway has read. The server hears of it with the next enqueue, or soon."""
        known = self._receipts.get(receipt.gateway)
        if known is None:
            self._receipts[receipt.gateway] = receipt
        else:
            known.last = receipt.last
            known.names += receipt.names
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        while self._receipts:
            await asyncio.sleep(READ_DELAY)
            for gateway in list(self._receipts):
                receipt = self._receipts.pop(gateway, None)
                if receipt is None:
                    continue
                try:
                    await self._acknowledge(receipt)
                except BrokerUnavailable:
                    self._keep(receipt)

    async def _acknowledge(self, receipt: Receipt) -> None:
        arguments = (receipt.gateway, receipt.last, len(receipt.names), *receipt.names)
        self._note(await self._call("acknowledge", *arguments))

    def _keep(self, receipt: Receipt | None) -> None:
        """Keep a receipt that may not have arrived. It is told again, before those that came since."""
        if receipt is not None:
            later = self._receipts.get(receipt.gateway)
            if later is not None:
                receipt = Receipt(receipt.gateway, later.last, receipt.names + later.names)
            self._receipts[receipt.gateway] = receipt
            if self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell())

    def _head(self) -> tuple[object, ...]:
        key = self.in_use, self._kept_limits(), self.limits
        if self._settings[0] != key:
            self._settings = key, self._packed_settings(*key)
        return self.connection.clock_text(), self._settings[1]

    def _packed_settings(self, in_use: int, kept: KeptLimits, limits: QueueLimits) -> str:
        """Settings of the queue, as the functions take them."""
        last, rest = (-1, -1) if limits.shed_at is None else (max(1, depth // in_use) for depth in limits.shed_at)
        settings = QueueSettings(
            tiers=limits.tiers,
            max_batch=limits.max_batch,
            share=limits.reserved_share,
            max_queue=limits.max_queue,
            max_weight=limits.max_weight,
            unit=limits.unit,
            round_weight=limits.round_weight,
            least_cost=limits.least_cost,
            lease_seconds=self._lease_seconds,
            shed_last=last,
            shed_rest=rest,
            kept=f"{kept.total},{kept.tenant},{kept.largest}",
            limits=self._counts_key,
        )
        return " ".join(map(str, settings))

    async def _call(self, function: str, *arguments: object) -> Any:
        return await self.connection.call(function, self._key, *self._head(), *arguments)

    def _note(self, instants: bytes) -> float:
        """Note the packed instant and birth that a call returned. Returns the instant."""
        now, born = wire.read_numbers(instants)
        self._heed(now, born)
        return now

    def _heed(self, now: float, born: float) -> None:
        """Note the server's clock, and the birth of the queue: another one than before, if what was there is lost."""
        self._offset = now - asyncio.get_running_loop().time()
        if born != self.born:
            if self.born != 0.0:
                self.losses += 1
                self._receipts.clear()
                self._rate_limit_cache = RateLimitCache()
                self.wakeups.wake_all()  # The server no longer knows who listens.
            self.born = born

    def _learn(self, load: bytes) -> None:
        now, born, known = wire.read_load(load)
        self._load = now, known
        self._heed(now, born)

    def _rule(self, policy: Policy, took: float) -> bytes:
        """The rule for the last known load, packed; none when the load is too old.

        `took` is the seconds of the call that told the load: no rule is younger than that, however far away the server
        is.
        """
        if self._load is None:
            return wire.pack_rule(0.0, 0, None)
        stamp, load = self._load
        if self.now() - stamp > RULE_AGE:
            return wire.pack_rule(0.0, 0, None)
        return wire.pack_rule(stamp + took, load.slots, policy.rule(load))

    def _granted(self, slot: Slot, answer: list[Any]) -> Granted:
        _, numbers, reason, arrivals, payloads = answer
        now, fence, left_at, ends, time_left = wire.read_numbers(numbers)
        self._offset = now - asyncio.get_running_loop().time()
        entries: list[Entry] = []
        unreadable = ""
        for payload in payloads:
            try:
                entries.append(wire.read_entry(payload))
            except wire.UNREADABLE as exc:
                unreadable = f"an entry cannot be read: {wire.reason(exc)}"
        waited = [left_at - arrived for arrived in wire.read_numbers(arrivals)]
        lease = Lease(
            fence=int(fence) * SHARDS + self.shard,
            slot=slot,
            entries=tuple(entries),
            reason=reason.decode(),
            granted_at=left_at,
            expires_at=ends,
            time_left=time_left,
        )
        return Granted(lease, waited, unreadable)


def _refusal(entry: Entry, why: int, wait: float) -> Failure:
    if why >= RefusalCode.OVER:
        return failures.over(Over(entry.limits[why - RefusalCode.OVER], wait))
    return wire.refusal(why, wait)
