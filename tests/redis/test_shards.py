"""A model's queue in several shards: where entries go, where slots are at home, and how shards help each other."""

import asyncio
from collections.abc import Sequence

import pytest

from headway.brokers.redis.broker import RedisBroker
from headway.core.queue_limits import QueueLimits
from headway.model import Entry, EntryState, Failure, ItemResult, NoWork, Slot
from headway.ports import Broker
from headway.runtime.counters import BrokerCounts
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, beat, granted, leave, output, slot
from tests.contracts.dedup_keys import key, sharing
from tests.redis import plays
from tests.redis.plays import WINDOW, Play
from tests.redis.stand import Stand

WORKERS = tuple(f"gpu-{number:02}" for number in range(16))
"""Enough workers for four shards with four each."""


@pytest.fixture
def shards() -> int:
    return 4


two = pytest.mark.parametrize("shards", [2])


def host_of(stand: Stand, worker: str) -> Broker:
    return (stand.broker, stand.peer())[WORKERS.index(worker) % 2]


async def beaten(stand: Stand, workers: Sequence[str], seconds: int = 4) -> None:
    """Send the heartbeats of workers on two hosts until all know each other."""
    for _ in range(seconds):
        for worker in workers:
            await beat(host_of(stand, worker), worker)
        await stand.advance(1.01)


async def test_entries_are_dealt_out_in_turn_once_there_are_workers(harness: Stand) -> None:
    await harness.broker.enqueue([ask() for _ in range(10)])
    assert harness.held() == [10, *[0] * (harness.shards - 1)]
    await beaten(harness, WORKERS)
    for count in (1, 3, MAX_BATCH, 20):
        before = harness.held()
        for _ in range(harness.shards):
            await harness.broker.enqueue([ask(tier=2) for _ in range(count)])
        dealt = [now - then for now, then in zip(harness.held(), before, strict=True)]
        assert sum(dealt) == harness.shards * count
        assert max(dealt) - min(dealt) <= harness.shards


