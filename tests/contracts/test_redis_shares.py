"""The broker over Redis counts and shares as the one in the process does: the same random trace, run through both, comes
out the same.

What is compared after each step: who is admitted and what others are told, what is owed, which entries ride, where each
stands, what is kept of tasks, and in the end what every gateway has heard.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from headway.brokers.memory.broker import LEASE_SECONDS, MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.model import (
    BatchFailure,
    Cause,
    DedupKey,
    DedupKind,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    Reply,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker
from headway.runtime.counters import Counters
from tests.contracts.brokers import AT_ONCE, ask, ids, slot
from tests.servers.redis import RunningServer, SharedServers
from tests.virtual_time import ServedLoop

LIMITS = QueueLimits(tiers=3, max_batch=4, reserved_share=0.2, max_queue=12, shed_at=(5, 8))
KEPT = KeptLimits.of(40_000, 24_000)
"""Budgets of some 15 outcomes, with which tenants lose some to themselves and to all."""
STEPS = 150
SEEDS = range(10)
GATEWAYS = ("g1", "g2")
BAD = (ItemResult(None, "no"), ItemResult(None, "no", True))
RATES = (
    Limit("key:a", "key", 60.0, 3.0),
    Limit("user:a", "user", 30.0, 8.0),
    Limit("tier:1", "tier", 120.0, 6.0),
)
WORKERS = ("gpu-0", "gpu-1")
"""They are silent now and then, the second more often."""
KEEP = (0.0, 40.0, 90.0)
"""Seconds of the trace. What the server keeps ends in real time, too, but no trace takes as long."""


class Pair:
    """One broker over the server, which two processes see, and one here, driven alike."""

    def __init__(self, seed: int, server: RunningServer, links: list[RedisConnection], now: Any) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.there = [
            RedisBroker(link, {"m": LIMITS}, Counters(), lambda: 0.5, lease_seconds=LEASE_SECONDS, kept=KEPT)
            for link in links
        ]
        self.here = MemoryBroker({"m": LIMITS}, DeadLetterBox(), Counters(), now, lambda: 0.5, KEPT)
        self.asked: list[Entry] = []
        self.running: list[tuple[RedisBroker, Lease, Lease]] = []

    def either(self) -> RedisBroker:
        return self.rng.choice(self.there)

    def dedup_keys(self, id: str) -> tuple[DedupKey, ...]:
        rng = self.rng
        if self.asked and rng.random() < 0.1:
            return (DedupKey(DedupKind.TASK, rng.choice(self.asked).id),)
        found = []
        if rng.random() < 0.4:
            found.append(DedupKey(DedupKind.TASK, id, rng.choice((b"x", b"y")), rng.choice(KEEP)))
        if rng.random() < 0.5:
            digest = b"x" if rng.random() < 0.1 else b""
            found.append(DedupKey(DedupKind.KEY, rng.choice("kl"), digest, rng.choice(KEEP)))
        if rng.random() < 0.5:
            found.append(DedupKey(DedupKind.SAME, rng.choice("st"), b"", rng.choice(KEEP), rng.random() < 0.8))
        return tuple(found)

    def entry(self, gateway: str) -> Entry:
        rng = self.rng
        old = rng.choice(self.asked) if self.asked and rng.random() < 0.1 else None
        new = ask(
            tier=rng.randrange(3),
            tenant=rng.choice("aab"),
            gateway=gateway,
            queue_timeout=rng.choice((0.02, 2.0, 60.0)),
            timeout=rng.choice((0.05, 5.0, 120.0)),
            id=None if old is None else old.id,
            limits=tuple(limit for limit in RATES if rng.random() < 0.2),
            input=rng.choice(("venom", "poison", None, None)),
            caller=rng.choice(("one", "two", "")),
        )
        again = {"nonce": rng.randrange(3), "digest": rng.choice((b"", b"", b"x", b"y"))}
        found = Entry(**{**_fields(new), "dedup_keys": self.dedup_keys(new.id), **again})
        self.asked.append(found)
        return found

    async def enqueue(self) -> None:
        gateway = self.rng.choice(GATEWAYS)
        entries = [self.entry(gateway) for _ in range(self.rng.choice((1, 1, 2, 5)))]
        broker = self.either()
        there, here = await broker.enqueue(entries), await self.here.enqueue(entries)
        assert [_told(verdict) for verdict in there] == [_told(verdict) for verdict in here]
        for limit in {limit for entry in entries for limit in entry.limits}:
            assert broker.rate_limit_debt(limit) == pytest.approx(self.here.rate_limit_debt(limit), abs=1e-6)

    async def claim(self) -> None:
        size = self.rng.choice((1, 2, 4))
        worker = self.either()
        name = self.rng.choice(WORKERS)
        there = await worker.claim(slot(name, "m", size), AT_ONCE)
        here = await self.here.claim(slot(name, "m", size), AT_ONCE)
        assert isinstance(there, Lease) == isinstance(here, Lease)
        if isinstance(there, Lease) and isinstance(here, Lease):
            assert ids(there.entries) == ids(here.entries)
            assert [entry.dedup_keys for entry in there.entries] == [entry.dedup_keys for entry in here.entries]
            self.running.append((worker, there, here))

    async def end(self) -> None:
        if not self.running:
            return
        rng = self.rng
        worker, there, here = self.running.pop(rng.randrange(len(self.running)))
        how = rng.choice(("complete", "complete", "complete", "fail", "hand back"))
        if how == "complete":
            items = [
                rng.choice((ItemResult(f"out of {entry.input!s}" + "!" * rng.choice((0, 2000, 5000))),) * 3 + BAD)
                for entry in here.entries
            ]
            assert await worker.complete(there, items) == await self.here.complete(here, items)
        elif how == "fail":
            failure = BatchFailure(rng.choice(tuple(Cause)), "it broke", here.slot.worker)
            assert await worker.release(there, failure) == await self.here.release(here, failure)
        else:
            assert await worker.release(there) == await self.here.release(here)

    async def withdraw(self) -> None:
        if self.asked:
            chosen = self.rng.choices(self.asked, k=self.rng.choice((1, 1, 3)))
            submissions = [entry.submission for entry in chosen]
            gateway = self.rng.choice((chosen[0].gateway, *GATEWAYS))
            await self.either().withdraw(submissions, gateway)
            await self.here.withdraw(submissions, gateway)

    async def cancel_task(self) -> None:
        if self.asked:
            chosen = self.rng.choice(self.asked)
            await self.either().cancel_task(chosen.tenant, chosen.id)
            await self.here.cancel_task(chosen.tenant, chosen.id)

    async def reap(self) -> None:
        self.there[0]._reaping._due_at.clear()  # Or it would not do so twice in an instant.
        await self.there[0].reap()
        await self.here.reap()

    async def compare(self) -> None:
        there, here = await self.there[0].depths(), await self.here.depths()
        assert [(one.tier, one.depth) for one in there] == [(one.tier, one.depth) for one in here]
        broker = self.either()
        for entry in self.rng.sample(self.asked, min(3, len(self.asked))):
            assert await broker.state(entry.tenant, entry.id) == await self.here.state(entry.tenant, entry.id)
            recalled = await broker.outcome(entry.tenant, entry.id), await self.here.outcome(entry.tenant, entry.id)
            assert _seen(recalled[0]) == _seen(recalled[1])


def _fields(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def _told(verdict: Failure | None) -> object:
    if verdict is None:
        return None
    wait = None if verdict.retry_after is None else pytest.approx(verdict.retry_after, abs=1e-6)
    return (verdict.code, verdict.reason, verdict.message, wait)


def _seen(found: Reply | EntryState | None) -> object:
    if not isinstance(found, Reply):
        return found
    failure = None if found.failure is None else (found.failure.code, found.failure.reason, found.failure.message)
    size = None if found.ran is None else (found.ran.worker, found.ran.size)
    return (
        found.id,
        found.tenant,
        found.output,
        failure,
        size,
        round(found.queued, 3),
        found.attempts,
        found.shared,
        found.kept,
    )


async def heard(broker: Broker, gateway: str, loop: ServedLoop) -> list[Reply]:
    reading = asyncio.ensure_future(broker.replies(gateway, 0))
    await loop.settle()
    if not reading.done():
        reading.cancel()
        return []
    replies, _ = await reading
    return sorted(replies, key=lambda reply: (reply.id, reply.tenant, reply.nonce))


async def trace(pair: Pair, loop: ServedLoop) -> None:
    rng = pair.rng
    first, second = (WorkerInfo(worker_id=name, model="m", status=WorkerStatus.HEALTHY) for name in WORKERS)
    steps = (pair.enqueue, pair.enqueue, pair.enqueue, pair.claim, pair.end, pair.reap)
    leave = (pair.withdraw, pair.withdraw, pair.cancel_task)
    for step in range(STEPS):
        for worker in rng.choice(((first, second),) * 5 + ((first,), ())):
            await pair.there[0].heartbeat(worker)
            await pair.here.heartbeat(worker)
        await rng.choice((*steps, *leave))()
        await pair.compare()
        if step % 10 == 0:
            assert min(pair.server.ends().values()) > 0, "something stays for ever"
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.5, 3.0)))
    for gateway in GATEWAYS:
        there = [(_seen(reply), reply.nonce) for reply in await heard(pair.either(), gateway, loop)]
        here = [(_seen(reply), reply.nonce) for reply in await heard(pair.here, gateway, loop)]
        assert there == here


@pytest.mark.usefixtures("all_written")
@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_trace_is_counted_and_shared_the_same(seed: int, kind: str, servers: SharedServers) -> None:
    server = servers.of(kind)
    with asyncio.Runner(loop_factory=lambda: ServedLoop(server.url)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ServedLoop)
        links = [RedisConnection(server.url, timeout=math.inf, clock=loop.time) for _ in range(2)]

        async def main() -> None:
            for link in links:
                await link.open()
            pair = Pair(seed, server, links, loop.time)
            try:
                await trace(pair, loop)
            finally:
                for broker in pair.there:
                    await broker.close()
                for link in links:
                    await link.close()

        runner.run(main())
