"""A call was done and nobody heard of it: it is made again, and nothing happens twice."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from headway.errors import BrokerUnavailable
from headway.model import EntryState, ItemResult, Lease, NoWork, QueueName, WorkerInfo, WorkerStatus
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, drained, failed, ids, output, read_mailbox, slot, story
from tests.redis.stand import Stand


async def lost_claim(harness: Stand) -> None:
    with harness.losing("claim"), pytest.raises(BrokerUnavailable):
        await harness.broker.claim(slot(), AT_ONCE)


@story
async def test_entries_that_were_let_in_unheard_are_let_in_once(harness: Stand) -> None:
    entries = [ask() for _ in range(5)]
    with harness.losing("enqueue"), pytest.raises(BrokerUnavailable):
        await harness.broker.enqueue(entries)
    assert await harness.broker.enqueue(entries) == [None] * 5
    lease = await harness.claim()
    assert ids(lease.entries) == ids(entries)
    assert await harness.broker.enqueue(entries) == [None] * 5
    await harness.answer(lease)
    assert await harness.broker.enqueue(entries) == [None] * 5
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert set(await drained(harness)) == set(ids(entries))


@pytest.mark.parametrize("step", ["enqueue", "claim_id"])
@story
async def test_an_offer_that_is_overtaken_by_what_was_read_brings_nothing_back(harness: Stand, step: str) -> None:
    broker = harness.broker
    entry = replace(ask(id="job", dedup_keys=(common.task("job"),)), claims=step == "claim_id")
    await broker.enqueue([entry])
    await harness.answer(await harness.claim())
    with harness.overtaken(step) as arrives:
        offered = asyncio.create_task(broker.enqueue([entry]))
        replies, cursor = await read_mailbox(harness, broker, "g", 0)
        assert [reply.id for reply in replies] == ["job"]
        reading = asyncio.create_task(broker.replies("g", cursor))
        await harness.advance(1.0)
        await harness.peer().cancel_task("t", "job")
        arrives.set()
        assert await offered == [None]
    assert await broker.outcome("t", "job") is None
    await harness.advance(1.0)
    assert harness.server.command("HLEN", harness.key("e")) == 0
    reading.cancel()


@story
async def test_a_lease_that_was_granted_unheard_is_granted_again(harness: Stand) -> None:
    entries = [ask() for _ in range(3)]
    await harness.broker.enqueue(entries)
    for _ in range(3):
        await lost_claim(harness)
    lease = await harness.claim()
    assert ids(lease.entries) == ids(entries)
    assert (await harness.broker.loads())[QueueName("m")].departures == 1
    await harness.advance(0.9 * harness.lease_seconds)
    assert await harness.broker.extend(lease)
    await harness.answer(lease)
    assert {reply.attempts for reply in (await drained(harness)).values()} == {1}


@story
async def test_another_claim_of_the_same_slot_gets_another_lease(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    first = await harness.claim()
    await harness.broker.enqueue([ask(id="b")])
    second = await harness.claim()
    assert (ids(first.entries), ids(second.entries)) == (["a"], ["b"])
    await harness.answer(second)
    await harness.answer(first)
    assert set(await drained(harness)) == {"a", "b"}


@story
async def test_who_left_before_the_lease_was_heard_of_mixes_nothing_up(harness: Stand) -> None:
    entries = [ask(id=f"id {number}") for number in range(5)]
    await harness.broker.enqueue(entries)
    await lost_claim(harness)
    await harness.broker.withdraw([("t", "id 0", 0), ("t", "id 3", 0)], "g")
    lease = await harness.claim()
    assert ids(lease.entries) == ["id 1", "id 2", "id 4"]
    await harness.broker.withdraw([("t", "id 2", 0)], "g")
    items = [ItemResult(output("input of id 1")), ItemResult("nobody's"), ItemResult(None, "bad input")]
    settled = await harness.broker.complete(lease, items)
    assert (settled.answered, settled.departed) == (2, 1)
    replies = await drained(harness)
    assert set(replies) == {"id 1", "id 4"}
    assert replies["id 1"].output == output("input of id 1")
    assert replies["id 4"].output is None
    assert [letter.entry.id for letter in await harness.dead.list()] == ["id 4"]


@story
async def test_a_lease_that_everybody_left_is_given_up(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await lost_claim(harness)
    await harness.broker.withdraw([("t", "a", 0)], "g")
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert not harness.keys() & {"x", "y", "n"}
    await harness.broker.enqueue([ask(id="b")])
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_a_lease_that_lapsed_unheard_is_granted_anew(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await lost_claim(harness)
    await harness.reaping(harness.lease_seconds + 1.0)
    await harness.answer(await harness.claim())
    assert (await drained(harness))["a"].attempts == 2


@pytest.mark.parametrize("shards", [2])
@story
async def test_a_guest_asks_again_where_it_asked_before(harness: Stand) -> None:
    """The guest's home shard does not know that lease."""
    workers = [f"gpu-{number}" for number in range(8)]
    for _ in range(4):
        for worker in workers:
            await harness.broker.heartbeat(WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY))
        await harness.advance(1.01)
    guest = min(harness.at_home()[1])
    await (await harness.another(shards=1)).enqueue([ask() for _ in range(2 * MAX_BATCH)])
    assert await harness.broker.claim(slot(guest), AT_ONCE) == NoWork(None)
    await harness.broker.wait_for_work(slot(guest), None)  # Until it sees that the other shard is behind.
    with harness.losing("claim"), pytest.raises(BrokerUnavailable):
        await harness.broker.claim(slot(guest), AT_ONCE)
    lease = await harness.broker.claim(slot(guest), AT_ONCE)
    assert isinstance(lease, Lease)
    await harness.answer(lease)
    assert harness.server.command("HLEN", harness.key("x")) == 0
    assert (await harness.broker.loads())[QueueName("m")].departures == 1


