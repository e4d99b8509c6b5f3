"""A model's queue in several shards: where entries go, where slots are at home, and how they help one another."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from headway.brokers.redis.broker import RedisBroker
from headway.core.queue_limits import QueueLimits
from headway.model import (
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    NoWork,
    QueueName,
    Reply,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker
from headway.runtime.counters import BrokerCounts
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, MODELS, ask, output, slot
from tests.redis.stand import Stand

WORKERS = tuple(f"gpu-{number:02}" for number in range(16))
"""Workers enough for four shards to have four each."""


@pytest.fixture(params=[2, 4])
def shards(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


two = pytest.mark.parametrize("shards", [2])


def host_of(stand: Stand, worker: str) -> Broker:
    return (stand.broker, stand.peer())[WORKERS.index(worker) % 2]


async def beaten(stand: Stand, workers: Sequence[str], seconds: int = 4) -> None:
    """Heartbeats of workers on two hosts, until all know of all."""
    for _ in range(seconds):
        for worker in workers:
            await host_of(stand, worker).heartbeat(WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY))
        await stand.advance(1.01)


async def test_entries_are_dealt_out_in_turn(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    for count in (1, 3, MAX_BATCH, 20):
        before = harness.held()
        for _ in range(harness.shards):
            await harness.broker.enqueue([ask(tier=2) for _ in range(count)])
        dealt = [now - then for now, then in zip(harness.held(), before, strict=True)]
        assert sum(dealt) == harness.shards * count
        assert max(dealt) - min(dealt) <= harness.shards


async def test_without_workers_everything_goes_into_one_shard(harness: Stand) -> None:
    await harness.broker.enqueue([ask() for _ in range(10)])
    assert harness.held() == [10, *[0] * (harness.shards - 1)]


async def test_a_replay_goes_where_the_entry_went(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    entries = [ask() for _ in range(4 * harness.shards)]
    await harness.broker.enqueue(entries)
    before = harness.held()
    assert min(before) > 0
    await harness.advance(20.0)  # All workers are gone by now: whatever is new would go into the first shard.
    assert await harness.broker.enqueue(entries[::-1]) == [None] * len(entries)
    assert harness.held() == before


async def test_entries_are_found_in_any_shard_and_by_any_process(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    entries = [ask() for _ in range(4 * harness.shards)]
    await harness.broker.enqueue(entries)
    assert min(harness.held()) > 0
    for broker in (harness.broker, harness.peer()):
        for entry in entries:
            assert await broker.state(entry.tenant, entry.id) is EntryState.QUEUED
    await harness.peer().withdraw([(entry.tenant, entry.id, 0) for entry in entries[::2]], "g")
    await harness.broker.withdraw([(entry.tenant, entry.id, 0) for entry in entries[1::2]], "g")
    assert harness.held() == [0] * harness.shards
    for broker in (harness.broker, harness.peer()):
        assert await broker.state("t", entries[0].id) is None
    assert sum(one.depth for one in await harness.broker.depths()) == 0


async def test_homes_are_balanced_and_move_as_slots_come_and_go(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    homes = harness.at_home()
    assert [len(home) for home in homes] == [16 // harness.shards] * harness.shards
    assert set.union(*homes) == set(WORKERS)
    stay = WORKERS[3:12]
    await beaten(harness, stay, seconds=6)
    homes = [home & set(stay) for home in harness.at_home()]
    sizes = [len(home) for home in homes]
    assert sizes == ([5, 4] if harness.shards == 2 else [5, 4, 0, 0])
    assert set.union(*homes) == set(stay)
    await beaten(harness, WORKERS, seconds=6)
    homes = harness.at_home()
    assert [len(home) for home in homes] == [16 // harness.shards] * harness.shards
    assert sum(load.slots for load in (await harness.broker.loads()).values()) == 16


@two
async def test_a_slot_that_sleeps_is_woken_when_it_has_to_move(harness: Stand) -> None:
    """Alone it is at home in the first shard; in a fleet of sixteen, being the second, in the other one."""
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
    """Put `count` entries into the first shard, although there are two in use."""
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
    await pile(harness, MAX_BATCH)  # One full batch is what its own slots come for.
    await harness.advance(2.0)
    assert not listening.done()
    await pile(harness, MAX_BATCH)
    await harness.advance(0.6)
    assert listening.done()
    lease = await host.claim(slot(helper), AT_ONCE)
    assert isinstance(lease, Lease)
    assert len(lease.entries) == MAX_BATCH
    assert harness.idle(1) == 0  # No bell is rung for a slot that is busy.
    settled = await harness.peer().complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
    assert settled.answered == MAX_BATCH


async def test_each_entry_of_each_model_has_one_reply(harness: Stand) -> None:
    """Slots of two models at once, on two hosts; fences of different queues may be alike."""
    rng = random.Random(harness.shards)
    hosts = [harness.broker, harness.peer()]
    asked: dict[str, Entry] = {}
    replies: dict[str, Reply] = {}

    async def serve(number: int, worker: str, model: str) -> None:
        host = hosts[number % 2]
        while True:
            claimed = await host.claim(slot(worker, model), AT_ONCE)
            if isinstance(claimed, NoWork):
                await host.wait_for_work(slot(worker, model), claimed.until)
                continue
            assert {rider.model for rider in claimed.entries} == {model}
            await harness.advance(0.01)
            await host.complete(claimed, [ItemResult(output(rider.input)) for rider in claimed.entries])

    async def beat(worker: str, model: str) -> None:
        while True:
            await harness.healthy(worker, model=model)
            await harness.advance(1.0)

    async def read(number: int) -> None:
        cursor = 0
        while True:
            found, cursor = await hosts[number].replies(f"g-{number}", cursor)
            for reply in found:
                assert reply.id not in replies
                assert reply.queued < 1.0
                replies[reply.id] = reply

    tasks = [asyncio.create_task(read(number)) for number in range(2)]
    for model in MODELS:
        for number in range(8):
            tasks.append(asyncio.create_task(beat(f"{model}-{number}", model)))
            tasks.append(asyncio.create_task(serve(number, f"{model}-{number}", model)))
    await harness.advance(3.0)
    for _ in range(100):
        await harness.advance(rng.expovariate(100.0))
        number = rng.randrange(2)
        entries = [ask(model=rng.choice(MODELS), gateway=f"g-{number}") for _ in range(rng.choice((1, 2, 20)))]
        verdicts = await hosts[number].enqueue(entries)
        asked |= {entry.id: entry for entry, verdict in zip(entries, verdicts, strict=True) if verdict is None}
    await harness.advance(3.0)
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(replies) == set(asked)
    assert all(reply.output == output(asked[id].input) for id, reply in replies.items())


async def test_what_a_tenant_has_in_common_meets_in_one_shard(harness: Stand) -> None:
    await beaten(harness, WORKERS)
    tenants = [f"tenant {number}" for number in range(12)]
    for at, broker in enumerate([harness.broker, harness.peer()]):
        entries = [
            common.sharing(f"{at} {tenant}", common.task(f"{at} {tenant}"), common.key(), tenant=tenant)
            for tenant in tenants[at:] + tenants[:at]  # What goes by turns goes elsewhere.
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


@two
async def test_an_interrupted_slot_leaves_its_home_only_once(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, link, calls = harness.broker, harness._links[0], list[str]()
    assert isinstance(broker, RedisBroker)
    await broker.heartbeat(WorkerInfo(worker_id="gpu", model="m", status=WorkerStatus.HEALTHY))
    call = link.call

    async def counted(function: str, key: str, *arguments: object) -> object:
        calls.append(function)
        return await call(function, key, *arguments)

    monkeypatch.setattr(link, "call", counted)
    assert isinstance(await broker.claim(slot("gpu"), AT_ONCE), NoWork)
    waiting = asyncio.ensure_future(broker.wait_for_work(slot("gpu"), None))
    await harness.settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert harness.idle() + harness.idle(1) == 0
    home = broker._router.home("gpu", QueueName("m"))
    [other] = [queue for queue in broker._queues[QueueName("m")] if queue is not home]
    await other.enqueue([ask()])
    broker._hints[slot("gpu")] = other
    assert isinstance(await broker.claim(slot("gpu"), AT_ONCE), Lease)
    assert calls.count("unlisten") == 1
