"""The Redis broker counts and shares as the in-process one does: both get the same random trace and do the same.

Compared after each step: which entries are admitted and what others are told, what is owed, which entries ride, the
state of each, and what is kept of tasks; at the end, what every gateway has heard and which letters are dead.
`tests.core.test_dedup_model` and the state machines of the laws check the in-process broker itself.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from headway.brokers.memory.broker import LEASE_SECONDS, MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.core.dedup import follower
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.model import (
    BatchFailure,
    Cause,
    DeadLetter,
    DedupKey,
    DedupKind,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    ModelReport,
    QueueName,
    Reply,
    TierDepth,
)
from headway.ports import Broker
from headway.runtime.counters import BrokerCounts
from tests.contracts.brokers import AT_ONCE, ask, beat, ids, linked, several, slot
from tests.servers.redis import RunningServer, SharedServers
from tests.virtual_time import Clock

LIMITS = QueueLimits(tiers=3, max_batch=4, reserved_share=0.2, max_queue=12, shed_at=(5, 8))
KEPT = KeptLimits.of(40_000, 24_000)
"""Room for some 15 outcomes: tenants lose some to their own limit, and some to everybody's."""
STEPS = 150
SEEDS = (10, 11, 12, 13, 14, 16)
"""Not 15: there two queues keep something at the same instant, which is then lost in either order."""
GATEWAYS = ("g1", "g2")
BAD = (ItemResult(None, "no"), ItemResult(None, "no", True))
RATES = (
    Limit("key:a", "key", 60.0, 3.0),
    Limit("user:a", "user", 30.0, 8.0),
    Limit("tier:1", "tier", 120.0, 6.0),
    Limit("key:a:m", "model", 60.0, 4.0, "m"),
)
QUEUES = ("m", "m", "m", "m@3", "other")
WORKERS = ("gpu-0", "gpu-1")
"""They go silent now and then, the second more often."""
KEEP = (0.0, 40.0, 90.0)
"""Seconds of the trace. The server also expires what it keeps in real time, but no trace takes that long."""


class Pair:
    """One broker on the server, seen by two processes, and one here, driven in the same way."""

    def __init__(self, seed: int, server: RunningServer, links: Sequence[RedisConnection], now: Any) -> None:
        models = {"m": LIMITS, "other": LIMITS}
        self.server = server
        self.rng = random.Random(seed)
        self.there = [
            RedisBroker(link, models, BrokerCounts(), lambda: 0.5, lease_seconds=LEASE_SECONDS, kept=KEPT)
            for link in links
        ]
        self.letters = DeadLetterBox()
        self.here = MemoryBroker(models, self.letters, BrokerCounts(), now, lambda: 0.5, KEPT)
        known: list[RedisBroker | MemoryBroker] = [*self.there, self.here]
        for broker in known:  # As every process does when it hears of a worker of the version.
            broker._queues.has(QueueName("m", "3"))
        self.letters_there = RedisDeadLetters(links[0], self.there[0].queue_names)
        self.asked: list[Entry] = []
        self.cursors = dict.fromkeys(GATEWAYS, (0, 0))
        self.running: list[tuple[RedisBroker, Lease, Lease]] = []
        self.codes = dict.fromkeys(WORKERS, "old")

    def either(self) -> RedisBroker:
        return self.rng.choice(self.there)

    def asked_of(self, queue: str) -> list[Entry]:
        """Entries for a queue that were offered. Another test covers what several queues share."""
        return [one for one in self.asked if str(one.queue) == queue]

    def dedup_keys(self, id: str, queue: str) -> tuple[DedupKey, ...]:
        rng, asked = self.rng, self.asked_of(queue)
        if asked and rng.random() < 0.1:
            return (DedupKey(DedupKind.TASK, rng.choice(asked).id),)
        found = []
        if rng.random() < 0.4:
            found.append(DedupKey(DedupKind.TASK, id, rng.choice((b"x", b"y")), rng.choice(KEEP)))
        if rng.random() < 0.5:
            digest = b"x" if rng.random() < 0.1 else b""
            found.append(DedupKey(DedupKind.KEY, rng.choice("kl") + queue, digest, rng.choice(KEEP)))
        if rng.random() < 0.5:
            renews = rng.random() < 0.15
            joins = not renews and rng.random() < 0.8
            found.append(DedupKey(DedupKind.SAME, rng.choice("st") + queue, b"", rng.choice(KEEP), joins, renews))
        return tuple(found)

    def entry(self, gateway: str, model: str) -> Entry:
        rng = self.rng
        asked = self.asked_of(model)
        old = rng.choice(asked) if asked and rng.random() < 0.1 else None
        new = ask(
            tier=rng.randrange(3),
            tenant=rng.choice("aab"),
            gateway=gateway,
            model=model,
            queue_timeout=rng.choice((0.02, 2.0, 60.0)),
            timeout=rng.choice((0.05, 5.0, 120.0)),
            id=None if old is None else old.id,
            limits=tuple(limit for limit in RATES if rng.random() < 0.2),
            input=rng.choice(("venom", "poison", None, None)),
            caller=rng.choice(("one", "two", "")),
        )
        again = {"nonce": rng.randrange(3), "digest": rng.choice((b"", b"", b"x", b"y"))}
        found = replace(new, dedup_keys=self.dedup_keys(new.id, model), **again)
        self.asked.append(found)
        return found

    async def enqueue(self) -> None:
        gateway, model = self.rng.choice(GATEWAYS), self.rng.choice(QUEUES)
        if self.rng.random() < 0.15:
            limits = [limit for limit in RATES if self.rng.random() < 0.3]
            entries = several(self.rng.choice((2, 3, 7)), *limits, gateway=gateway, model=model, tenant="a")
            self.asked += entries
        else:
            entries = [self.entry(gateway, model) for _ in range(self.rng.choice((1, 1, 2, 5)))]
        broker = self.either()
        there, here = await broker.enqueue(entries), await self.here.enqueue(entries)
        assert [_told(verdict) for verdict in there] == [_told(verdict) for verdict in here]
        for limit in {limit for entry in entries for limit in entry.limits}:
            assert broker.rate_limit_debt(limit) == pytest.approx(self.here.rate_limit_debt(limit), abs=1e-6)

    async def follow(self) -> None:
        if self.asked:
            chosen, number = self.rng.choice(self.asked), next(_numbers)
            model, timeout = self.rng.choice((chosen.model, "")), self.rng.choice((0.5, 60.0))
            poll = follower(
                f"poll {number}", chosen.id, chosen.tenant, self.rng.choice(GATEWAYS), timeout, number, model
            )
            there, here = await self.either().enqueue([poll]), await self.here.enqueue([poll])
            assert list(map(_told, there)) == list(map(_told, here))

    async def claim(self) -> None:
        size = self.rng.choice((1, 2, 4))
        worker = self.either()
        place = slot(self.rng.choice(WORKERS), self.rng.choice(QUEUES), size)
        place = replace(place, runs=ModelReport(place.version, self.codes[place.worker]))
        there, here = await worker.claim(place, AT_ONCE), await self.here.claim(place, AT_ONCE)
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
                rng.choice((ItemResult(f"out of {entry.input!s}" + "!" * rng.choice((0, 2000, 5000, 7000))),) * 3 + BAD)
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

    async def read(self) -> None:
        for gateway, (after_there, after_here) in self.cursors.items():
            (there, after_there), (here, after_here) = await asyncio.gather(
                heard(self.there[0], gateway, after_there), heard(self.here, gateway, after_here)
            )
            assert [(_seen(one), one.nonce) for one in there] == [(_seen(one), one.nonce) for one in here]
            self.cursors[gateway] = after_there, after_here

    async def reap(self) -> None:
        self.there[0]._reaping._due_at.clear()  # Otherwise it wouldn't reap twice in an instant.
        await self.there[0].reap()
        await self.here.reap()

    async def compare(self) -> None:
        there, here = await self.there[0].depths(), await self.here.depths()
        assert sorted(map(_depth, there)) == sorted(map(_depth, here))
        broker = self.either()
        for entry in self.rng.sample(self.asked, min(3, len(self.asked))):
            assert await broker.state(entry.tenant, entry.id) == await self.here.state(entry.tenant, entry.id)
            recalled = await broker.outcome(entry.tenant, entry.id), await self.here.outcome(entry.tenant, entry.id)
            assert _seen(recalled[0]) == _seen(recalled[1])


