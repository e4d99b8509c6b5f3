"""Zones over one Redis: requests stay in their zone, others help where one is behind, and what is in common is the fleet's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from headway import errors
from headway.brokers.redis.shard_queue import Queue, QueueGlance
from headway.core.dedup import follower
from headway.model import (
    BatchFailure,
    Cause,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Lease,
    Limit,
    NoWork,
    Reply,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    RedisHarness,
    ask,
    drained,
    ids,
    measure,
    output,
    read_mailbox,
    slot,
    story,
)
from tests.e2e.client import PATIENCE
from tests.redis.plays import Play
from tests.servers.redis import SharedServers


@pytest.fixture
def shards() -> int:
    return 1


cut = pytest.mark.parametrize("shards", [4])


@pytest.fixture
def zones() -> tuple[str, str]:
    return "a", "b"


@pytest.fixture
def harness(servers: SharedServers, kind: str, shards: int, zones: tuple[str, str]) -> Iterator[RedisHarness]:
    made = RedisHarness(servers.of(kind), shards, zones=zones)
    yield made
    made.close()


async def beat(broker: Broker, *workers: str, version: str = "") -> None:
    for worker in workers:
        info = WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY, version=version)
        await broker.heartbeat(info)


async def both(harness: RedisHarness, seconds: int = 2) -> None:
    """Heartbeats of a worker in each zone, until each process knows of both."""
    for _ in range(seconds):
        await beat(harness.broker, "gpu-a")
        await beat(harness.peer(), "gpu-b")
        await harness.advance(1.01)
    await beat(harness.broker, "gpu-a")
    await beat(harness.peer(), "gpu-b")


async def waiting(broker: Broker) -> dict[str, int]:
    """Entries that wait, by zone."""
    depths = Counter[str]()
    for one in await broker.depths():
        depths[one.zone] += one.depth
    return {zone: depth for zone, depth in depths.items() if depth}


async def ran(broker: Broker, worker: str) -> list[Entry]:
    """Entries of all batches that a slot gets, which it answers."""
    entries: list[Entry] = []
    for _ in range(20):
        lease = await broker.claim(slot(worker), AT_ONCE)
        if isinstance(lease, Lease):
            await broker.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
            entries += lease.entries
    return entries


@story
async def test_requests_run_in_the_zone_of_their_gateway(harness: RedisHarness) -> None:
    await both(harness)
    here, there = [ask() for _ in range(5)], [ask(limits=(Limit("user:u", "user", 600.0, 10.0),)) for _ in range(3)]
    assert await harness.broker.enqueue(here) == [None] * 5
    assert await harness.peer().enqueue(there) == [None] * 3
    assert await waiting(harness.broker) == {"a": 5, "b": 3}
    assert {worker.worker_id: worker.zone for worker in await harness.broker.workers()} == {"gpu-a": "a", "gpu-b": "b"}
    assert ids(await ran(harness.peer(), "gpu-b")) == ids(there)
    assert ids(await ran(harness.broker, "gpu-a")) == ids(here)


@story
async def test_requests_of_a_zone_without_a_worker_go_to_one_that_has_some(harness: RedisHarness) -> None:
    await beat(harness.peer(), "gpu-b")
    await harness.advance(1.01)
    await harness.broker.enqueue([ask(), ask()])
    assert await waiting(harness.broker) == {"b": 2}
    assert len(await ran(harness.peer(), "gpu-b")) == 2
    await harness.advance(12.0)
    await harness.broker.enqueue([ask()])  # Nobody is anywhere.
    assert await waiting(harness.broker) == {"a": 1}
    await both(harness)
    assert len(await ran(harness.broker, "gpu-a")) == 1


@story
async def test_what_waits_where_no_worker_is_left_is_run_by_another_zone(harness: RedisHarness) -> None:
    await both(harness)
    entries = [ask(dedup_keys=(common.task(f"job {number}"),), id=f"job {number}") for number in range(3)]
    await harness.peer().enqueue(entries)
    for _ in range(3):
        await harness.advance(1.01)
        await beat(harness.broker, "gpu-a")
    assert await harness.broker.outcome("t", "job 1") is EntryState.QUEUED
    lease = await harness.broker.claim(slot("gpu-a"), AT_ONCE)
    if isinstance(lease, NoWork):  # Every second claim is at home.
        lease = await harness.broker.claim(slot("gpu-a"), AT_ONCE)
    assert isinstance(lease, Lease)
    assert lease.slot.zone == "b"
    assert await harness.broker.extend(lease)
    await harness.answer(lease)
    rest = [one for one in entries if one not in lease.entries]
    assert sorted(ids(await ran(harness.broker, "gpu-a"))) == sorted(ids(rest))
    found = await harness.broker.outcome("t", "job 2")
    assert isinstance(found, Reply)
    assert found.output == output(entries[2].input)


@story
async def test_only_where_no_zone_has_a_worker_is_that_the_reason_for_what_is_late(harness: RedisHarness) -> None:
    await both(harness)
    reasons = []
    for workers in (["gpu-a"], []):  # That of the zone is silent, the other one busy or silent, too.
        entry = ask(queue_timeout=4.0)
        assert await harness.peer().enqueue([entry]) == [None]
        for _ in range(5):
            await beat(harness.broker, *workers)
            await harness.reaping(1.0)
        failure = (await drained(harness))[entry.id].failure
        assert failure is not None
        reasons.append(failure.code)
    assert reasons == [errors.DEADLINE_EXCEEDED, errors.NO_WORKERS]


@cut
@story
async def test_an_idle_slot_helps_a_zone_only_once_that_is_behind(harness: RedisHarness) -> None:
    await both(harness)
    await measure(harness, 0.5, workers=("gpu-a",))
    for gone in await drained(harness, "nobody"):
        assert gone
    await both(harness)
    helper = harness.peer()
    assert isinstance(await helper.claim(slot("gpu-b"), AT_ONCE), NoWork)
    looking = asyncio.ensure_future(helper.wait_for_work(slot("gpu-b"), None))
    await harness.broker.enqueue([ask() for _ in range(3)])
    for _ in range(5):
        await harness.advance(0.08)
    assert not looking.done()  # The slot at home may come free yet.
    for _ in range(20):
        await harness.advance(0.08)
        if looking.done():
            break
    assert looking.done()
    lease = await helper.claim(slot("gpu-b"), AT_ONCE)
    assert isinstance(lease, Lease)
    assert (len(lease.entries), lease.slot.zone) == (3, "a")
    assert await helper.release(lease, BatchFailure(Cause.CRASHED, "gone", "gpu-b"))
    await harness.advance(1.0)
    assert len(await ran(harness.broker, "gpu-a")) == 3


async def rests(harness: RedisHarness, broker: Broker, worker: str, seconds: float) -> bool:
    """Whether a slot that finds nothing to claim rests for so long, while its process says that it is there."""
    assert isinstance(await broker.claim(slot(worker), AT_ONCE), NoWork)
    resting = asyncio.ensure_future(broker.wait_for_work(slot(worker), None))
    for _ in range(int(seconds / 0.25)):
        await beat(broker, worker)
        await harness.advance(0.25)
    if resting.done():
        await resting
        return False
    resting.cancel()
    await asyncio.gather(resting, return_exceptions=True)
    return True


@story
async def test_a_slot_that_rests_helps_a_zone_whose_last_slot_had_left_before(harness: RedisHarness) -> None:
    await both(harness)
    await harness.peer().enqueue([ask()])
    for _ in range(4):
        await harness.advance(1.01)
        await beat(harness.broker, "gpu-a")
    assert not await rests(harness, harness.broker, "gpu-a", 3.0)
    assert len(await ran(harness.broker, "gpu-a")) == 1
    assert await rests(harness, harness.broker, "gpu-a", 3.0)


@story
async def test_a_slot_that_rests_helps_a_zone_that_came_up_meanwhile(harness: RedisHarness) -> None:
    await beat(harness.broker, "gpu-a")
    await harness.advance(1.01)
    helper = harness.broker
    assert isinstance(await helper.claim(slot("gpu-a"), AT_ONCE), NoWork)
    resting = asyncio.ensure_future(helper.wait_for_work(slot("gpu-a"), None))
    await both(harness)
    await harness.peer().enqueue([ask()])
    for _ in range(8):
        await both(harness, 1)
    assert resting.done()
    await resting
    assert len(await ran(helper, "gpu-a")) == 1


async def rest(broker: Broker, worker: str) -> Lease:
    """Lease of a slot that rests until there is one."""
    while isinstance(claimed := await broker.claim(slot(worker), AT_ONCE), NoWork):
        await broker.wait_for_work(slot(worker), claimed.until)
    return claimed


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("zones", [("", "b")])
@story
async def test_a_slot_without_a_zone_that_rests_helps_a_zone_that_comes_later(
    harness: RedisHarness, lives: bool
) -> None:
    await beat(harness.broker, "gpu-a")
    resting = asyncio.ensure_future(rest(harness.broker, "gpu-a"))
    entries = [ask() for _ in range(3)]
    for second in range(20):
        await harness.advance(1.01)
        await harness.broker.reap()
        await beat(harness.broker, "gpu-a")
        if lives or second < 3:
            await beat(harness.peer(), "gpu-b")
        if second == 2:
            await harness.peer().enqueue(entries)
            assert await waiting(harness.peer()) == {"b": 3}
        if resting.done():
            break
    assert resting.done()
    lease = await resting
    assert (ids(lease.entries), lease.slot.zone) == (ids(entries), "b")
    await harness.answer(lease)


@story
async def test_a_slot_that_never_rests_takes_every_second_batch_from_a_zone_that_is_behind(
    harness: RedisHarness,
) -> None:
    await both(harness)
    await measure(harness, 0.2, workers=("gpu-a",))
    behind, helper = [ask() for _ in range(3 * MAX_BATCH)], harness.peer()
    await harness.broker.enqueue(behind)
    helped = []
    for _ in range(16):
        await harness.advance(0.25)
        for broker, worker in ((harness.broker, "gpu-a"), (helper, "gpu-b")):
            await beat(broker, worker)
        await helper.enqueue([ask(gateway="h") for _ in range(2)])
        lease = await helper.claim(slot("gpu-b"), AT_ONCE)
        if isinstance(lease, Lease):
            helped.append(lease.slot.zone)
            await helper.complete(lease, [ItemResult(output(rider.input)) for rider in lease.entries])
    assert helped.count("a") == 3
    first = helped.index("a")
    assert helped[first : first + 5] == ["a", None, "a", None, "a"]
    assert set(helped[first + 5 :]) == {None}


@story
async def test_a_zone_that_is_behind_itself_helps_none_that_has_slots(harness: RedisHarness) -> None:
    await both(harness)
    for broker, worker in ((harness.broker, "gpu-a"), (harness.peer(), "gpu-b")):
        await broker.heartbeat(
            WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY, warm_up=((1, 0.2), (MAX_BATCH, 0.2)))
        )
        await broker.enqueue([ask(gateway=worker) for _ in range(4 * MAX_BATCH)])
    await harness.advance(1.01)
    await both(harness, 1)
    taken = []
    for _ in range(4):
        lease = await harness.peer().claim(slot("gpu-b"), AT_ONCE)
        assert isinstance(lease, Lease)
        taken.append(lease.slot.zone)
    assert taken == [None] * 4


@story
async def test_a_key_runs_once_whichever_zone_it_is_sent_to(harness: RedisHarness) -> None:
    await both(harness)
    first = common.sharing("first", common.key(), input="a")
    again = common.sharing("again", common.key(), input="a", gateway="h")
    assert await harness.broker.enqueue([first]) == [None]
    assert await harness.peer().enqueue([again]) == [None]
    assert await waiting(harness.broker) == {"a": 1}
    [entry] = await ran(harness.broker, "gpu-a")
    assert entry.id == first.id
    replies = {**await drained(harness, "g"), **await drained(harness, "h")}
    assert {replies[id].output for id in (first.id, again.id)} == {output("a")}
    late = common.sharing("late", common.key(), input="a", gateway="h")
    assert await harness.peer().enqueue([late]) == [None]
    [refusal] = await harness.peer().enqueue([common.sharing("b", common.key(digest=b"another"))])
    assert refusal is not None
    assert refusal.code == errors.IDEMPOTENCY_MISUSE
    assert not await ran(harness.peer(), "gpu-b")


@cut
@story
async def test_a_task_is_followed_and_cancelled_from_another_zone(harness: RedisHarness) -> None:
    await both(harness)
    entries = [ask(name, dedup_keys=(common.task(name),), id=name) for name in ("one", "two")]
    await harness.peer().enqueue(entries)
    assert await harness.broker.outcome("t", "one") is EntryState.QUEUED
    following = [follower(id, "one", "t", "g2", 60.0, 1, model) for id, model in (("sub", "m"), ("other", ""))]
    assert await harness.broker.enqueue(following) == [None, None]
    await harness.broker.cancel_task("t", "two")
    assert [entry.input for entry in await ran(harness.peer(), "gpu-b")] == ["one"]
    replies = await drained(harness, "g2")
    assert {id: reply.output for id, reply in replies.items()} == dict.fromkeys(("sub", "other"), output("one"))


@story
async def test_a_limit_of_a_tenant_is_one_for_all_zones(harness: RedisHarness) -> None:
    await both(harness)
    limit = Limit("user:u", "user", 60.0, 4.0)
    verdicts: list[Failure | None] = []
    for number in range(8):
        broker = (harness.broker, harness.peer())[number % 2]
        verdicts += await broker.enqueue([ask(limits=(limit,))])
    assert [verdict is None for verdict in verdicts] == [True] * 4 + [False] * 4
    assert harness.broker.rate_limit_debt(limit) > 0.0


@story
async def test_a_process_that_comes_late_finds_what_is_kept_in_a_zone_that_is_gone(harness: RedisHarness) -> None:
    await both(harness)
    await harness.peer().enqueue([ask("done", dedup_keys=(common.task("job", keep=3000.0),), id="job")])
    assert len(await ran(harness.peer(), "gpu-b")) == 1
    await drained(harness)
    await harness.advance(200.0)  # The registry has forgotten the worker.
    late = await harness.of_zone("a")
    assert not await late.workers()
    assert isinstance(await late.outcome("t", "job"), Reply)


@story
async def test_the_id_of_a_task_in_one_zone_decides_before_a_key_that_is_known_in_another(
    harness: RedisHarness,
) -> None:
    await both(harness)
    kept = ask("asked", id="mine", digest=b"one", dedup_keys=(common.task("mine", digest=b"one"),))
    await harness.peer().enqueue([kept])
    assert len(await ran(harness.peer(), "gpu-b")) == 1
    await harness.broker.enqueue([common.sharing("first", common.key(digest=b"two"))])
    assert len(await ran(harness.broker, "gpu-a")) == 1
    replies, cursor = await read_mailbox(harness, harness.broker)
    rest, _ = await read_mailbox(harness, harness.broker, after=cursor)  # Each queue has its stream.
    assert len({*ids(replies), *ids(rest)}) == 2
    for digest, verdict in ((b"two", errors.IDEMPOTENCY_MISUSE), (b"one", None)):
        again = ask("asked", id="mine", digest=digest, nonce=1, dedup_keys=(common.key(digest=digest),), gateway="h")
        [told] = await harness.broker.enqueue([again])
        assert (told and told.code) == verdict


@cut
@story
async def test_nothing_is_lost_while_zones_come_and_go(harness: RedisHarness) -> None:
    play = Play(harness, 6, lambda worker: int(worker.startswith("b")))
    workers = {"a": [f"a{n}" for n in range(4)], "b": [f"b{n}" for n in range(4)]}
    play.start(*workers["a"], *workers["b"])
    await harness.advance(2.0)
    await play.rush(1.0)
    for lost in ("b", "a"):
        await play.kill(*workers[lost])
        await play.rush(3.0)
        play.start(*workers[lost])
        await harness.advance(2.0)
        await play.rush(0.5)
    await harness.advance(10.0)
    assert play.crossed > 0
    await play.close()


@story
async def test_a_heartbeat_does_not_wait_for_the_queues_of_other_zones(
    harness: RedisHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def never(queue: Queue) -> QueueGlance:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await both(harness)
    monkeypatch.setattr(Queue, "glance", never)
    await harness.advance(1.01)
    async with asyncio.timeout(PATIENCE):
        await beat(harness.broker, "gpu-a")
        await asked.wait()
        await beat(harness.broker, "gpu-a")


@story
async def test_an_entry_that_died_in_two_zones_has_one_dead_letter(harness: RedisHarness) -> None:
    await both(harness)
    for nonce, (broker, worker) in enumerate([(harness.broker, "a-0"), (harness.peer(), "b-0")]):
        await broker.enqueue([ask("text", id="twice", nonce=nonce)])
        lease = await broker.claim(slot(worker), AT_ONCE)
        assert isinstance(lease, Lease)
        await broker.complete(lease, [ItemResult(None, f"rejected by {worker}")])
    [letter] = await harness.dead.find("twice", "t")
    assert letter.error == "rejected by b-0"
    assert [one.error for one in await harness.dead.list()] == ["rejected by b-0"]
    assert await harness.dead.count() == 1
