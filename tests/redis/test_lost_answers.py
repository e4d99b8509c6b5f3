"""Lost answers, data or functions: calls are repeated, nothing happens twice, and what is gone is offered again."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from headway.brokers.redis import function_library
from headway.errors import BrokerUnavailable
from headway.model import Completion, EntryState, ItemResult, NoWork, QueueName
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, beat, drained, failed, granted, ids, output, slot
from tests.redis.plays import WORKERS, Play
from tests.redis.stand import Stand
from tests.servers.redis import RunningServer


async def lost_claim(harness: Stand) -> None:
    with harness.losing("claim"), pytest.raises(BrokerUnavailable):
        await harness.broker.claim(slot(), AT_ONCE)


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
async def test_an_offer_that_is_overtaken_by_what_was_read_brings_nothing_back(harness: Stand, step: str) -> None:
    broker = harness.broker
    entry = replace(ask(id="job", dedup_keys=(common.task("job"),)), claims=step == "claim_id")
    await broker.enqueue([entry])
    await harness.answer(await harness.claim())
    with harness.overtaken(step) as arrives:
        offered = asyncio.create_task(broker.enqueue([entry]))
        replies, cursor = await broker.replies("g", 0)
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


async def test_who_left_before_the_lease_was_heard_of_mixes_nothing_up(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id=f"id {number}") for number in range(5)])
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


async def test_a_lease_that_everybody_left_is_given_up(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await lost_claim(harness)
    await harness.broker.withdraw([("t", "a", 0)], "g")
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert not harness.keys() & {"x", "y", "n"}
    await harness.broker.enqueue([ask(id="b")])
    assert ids((await harness.claim()).entries) == ["b"]


async def test_a_lease_that_lapsed_unheard_is_granted_anew(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await lost_claim(harness)
    await harness.reaping(harness.lease_seconds + 1.0)
    await harness.answer(await harness.claim())
    assert (await drained(harness))["a"].attempts == 2


@pytest.mark.parametrize("shards", [2])
async def test_a_guest_asks_again_where_it_asked_before(harness: Stand) -> None:
    """The guest's home shard doesn't know the lease."""
    workers = [f"gpu-{number}" for number in range(8)]
    for _ in range(4):
        for worker in workers:
            await beat(harness.broker, worker)
        await harness.advance(1.01)
    guest = min(harness.at_home()[1])
    await (await harness.another(shards=1)).enqueue([ask() for _ in range(2 * MAX_BATCH)])
    assert await harness.broker.claim(slot(guest), AT_ONCE) == NoWork(None)
    await harness.broker.wait_for_work(slot(guest), None)  # Until it sees that the other shard is behind.
    with harness.losing("claim"), pytest.raises(BrokerUnavailable):
        await harness.broker.claim(slot(guest), AT_ONCE)
    lease = await granted(harness.broker, slot(guest))
    await harness.answer(lease)
    assert harness.server.command("HLEN", harness.key("x")) == 0
    assert (await harness.broker.loads())[QueueName("m")].departures == 1


async def test_an_outcome_that_was_taken_unheard_is_told_once(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    with harness.losing("complete"), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    assert (await harness.broker.complete(lease, [ItemResult(output("input of a"))])).fenced
    assert (await drained(harness))["a"].output == output("input of a")
    assert await harness.broker.state("t", "a") is None


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


def dumped(server: RunningServer) -> dict[bytes, bytes]:
    return {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}


def restore(server: RunningServer, keys: dict[bytes, bytes]) -> None:
    server.flush()
    for key, value in keys.items():
        server.command("RESTORE", key, 3_600_000, value)


async def test_a_loss_shows_in_the_epoch_and_what_was_lost_is_let_in_again(harness: Stand) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([ask(id="before")])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, after=cursor) == {}
    await harness.broker.enqueue([entry])
    before = harness.broker.epoch
    harness.server.flush()
    await harness.advance(0.1)
    await harness.broker.reap()
    assert harness.broker.epoch != before
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.settle()  # Replies read while the loss is being noticed come once.
    assert list(await drained(harness)) == ["a"]


@pytest.mark.parametrize("kept", [False, True], ids=["flushed", "failover"])
async def test_a_lease_of_before_a_loss_is_fenced_off_after_it(harness: Stand, kept: bool) -> None:
    """Also if only the lease is lost: the new primary hasn't heard of the last claims, and grants others instead."""
    entries = [ask(id="a"), ask(id="b")]
    await harness.broker.enqueue(entries)
    replica = dumped(harness.server)
    stale = await harness.claim("gpu-0", limit=1)
    restore(harness.server, replica if kept else {})
    await harness.advance(0.1)
    await harness.peer().enqueue(entries)
    fresh = await granted(harness.peer(), slot("gpu-1"))
    assert not await harness.broker.extend(stale)
    assert not await harness.broker.release(stale, failed())
    assert await harness.broker.complete(stale, [ItemResult("stale")]) == Completion(0, 0, fenced=True)
    await harness.answer(fresh)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {id: output(f"input of {id}") for id in "ab"}