_numbers = itertools.count(1000)


def _depth(one: TierDepth) -> tuple[str, str, int, int]:
    return one.model, one.version, one.tier, one.depth


def _letter(one: DeadLetter) -> tuple[object, ...]:
    return one.entry.tenant, one.entry.id, one.entry.nonce, one.error, one.cause, one.attempts, one.worker, one.version


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
    who = found.id, found.tenant, found.output, failure, size
    return (*who, round(found.queued, 3), found.attempts, found.shared, found.kept)


async def heard(broker: Broker, gateway: str, after: int) -> tuple[list[Reply], int]:
    """All replies after a cursor, and the next cursor, which acknowledges them."""
    found = list[Reply]()
    while True:  # Each queue has its own replies.
        reading = asyncio.ensure_future(broker.replies(gateway, after))
        await asyncio.sleep(1.1)
        if not reading.done():
            reading.cancel()
            return sorted(found, key=lambda reply: (reply.id, reply.tenant, reply.nonce)), after
        replies, after = await reading
        found += replies


async def trace(pair: Pair) -> None:
    rng = pair.rng
    first, second = WORKERS
    steps = (pair.enqueue, pair.enqueue, pair.enqueue, pair.claim, pair.end, pair.reap)
    leave = (pair.withdraw, pair.withdraw, pair.cancel_task, pair.follow)
    for step in range(STEPS):
        if rng.random() < 0.1:
            pair.codes[rng.choice(WORKERS)] = rng.choice(("old", "new", "newer"))
        for name in rng.choice(((first, second),) * 5 + ((first,), ())):
            runs = ModelReport("", pair.codes[name])
            for broker in (pair.there[0], pair.here):
                await beat(broker, name, runs=runs)
        await rng.choice((*steps, *leave))()
        if step % 3 == 0:
            await pair.compare()
        if step % 40 == 39:
            await pair.reap()
            await pair.read()
            await pair.compare()
        if step % 10 == 0:
            assert min(pair.server.ends().values()) > 0, "something stays for ever"
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.5, 3.0)))
    for _ in range(3):  # Everything unanswered expires.
        await asyncio.sleep(70.0)
        await pair.reap()
    await pair.read()
    letters = [sorted(map(_letter, await box.list())) for box in (pair.letters_there, pair.letters)]
    assert letters[0] == letters[1]


@pytest.mark.usefixtures("all_written")
@pytest.mark.parametrize(("seed", "kind"), [*((seed, "valkey") for seed in SEEDS), (0, "redis")])
def test_a_random_trace_is_counted_and_shared_the_same(seed: int, kind: str, servers: SharedServers) -> None:
    server = servers.of(kind)

    async def main(first: RedisConnection, second: RedisConnection, now: Clock) -> None:
        pair = Pair(seed, server, (first, second), now)
        try:
            await trace(pair)
        finally:
            for broker in pair.there:
                await broker.close()

    linked(server, 2, main)