async def test_entries_are_found_in_any_shard_by_any_process_and_offered_again_there(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    entries = [ask() for _ in range(4 * harness.shards)]
    await harness.broker.enqueue(entries)
    before = harness.held()
    assert min(before) > 0
    await harness.advance(20.0)  # All workers are gone by now, so anything new would go into the first shard.
    assert await harness.broker.enqueue(entries[::-1]) == [None] * len(entries)
    assert harness.held() == before
    for broker in (harness.broker, harness.peer()):
        for entry in entries:
            assert await broker.state(entry.tenant, entry.id) is EntryState.QUEUED
    await leave(harness.peer(), *entries[::2])
    await leave(harness.broker, *entries[1::2])
    assert harness.held() == [0] * harness.shards
    for broker in (harness.broker, harness.peer()):
        assert await broker.state("t", entries[0].id) is None
    assert sum(one.depth for one in await harness.broker.depths()) == 0


@two
async def test_a_slot_that_sleeps_is_woken_when_it_has_to_move(harness: Stand) -> None:
    """Alone, it is at home in the first shard. As the second slot of sixteen, it is at home in the other one."""
    worker = WORKERS[1]
    host = host_of(harness, worker)
    await beaten(harness, [worker])
    assert await host.claim(slot(worker), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(host.wait_for_work(slot(worker), None))
    await harness.settle()
    assert harness.idle() == 1
    moving = asyncio.create_task(beaten(harness, WORKERS))
    await asyncio.wait_for(listening, 4.0)
    await moving
    assert harness.idle() == 0
    assert [worker in home for home in harness.at_home()] == [False, True]


@two
async def test_a_slot_that_moves_after_its_claim_claims_again_before_it_sleeps(harness: Stand) -> None:
    worker = WORKERS[1]
    host = host_of(harness, worker)
    await beaten(harness, [worker])
    assert await host.claim(slot(worker), AT_ONCE) == NoWork(None)
    await beaten(harness, WORKERS)
    await asyncio.wait_for(host.wait_for_work(slot(worker), None), 0.001)
    assert await host.claim(slot(worker), AT_ONCE) == NoWork(None)
    assert [harness.idle(shard) for shard in range(2)] == [0, 1]


async def pile(stand: Stand, count: int) -> None:
    before = stand.held()[0]
    await (await stand.another(shards=1)).enqueue([ask(gateway="pile") for _ in range(count)])
    assert stand.held()[0] == before + count


@two
async def test_an_idle_slot_helps_a_shard_that_is_behind(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    [_, second, *_] = harness.at_home()
    helper = min(second)
    host = host_of(harness, helper)
    assert await host.claim(slot(helper), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(host.wait_for_work(slot(helper), None))
    await harness.advance(1.0)
    assert not listening.done()
    await pile(harness, MAX_BATCH)  # Its own slots come for one full batch.
    await harness.advance(2.0)
    assert not listening.done()
    await pile(harness, MAX_BATCH)
    await harness.advance(0.6)
    assert listening.done()
    lease = await granted(host, slot(helper))
    assert len(lease.entries) == MAX_BATCH
    assert harness.idle(1) == 0  # No bell rings for a busy slot.
    settled = await harness.peer().complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
    assert settled.answered == MAX_BATCH


async def test_what_a_tenant_has_in_common_meets_in_one_shard(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    tenants = [f"tenant {number}" for number in range(12)]
    for at, broker in enumerate([harness.broker, harness.peer()]):
        entries = [
            common.sharing(f"{at} {tenant}", common.task(f"{at} {tenant}"), common.key(), tenant=tenant)
            for tenant in tenants[at:] + tenants[:at]  # Taken in turn, these would go elsewhere.
        ]
        assert list(await broker.enqueue(entries)) == [None] * len(tenants)
    held = harness.held()
    assert sum(held) == 2 * len(tenants)
    assert min(held) > 0
    assert sum(one.depth for one in await harness.broker.depths()) == len(tenants)
    for tenant in tenants:
        assert await harness.peer().outcome(tenant, f"0 {tenant}") is EntryState.QUEUED
    await harness.peer().withdraw([(tenant, f"1 {tenant}", 0) for tenant in tenants], "g")
    assert sum(harness.held()) == len(tenants)
    for tenant in tenants:
        await harness.peer().cancel_task(tenant, f"0 {tenant}")
    assert harness.held() == [0] * harness.shards


async def test_a_tier_is_refused_from_the_depth_that_the_shards_in_use_come_to(harness: Stand) -> None:
    deep = QueueLimits(tiers=3, max_batch=MAX_BATCH, max_queue=1000, shed_at=(8, 40))
    made = RedisBroker(harness.broker._connection, {"m": deep}, BrokerCounts(), lambda: 0.0, harness.shards)  # type: ignore[attr-defined]
    for workers, counts in (((), (8, 40)), (WORKERS, (8, 40))):
        await beaten(harness, workers)
        await harness.advance(1.1)
        await made.enqueue([])
        for tier, count in ((2, counts[0]), (1, counts[1])):
            verdicts: list[Failure | None] = []
            for _ in range(count + harness.shards):
                verdicts += await made.enqueue([ask(tier=tier)])
            assert sum(verdict is None for verdict in verdicts) == count - (0 if tier == 2 else counts[0])
            assert {verdict.reason for verdict in verdicts if verdict is not None} == {"shed"}
        assert await made.enqueue([ask(tier=0)]) == [None]
        harness.server.flush()
    await made.close()


async def test_all_shards_are_served_by_however_many_slots_there_are(harness: Stand) -> None:
    play = Play(harness, seed=4)
    play.start(*plays.WORKERS[:4])
    await harness.advance(2.5)
    play.start(*plays.WORKERS[4:])  # More shards are in use: a slot asleep in one of them has to wake in another.
    await harness.advance(2.5)
    for _ in range(harness.shards):
        await play.ask(2)
    await play.rush(0.5)
    await harness.advance(3.0)
    calm = [reply.queued for reply in play.replies.values() if reply.id not in play.disturbed]
    assert max(calm) <= WINDOW + 0.2
    await play.kill(*plays.WORKERS[1:])
    for _ in range(harness.shards):
        await play.ask(5)
    await harness.advance(15.0)
    await play.close()


async def test_a_key_is_found_by_a_version_with_fewer_slots_wherever_its_tenant_is(harness: Stand) -> None:
    """Twelve slots of one version use three shards, two of the other one. A tenant has one shard per version."""
    tenants = [f"tenant {number}" for number in range(8)]
    for number in range(12):
        await beat(harness.broker, f"old-{number}", version="3")
    for number in range(2):
        await beat(harness.broker, f"new-{number}", version="4")
    await harness.advance(1.5)
    for broker in (harness.broker, harness.peer()):  # It counts the workers.
        await beat(broker, "old-0", version="3")
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
