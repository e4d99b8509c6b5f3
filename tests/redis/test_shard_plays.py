"""A queue in several shards: slots come and go, and everything that was let in has its one outcome all the same."""

import pytest

from headway.model import Entry, NoWork, Slot, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH
from tests.contracts.dedup_keys import key, sharing
from tests.redis.plays import WINDOW, Play
from tests.redis.stand import Stand

SHARDS = 4
WORKERS = tuple(f"gpu-{number}" for number in range(12))


@pytest.fixture
def shards() -> int:
    return SHARDS


def play_on(harness: Stand, seed: int) -> Play:
    return Play(harness, seed, lambda worker: WORKERS.index(worker) % 2)


async def test_all_shards_are_served(harness: Stand) -> None:
    play = play_on(harness, seed=3)
    play.start(*WORKERS)
    await harness.advance(2.0)
    await play.rush(2.0)
    await harness.advance(3.0)
    calm = [reply.queued for reply in play.replies.values() if reply.id not in play.disturbed]
    assert max(calm) <= WINDOW + 0.2
    await play.close()


async def test_slots_that_sleep_are_found_where_they_are_at_home_now(harness: Stand) -> None:
    """More slots, more shards in use: who slept in one of them has to wake in another."""
    play = play_on(harness, seed=4)
    play.start(*WORKERS[:4])
    await harness.advance(2.5)
    play.start(*WORKERS[4:])
    await harness.advance(2.5)
    for _ in range(SHARDS):
        await play.ask(2)
    await harness.advance(1.0)
    await play.close()


async def test_the_last_slot_serves_all_shards(harness: Stand) -> None:
    play = play_on(harness, seed=5)
    play.start(*WORKERS)
    await harness.advance(2.5)
    await play.kill(*WORKERS[1:])
    for _ in range(SHARDS):
        await play.ask(5)
    await harness.advance(15.0)
    await play.close()


async def test_nothing_is_lost_while_slots_come_and_go(harness: Stand) -> None:
    play = play_on(harness, seed=0)
    alive: set[str] = set()
    for _ in range(6):
        wanted = set(play.rng.sample(WORKERS, play.rng.choice((0, 1, 4, 8, 12))))
        await play.kill(*sorted(alive - wanted))
        play.start(*sorted(wanted - alive))
        alive = wanted
        await play.rush(play.rng.choice((0.2, 1.0)))
        await harness.advance(play.rng.choice((0.0, 4.0)))
    play.start(*sorted(set(WORKERS) - alive))
    await harness.advance(10.0)
    await play.close()


async def test_a_key_is_found_by_a_version_with_fewer_slots_wherever_its_tenant_is(harness: Stand) -> None:
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


async def beat(harness: Stand, name: str, version: str) -> None:
    await harness.broker.heartbeat(worker_of(name, version))