async def test_slots_that_sleep_through_a_loss_are_woken_after_it(harness: Stand) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    harness.server.flush()
    await harness.advance(0.1)
    await harness.peer().enqueue([ask(id="a")])
    await harness.reaping(3.0)
    assert listening.done()
    assert ids((await harness.claim()).entries) == ["a"]


def cut(server: RunningServer, command: str) -> int:
    """Cut the connections that wait in a command, or sent it last. Returns their number."""
    ids = [int(line["id"]) for line in server.command("CLIENT LIST") if line["cmd"] == command]
    for id in ids:
        server.command("CLIENT", "KILL", "ID", id)
    return len(ids)


async def disturbed(harness: Stand, seconds: float, disturb: Callable[[], object]) -> int:
    """Let requests and workers go on with a disturbance now and then. Returns the number of failed calls."""
    play = Play(harness, seed=1, fails=0.0)
    play.start(*WORKERS[:4])
    await play.rush(seconds, disturb)
    await harness.advance(5.0)
    assert len(play.asked) > 20
    await play.close()
    return play.troubles


@pytest.mark.parametrize("command", [("FLUSH",), ("DELETE", function_library.VERSION)], ids=["flushed", "deleted"])
async def test_requests_do_not_notice_that_functions_are_gone(harness: Stand, command: Sequence[str]) -> None:
    def disturb() -> None:
        if harness.server.command("FUNCTION", "LIST"):
            harness.server.command("FUNCTION", *command)

    assert await disturbed(harness, 0.5, disturb) == 0


async def test_functions_that_many_miss_at_once_are_brought_once(harness: Stand) -> None:
    harness.server.command("FUNCTION", "FLUSH")
    harness.server.command("CONFIG", "RESETSTAT")
    await asyncio.gather(*(harness.broker.enqueue([ask()]) for _ in range(20)))
    assert harness.server.command("INFO", "commandstats")["cmdstat_function|load"]["calls"] == 1


async def test_connections_that_are_cut_cost_nothing_but_time(harness: Stand) -> None:
    cuts, commands = Counter[str](), itertools.cycle(["fcall", "blpop", "xread"])

    def disturb() -> None:
        command = next(commands)
        cuts[command] += cut(harness.server, command)

    assert await disturbed(harness, 1.5, disturb) > 0
    assert len(cuts) == 3 and min(cuts.values()) > 3


async def test_a_reader_hears_once_that_its_connection_broke(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    lease = await harness.claim()
    reading = asyncio.create_task(harness.broker.replies("g", 0))
    await harness.settle()
    assert cut(harness.server, "xread") == 1  # One for all queues.
    with pytest.raises(BrokerUnavailable):
        await reading
    await harness.answer(lease)
    for _ in range(2):
        replies, cursor = await harness.broker.replies("g", 0)
        assert ([reply.id for reply in replies], cursor) == (["a"], 1)
    reading = asyncio.create_task(harness.broker.replies("g", 1))
    await harness.advance(10.0)
    assert not reading.done()
    reading.cancel()


async def test_a_slot_hears_that_its_bell_broke_and_is_woken_by_the_next_one(harness: Stand) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    assert cut(harness.server, "blpop") == 1
    with pytest.raises(BrokerUnavailable):
        await listening
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    assert not listening.done()
    await harness.peer().enqueue([ask()])
    await listening
