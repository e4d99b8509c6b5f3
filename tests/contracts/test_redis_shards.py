"""A queue in several shards: slots come and go, and everything that was let in has its one outcome all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from headway.core.departure import Rule
from headway.model import Cause, Entry, ItemResult, NoWork, Reply, Slot, WorkerInfo, WorkerStatus
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Fixed, RedisHarness, ask, failed, output, slot, story
from tests.contracts.dedup_keys import key, sharing
from tests.servers.redis import KINDS, SharedServers

SHARDS = 4
WORKERS = tuple(f"gpu-{number}" for number in range(12))
WINDOW = 0.05
POLICY = Fixed(Rule(size=MAX_BATCH, window=WINDOW, rate=1e6))


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[RedisHarness]:
    made = RedisHarness(servers.of(request.param), SHARDS)
    yield made
    made.close()


class Play:
    """Workers on two hosts, a gateway on each, and all that was asked and answered.

    Attributes:
        asked: entries that were let in, by id.
        replies: by id.
        disturbed: ids of those whose batch has failed or was given back.
    """

    def __init__(self, harness: RedisHarness, seed: int) -> None:
        self.harness = harness
        self.hosts: list[Broker] = [harness.broker, harness.peer()]
        self.rng = random.Random(seed)
        self.asked: dict[str, Entry] = {}
        self.replies: dict[str, Reply] = {}
        self.disturbed: set[str] = set()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._beating: dict[str, asyncio.Task[None]] = {}
        self._others = [
            asyncio.create_task(act(number)) for number in range(len(self.hosts)) for act in (self._reap, self._read)
        ]

    def start(self, *workers: str) -> None:
        for worker in workers:
            host = self.hosts[WORKERS.index(worker) % 2]
            self._beating[worker] = asyncio.create_task(self._beat(worker, host))
            self._working[worker] = asyncio.create_task(self._work(worker, host))

    async def kill(self, *workers: str) -> None:
        """Silence workers, whatever they do."""
        gone = [tasks.pop(worker) for worker in workers for tasks in (self._working, self._beating)]
        await ended(gone)

    async def ask(self, count: int) -> None:
        host = self.rng.randrange(2)
        entries = [ask(gateway=f"g-{host}", tenant=self.rng.choice("ab")) for _ in range(count)]
        verdicts = await self.hosts[host].enqueue(entries)
        self.asked |= {entry.id: entry for entry, verdict in zip(entries, verdicts, strict=True) if verdict is None}

    async def close(self) -> None:
        """Check that every entry has been answered, once and rightly, and nothing is left."""
        assert set(self.replies) == set(self.asked)
        for id, reply in self.replies.items():
            assert reply.output == output(self.asked[id].input)
        assert not any(one.depth for one in await self.hosts[0].depths())
        await self.kill(*self._working)
        await ended(self._others)

    async def _beat(self, worker: str, host: Broker) -> None:
        while True:
            await host.heartbeat(WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY))
            await self.harness.advance(1.0)

    async def _work(self, worker: str, host: Broker) -> None:
        while True:
            claimed = await host.claim(slot(worker), POLICY)
            if isinstance(claimed, NoWork):
                await host.wait_for_work(slot(worker), claimed.until)
                continue
            await self.harness.advance(0.02)
            if self.rng.random() < 0.05:
                self.disturbed |= {rider.id for rider in claimed.entries}
                await host.release(claimed, failed(Cause.CRASHED, worker) if self.rng.random() < 0.5 else None)
            else:
                await host.complete(claimed, [ItemResult(output(rider.input)) for rider in claimed.entries])

    async def _reap(self, number: int) -> None:
        while True:
            await self.harness.advance(await self.hosts[number].reap())

    async def _read(self, number: int) -> None:
        cursor = 0
        while True:
            replies, cursor = await self.hosts[number].replies(f"g-{number}", cursor)
            for reply in replies:
                assert reply.id not in self.replies
                self.replies[reply.id] = reply


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise outcome or AssertionError("it ended by itself")


async def rush(play: Play, seconds: float) -> None:
    """Requests now and then, some alone and some in groups."""
    until = play.harness.now() + seconds
    while play.harness.now() < until:
        await play.harness.advance(play.rng.expovariate(50.0))
        await play.ask(play.rng.choice((1, 1, 1, 3, 12)))


@story
async def test_all_shards_are_served(harness: RedisHarness) -> None:
    play = Play(harness, seed=3)
    play.start(*WORKERS)
    await harness.advance(2.0)
    await rush(play, 2.0)
    await harness.advance(3.0)
    calm = [reply.queued for reply in play.replies.values() if reply.id not in play.disturbed]
    assert max(calm) <= WINDOW + 0.2
    await play.close()


@story
async def test_slots_that_sleep_are_found_where_they_are_at_home_now(harness: RedisHarness) -> None:
    """More slots, more shards in use: who slept in one of them has to wake in another."""
    play = Play(harness, seed=4)
    play.start(*WORKERS[:4])
    await harness.advance(2.5)
    play.start(*WORKERS[4:])
    await harness.advance(2.5)
    for _ in range(SHARDS):
        await play.ask(2)
    await harness.advance(1.0)
    await play.close()


@story
async def test_the_last_slot_serves_all_shards(harness: RedisHarness) -> None:
    play = Play(harness, seed=5)
    play.start(*WORKERS)
    await harness.advance(2.5)
    await play.kill(*WORKERS[1:])
    for _ in range(SHARDS):
        await play.ask(5)
    await harness.advance(15.0)
    await play.close()


@story
async def test_nothing_is_lost_while_slots_come_and_go(harness: RedisHarness) -> None:
    play = Play(harness, seed=0)
    alive: set[str] = set()
    for _ in range(6):
        wanted = set(play.rng.sample(WORKERS, play.rng.choice((0, 1, 4, 8, 12))))
        await play.kill(*sorted(alive - wanted))
        play.start(*sorted(wanted - alive))
        alive = wanted
        await rush(play, play.rng.choice((0.2, 1.0)))
        await harness.advance(play.rng.choice((0.0, 4.0)))
    play.start(*sorted(set(WORKERS) - alive))
    await harness.advance(10.0)
    await play.close()


@story
async def test_a_key_is_found_by_a_version_with_fewer_slots_wherever_its_tenant_is(harness: RedisHarness) -> None:
    """Twelve slots of one version have three shards in use, the two of the other one. Each tenant is in one shard of both."""
    tenants = [f"tenant {number}" for number in range(8)]
    for number in range(12):
        await beat(harness, f"old-{number}", "3")
    for number in range(2):
        await beat(harness, f"new-{number}", "4")
    await harness.advance(1.5)
    for broker in (harness.broker, harness.peer()):  # They count the workers.
        await broker.heartbeat(worker_of("old-0", "3"))
    firsts = [sharing("first", key(), version="4", tenant=tenant) for tenant in tenants]
    assert await harness.broker.enqueue(firsts) == [None] * len(tenants)
    seconds = [sharing("second", key(), version="3", tenant=tenant, gateway="h") for tenant in tenants]
    assert await harness.peer().enqueue(seconds) == [None] * len(tenants)
    assert {one.version for one in await harness.broker.depths() if one.depth} == {"4"}
    ran: list[Entry] = []
    for number in range(8):
        claimed = await harness.broker.claim(Slot(f"new-{number % 2}", "m", MAX_BATCH, version="4"), AT_ONCE)
        if not isinstance(claimed, NoWork):
            ran += claimed.entries
            await harness.answer(claimed)
    assert sorted(entry.tenant for entry in ran) == tenants
    assert not any(one.depth for one in await harness.broker.depths())


def worker_of(name: str, version: str) -> WorkerInfo:
    return WorkerInfo(worker_id=name, model="m", status=WorkerStatus.HEALTHY, version=version)


async def beat(harness: RedisHarness, name: str, version: str) -> None:
    await harness.broker.heartbeat(worker_of(name, version))
