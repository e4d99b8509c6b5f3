"""The broker over Redis: queues in the server, each atomic step a function there, and the laws kept there.

Entries are dealt out to the shards of their model in turn; a replay goes where the entry went. A slot claims at its home
shard, and now and then looks whether another one is behind and needs help.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import structlog
import uuid_utils

from headway.brokers import verdicts
from headway.brokers.redis import wire
from headway.brokers.redis.line import SHARDS, Granted, Line, Look
from headway.brokers.redis.link import Link
from headway.brokers.redis.mailbox import Mailbox
from headway.brokers.redis.registry import Registry
from headway.core import shards as sharding
from headway.core.departure import Load, Policy
from headway.core.queue import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import (
    BatchFailure,
    Cause,
    Entry,
    Failure,
    Item,
    Lease,
    Reply,
    Settled,
    Slot,
    Stage,
    TierDepth,
    Wait,
    WorkerInfo,
    WorkerStatus,
)
from headway.tally import Tally

log = structlog.get_logger(__name__)

LEAST_GATHER, MOST_GATHER = 0.001, 0.004
"""Seconds for which entries gather: a tenth of the headway, within these."""
MOST_PAUSE = 0.4
"""Most seconds between two looks at other shards: the pause doubles while a slot rests."""
CENSUS_AGE = 1.0
"""Seconds for which the list of workers is good that shards are dealt by."""
PLACES = 100_000
"""Most entries whose shard is remembered."""


class RedisBroker:
    """See `headway.ports.Broker` for the methods and the laws.

    Arguments:
        link: to the server, opened.
        models: what bounds the queue of each model served.
        tally: counts retries.
        dice: uniform in [0, 1).
        shards: queues that each model is split into.
        lease_seconds: how long a lease lasts unless it is extended.
    """

    def __init__(
        self,
        link: Link,
        models: Mapping[str, QueueLimits],
        tally: Tally,
        dice: Callable[[], float],
        shards: int = 1,
        lease_seconds: float = 3.0,
    ) -> None:
        self.lease_seconds = lease_seconds
        self._link = link
        self._link.process = link.process or str(uuid_utils.uuid7())
        self._limits = dict(models)
        self._lines = {
            model: [Line(link, model, shard, limits, lease_seconds) for shard in range(shards)]
            for model, limits in models.items()
        }
        self._every = [line for lines in self._lines.values() for line in lines]
        self._registry = Registry(link)
        self._tally = tally
        self._dice = dice
        self._shards = shards
        self._mailboxes: dict[str, Mailbox] = {}
        self._tokens: dict[str, str] = {}
        self._numbers = itertools.count()
        self._waited: dict[int, Sequence[float]] = {}
        self._turn = int(dice() * 1_000_003)
        self._placed: dict[tuple[str, str], Line] = {}
        self._census: dict[str, list[str]] = {}
        self._census_at = -math.inf
        self._homes: dict[str, Line] = {}
        self._hints: dict[str, Line] = {}
        self._looked_at: dict[str, float] = {}
        self._reap_at: dict[Line, float] = {}

    @property
    def gather(self) -> float:
        """See Broker: a tenth of the headway, between 1 and 4 ms."""
        headway = max((line.headway for line in self._every), default=0.0)
        return min(max(headway / 10, LEAST_GATHER), MOST_GATHER)

    @property
    def epoch(self) -> str:
        """See Broker."""
        return str(sum(line.losses for line in self._every))

    async def close(self) -> None:
        """Stop listening and reading; the link stays open."""
        for box in self._mailboxes.values():
            await box.close()
        for line in self._every:
            await line.close()

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """See Broker."""
        groups: dict[Line, list[int]] = {}
        await self._take_census()
        for place, line in enumerate(self._deal(entries)):
            groups.setdefault(line, []).append(place)
        if len(groups) == 1:
            [line] = groups
            return await line.enqueue(entries)
        answers = await asyncio.gather(
            *(line.enqueue([entries[place] for place in places]) for line, places in groups.items())
        )
        result: list[Failure | None] = [None] * len(entries)
        for places, answer in zip(groups.values(), answers, strict=True):
            for place, verdict in zip(places, answer, strict=True):
                result[place] = verdict
        return result

    async def claim(self, slot: Slot, policy: Policy) -> Lease | Wait:
        """See Broker."""
        home = self._home(slot.worker, slot.model)
        line = self._hints.pop(slot.worker, home)
        claimed = await self._claim_from(line, slot, policy, guest=line is not home)
        if isinstance(claimed, Wait) and line is not home:
            claimed = await self._claim_from(home, slot, policy, guest=False)
        return claimed

    async def listen(self, slot: Slot, until: float | None) -> None:
        """See Broker."""
        home = self._home(slot.worker, slot.model)
        sleeping = asyncio.ensure_future(home.bell.sleep(slot.worker, until))
        helping = asyncio.ensure_future(self._look_around(slot, home)) if self._shards > 1 else None
        try:
            await asyncio.wait({sleeping, helping} if helping else {sleeping}, return_when=asyncio.FIRST_COMPLETED)
            if sleeping.done():
                await sleeping
        except asyncio.CancelledError:
            with contextlib.suppress(BrokerUnavailable):
                await home.unlisten(slot.worker)
            raise
        finally:
            for task in (sleeping, helping):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def complete(self, lease: Lease, items: Sequence[Item]) -> Settled:
        """See Broker."""
        if len(items) != len(lease.entries):
            raise ValueError(f"{len(items)} items for a lease of {len(lease.entries)} entries: one each, in order")
        waited = self._waited.get(lease.fence) or [0.0] * len(items)
        runs: dict[str, list[wire.WireReply]] = {}
        bad: list[tuple[int, bytes]] = []
        for place, (entry, item) in enumerate(zip(lease.entries, items, strict=True)):
            failure = None
            if item.output is None:
                failure = verdicts.item_failure(item)
                bad.append((place, wire.encode(wire.WireFailure("item", item.error or "", lease.slot.worker))))
            reply = wire.WireReply(place, entry.id, entry.tenant, item.output, failure, waited[place])
            runs.setdefault(entry.gateway, []).append(reply)
        packed = {
            gateway: wire.encode(wire.WireRun(wire.SCHEMA, lease.slot.worker, replies))
            for gateway, replies in runs.items()
        }
        line, fence = self._line_of(lease)
        settled = await line.complete(fence, packed, bad)
        self._waited.pop(lease.fence, None)
        return settled

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """See Broker."""
        line, fence = self._line_of(lease)
        again = await line.release(fence, failure, (self._dice(), self._dice()))
        self._waited.pop(lease.fence, None)
        if again and failure is not None:
            self._tally.retries[failure.cause.value] += again
        return again is not None

    async def extend(self, lease: Lease) -> bool:
        """See Broker."""
        line, fence = self._line_of(lease)
        return await line.extend(fence)

    async def cancel(self, tenant_ids: Sequence[tuple[str, str]]) -> None:
        """See Broker."""
        groups: dict[Line, list[bytes]] = {}
        for tenant, id in tenant_ids:
            placed = self._placed.get((tenant, id))
            for line in [placed] if placed is not None else self._every:
                groups.setdefault(line, []).append(wire.key_of(tenant, id))
        await asyncio.gather(*(line.cancel(keys) for line, keys in groups.items()))
        for key in tenant_ids:
            self._placed.pop(key, None)

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        """See Broker."""
        box = self._mailboxes.get(gateway)
        if box is None:
            box = self._mailboxes[gateway] = Mailbox(gateway, self._every)
        replies, cursor = await box.replies(after)
        for reply in replies:
            self._placed.pop((reply.tenant, reply.id), None)
        return replies, cursor

    async def stage(self, tenant: str, id: str) -> Stage | None:
        """See Broker."""
        placed = self._placed.get((tenant, id))
        lines = [placed] if placed is not None else self._every
        stages = await asyncio.gather(*(line.stage(wire.key_of(tenant, id)) for line in lines))
        return next((stage for stage in stages if stage is not None), None)

    async def beat(self, worker: WorkerInfo) -> None:
        """See Broker."""
        if self._shards > 1:
            before = self._homes.get(worker.worker_id)
            await self._take_census()
            home = self._find_home(worker.worker_id, worker.model)
            self._homes[worker.worker_id] = home
            if before is not None and before is not home:
                await before.forget(worker.worker_id)
                before.bell.wake(worker.worker_id)  # It sleeps at its old home, and is needed at the new one.
                await before.unlisten(worker.worker_id)
        home = self._home(worker.worker_id, worker.model)
        await asyncio.gather(home.beat(worker), self._registry.record(worker))

    async def workers(self) -> Sequence[WorkerInfo]:
        """See Broker."""
        return await self._registry.workers()

    async def depths(self) -> Sequence[TierDepth]:
        """See Broker."""
        sums: dict[tuple[str, int], tuple[int, float]] = {}
        for line, look in zip(self._every, await self._look(), strict=True):
            for tier, (depth, waited) in enumerate(look.tiers):
                known, longest = sums.get((line.model, tier), (0, 0.0))
                sums[line.model, tier] = known + depth, max(longest, waited)
        return [TierDepth(model, tier, depth, oldest) for (model, tier), (depth, oldest) in sums.items()]

    async def loads(self) -> Mapping[str, Load]:
        """See Broker. Of several shards: their sums, and the costs of those that have seen most batches."""
        found: dict[str, list[Load]] = {}
        for line, look in zip(self._every, await self._look(), strict=True):
            found.setdefault(line.model, []).append(look.load)
        return {model: _together(loads) for model, loads in found.items()}

    async def reap(self) -> float:
        """See Broker."""
        now = asyncio.get_running_loop().time()
        for line in self._every:
            if self._reap_at.get(line, -math.inf) <= now + 1e-6:
                due, again = await line.reap((self._dice(), self._dice()))
                self._reap_at[line] = asyncio.get_running_loop().time() + due
                if again:
                    self._tally.retries[Cause.LEASE_LOST.value] += again
        return max(min(self._reap_at.values()) - asyncio.get_running_loop().time(), 0.001)

    async def _claim_from(self, line: Line, slot: Slot, policy: Policy, guest: bool) -> Lease | Wait:
        token = self._tokens.setdefault(slot.worker, f"{self._link.process}:{next(self._numbers)}")
        claimed = await line.claim(slot, policy, token, guest)
        del self._tokens[slot.worker]  # After an error it is kept: the claim that is repeated gets the same lease.
        if isinstance(claimed, Wait):
            return claimed
        self._waited[claimed.lease.fence] = claimed.waited
        if claimed.unreadable:
            return await self._refuse_batch(claimed)
        return claimed.lease

    async def _refuse_batch(self, claimed: Granted) -> Wait:
        """A batch with an entry that this release cannot read: the retry plan finds who can, or who it is."""
        worker = claimed.lease.slot.worker
        log.error("a batch cannot be read", worker=worker, error=claimed.unreadable)
        await self.release(claimed.lease, BatchFailure(Cause.BAD_OUTPUT, claimed.unreadable, worker))
        return Wait(claimed.lease.granted_at)

    async def _look_around(self, slot: Slot, home: Line) -> None:
        """Return when another shard is behind, and remember it for the next claim."""
        loop = asyncio.get_running_loop()
        others = [line for line in self._lines[slot.model] if line is not home]
        start, pause = int(self._dice() * len(others)), sharding.LOOK_EVERY
        for turn in itertools.count(start):
            # At high load rests are short, so the first look of a rest must not wait for long.
            await asyncio.sleep(max(self._looked_at.get(slot.worker, -math.inf) + pause - loop.time(), 0.0))
            self._looked_at[slot.worker] = loop.time()
            pause = min(2 * pause, MOST_PAUSE) if turn > start else pause
            line = others[turn % len(others)]
            with contextlib.suppress(BrokerUnavailable):
                depth, slots = await line.glance()
                if sharding.behind(depth, slots, slot.max_batch):
                    self._hints[slot.worker] = line
                    return

    async def _look(self) -> list[Look]:
        return list(await asyncio.gather(*(line.look() for line in self._every)))

    def _line_of(self, lease: Lease) -> tuple[Line, int]:
        fence, shard = divmod(lease.fence, SHARDS)
        return self._lines[lease.slot.model][shard], fence

    def _home(self, worker: str, model: str) -> Line:
        if self._shards == 1:
            return self._lines[model][0]
        return self._homes.get(worker) or self._find_home(worker, model)

    def _find_home(self, worker: str, model: str) -> Line:
        alive = self._census.get(model, [])
        return self._lines[model][sharding.home(worker, alive, sharding.active(self._shards, len(alive)))]

    def _deal(self, entries: Sequence[Entry]) -> list[Line]:
        """The queue of each entry: where it went before, or the next shard's turn, a part of a batch at a time."""
        if self._shards == 1:
            return [self._lines[entry.model][0] for entry in entries]
        counts = Counter(entry.model for entry in entries)
        parts = {model: sharding.parts(count, self._limits[model].max_batch) for model, count in counts.items()}
        dealt = []
        for place, entry in enumerate(entries):
            key = (entry.tenant, entry.id)
            line = self._placed.get(key)
            if line is None:
                slots = len(self._census.get(entry.model, []))
                turn = self._turn + place % parts[entry.model]
                shard = sharding.in_turn(turn, slots, sharding.active(self._shards, slots))
                line = self._placed[key] = self._lines[entry.model][shard]
                if len(self._placed) > PLACES:
                    del self._placed[next(iter(self._placed))]
            dealt.append(line)
        self._turn += max(parts.values(), default=0)
        return dealt

    async def _take_census(self) -> None:
        """Who is healthy, from time to time: homes and turns go by it."""
        now = asyncio.get_running_loop().time()
        if self._shards == 1 or now - self._census_at < CENSUS_AGE:
            return
        self._census_at = now
        census: dict[str, list[str]] = {}
        for worker in await self.workers():
            if worker.status is WorkerStatus.HEALTHY:
                census.setdefault(worker.model, []).append(worker.worker_id)
        self._census = census


def _together(loads: Sequence[Load]) -> Load:
    known = max(loads, key=lambda load: load.departures)
    return Load(
        rate=sum(load.rate for load in loads),
        alpha=known.alpha,
        beta=known.beta,
        slots=sum(load.slots for load in loads),
        max_batch=known.max_batch,
        depth=sum(load.depth for load in loads),
        utilisation=known.utilisation,
        wait=max(load.wait for load in loads),
        departures=sum(load.departures for load in loads),
        deviation=known.deviation,
    )