@story
async def test_an_outcome_that_was_taken_unheard_is_told_once(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    with harness.losing("complete"), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    settled = await harness.broker.complete(lease, [ItemResult(output("input of a"))])
    assert settled.fenced
    assert (await drained(harness))["a"].output == output("input of a")
    assert await harness.broker.state("t", "a") is None


@story
async def test_a_failure_that_was_taken_unheard_is_charged_once(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    for attempt in range(1, 3):
        lease = await harness.claim()
        with harness.losing("release"), pytest.raises(BrokerUnavailable):
            await harness.broker.release(lease, failed())
        assert not await harness.broker.release(lease, failed())
        assert await harness.broker.state("t", "a") is (EntryState.QUEUED if attempt < 2 else None)
        await harness.advance(1.0)
    assert (await drained(harness))["a"].attempts == 2
    assert await harness.dead.count() == 1


@story
async def test_what_was_read_and_told_unheard_is_told_again(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    reading = asyncio.create_task(harness.broker.replies("g", cursor))
    with harness.losing("acknowledge"):
        await harness.advance(1.0)
    await harness.advance(1.0)
    assert not reading.done()
    assert not harness.keys() & {"e", "p"}
    reading.cancel()


@story
async def test_two_who_reap_at_once_take_a_lease_back_once(harness: Stand) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
    await harness.claim()
    another = await harness.another()
    await harness.advance(harness.lease_seconds + 0.5)
    await asyncio.gather(*(broker.reap() for broker in (harness.broker, harness.peer(), another) for _ in range(3)))
    assert sum(one.depth for one in await harness.broker.depths()) == MAX_BATCH
    await harness.advance(1.0)
    again = await harness.claim("gpu-1")
    assert len(again.entries) == MAX_BATCH
    assert await harness.broker.claim(slot("gpu-2"), AT_ONCE) == NoWork(None)
    await harness.answer(again)
    assert {reply.attempts for reply in (await drained(harness)).values()} == {2}
