"""Nothing stays in the server forever: what is left after all answers or vanished processes, and all expiries."""

import asyncio
import re

import pytest

from headway.brokers.redis import function_library
from headway.brokers.redis.board import RedisBoard
from headway.core.departure_board import RECENT_BYTES
from headway.core.health import DEGRADED_AFTER
from headway.model import Capacity, Cause, DeadLetter, DedupKey, DedupKind, ItemResult, Lease, Limit, NoWork
from headway.model.board import BatchDeparture, Notice, RequestFlow
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, attend, beat, drained, fail_all, failed, output, slot
from tests.contracts.dedup_keys import key, same, sharing, task
from tests.redis.stand import Stand

FIGURES = {"q", "qs"}
HOUSEKEEPING = {"m", "f", "c", "g", "h", "hf", "hp", "hc", "hd", "hn"}
"""Keys for the reaper, the watch, woken slots, gateways, healthy slots, and their factors and codes."""
LETTERS = {"ql", "z", "zl", "o", "on", "oc", "ou", "o:t"}


async def test_when_all_is_answered_and_read_only_figures_are_left(harness: Stand) -> None:
    await harness.healthy("gpu-0", "gpu-1")
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("gpu-1"), None))
    for round in range(6):
        entries = [
            ask(tier=number % 3, tenant=f"t-{number % 4}", queue_timeout=0.2 if number % 5 == 4 else 60.0)
            for number in range(MAX_BATCH + 3)
        ]
        await harness.broker.enqueue(entries)
        await harness.broker.withdraw([(entries[1].tenant, entries[1].id, 0)], "g")
        lease = await harness.claim()
        if round % 3 == 0:
            await harness.broker.release(lease)
            lease = await harness.claim()
        elif round % 3 == 1:
            await harness.broker.release(lease, failed())
            await harness.advance(0.1)
            lease = await harness.claim()
        gone = lease.entries[0]
        await harness.broker.withdraw([(gone.tenant, gone.id, 0)], "g")
        await harness.broker.complete(lease, [ItemResult("x") for _ in lease.entries])
        await harness.reaping(0.5)
        while isinstance(claimed := await harness.broker.claim(slot(), AT_ONCE), Lease):
            await harness.answer(claimed)
    assert await harness.acknowledged() > 45
    await harness.healthy("gpu-0", "gpu-1")
    await harness.reaping(12.0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert harness.keys() <= FIGURES | HOUSEKEEPING | {"r:g"}
    assert harness.server.command("XLEN", harness.key("r:g")) == 0
    await rest(harness, 130.0)
    assert harness.keys() <= FIGURES | {"m", "f", "c", "hn"}


async def test_dead_letters_are_all_that_is_left_of_the_dead(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    await fail_all(harness)
    assert await harness.acknowledged() == 2
    await harness.reaping(12.0)
    left = harness.keys()
    culprits = {"ca"} | {key for key in left if key.startswith("kc:")}
    assert harness.keys() <= FIGURES | HOUSEKEEPING | LETTERS | culprits | {"i", "r:g"}
    for letter in await harness.dead.list():
        assert await harness.dead.remove(letter.entry.id)
    assert harness.keys() <= FIGURES | HOUSEKEEPING | culprits | {"on", "ql", "i", "r:g"}


async def test_letters_of_a_tenant_that_has_had_none_for_long_make_room_for_others(harness: Stand) -> None:
    """Its own list of letters expires before the shared one."""
    for tenant, count in (("a", 12), ("b", 8)):
        for number in range(count):
            entry = ask(4_000_000 * "x", id=f"{number}", tenant=tenant)
            await harness.dead.add(
                DeadLetter(entry=entry, error="e", cause="raised", attempts=2, worker="gpu-0", died_at=1.0)
            )
        harness.server.command("DEL", harness.key(f"o:{tenant}"))
    there = await harness.dead.list()
    assert [letter.entry.tenant for letter in there].count("b") == 8
    assert len(there) == 16
    assert await harness.dead.find("3", "a") == []


async def rest(harness: Stand, seconds: float) -> None:
    """Let time pass without any call. At the end a reaper comes, which waits a little before it sweeps."""
    await harness.advance(seconds - 11.0)
    for _ in range(4):
        await harness.reaping(0.2)
        await harness.advance(3.6)
    await harness.reaping(0.2)


async def test_a_gateway_that_vanished_is_swept_away_with_its_replies(harness: Stand) -> None:
    await harness.broker.enqueue([ask(gateway="gone"), ask(gateway="here")])
    await harness.answer(await harness.claim())
    await rest(harness, 40.0)
    assert {"r:gone", "r:here", "e"} <= harness.keys()
    await harness.broker.enqueue([ask(gateway="here")])
    await harness.answer(await harness.claim())
    await rest(harness, 40.0)
    left = harness.keys()
    assert "r:gone" not in left
    assert len(await drained(harness, "here")) == 2
    assert await harness.acknowledged("here") == 2
    left = harness.keys()
    assert "e" not in left


async def test_what_a_vanished_gateway_asked_for_leaves_nothing_either(harness: Stand) -> None:
    """All processes are gone for minutes. When some are back, it takes time for the entry to end."""
    await harness.broker.enqueue([ask(gateway="gone", queue_timeout=1000.0, timeout=1000.0)])
    await harness.claim()
    await rest(harness, 500.0)
    assert {"e", "g"} <= harness.keys()
    await harness.advance(1.0)
    await harness.claim("gpu-1")
    await rest(harness, 600.0)
    assert {"r:gone"} <= harness.keys(), "it may be there after all, and reads what it has waited for"
    await rest(harness, 100.0)
    assert harness.keys() <= FIGURES | {"m", "f", "c", "i"}


async def test_a_gateway_that_asks_seldom_is_not_swept_away(harness: Stand) -> None:
    for number in range(3):
        await rest(harness, 90.0)
        await harness.broker.enqueue([ask(id=f"id {number}")])
        await rest(harness, 11.0)
        await harness.answer(await harness.claim())
        await rest(harness, 11.0)
        assert f"id {number}" in await drained(harness)


async def test_a_slot_that_was_only_late_with_its_heartbeat_claims_again(harness: Stand) -> None:
    await harness.healthy("late")
    assert await harness.broker.claim(slot("late"), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("late"), None))
    await harness.reaping(DEGRADED_AFTER - 0.1)
    assert not listening.done()
    await harness.reaping(0.3)
    assert listening.done()
    assert harness.idle() == 0


async def test_workers_that_vanished_leave_the_registry(harness: Stand) -> None:
    await harness.healthy("gone", "here")
    for _ in range(25):
        await harness.advance(5.0)
        await harness.healthy("here")
    await harness.reaping(11.0)
    assert [worker.worker_id for worker in await harness.broker.workers()] == ["here"]
    assert harness.server.command("HKEYS", "headway:{fleet}:w") == [b"here"]


def calls(harness: Stand) -> dict[str, int]:
    """Calls of each command since the statistics were reset, except the tests' own."""
    found = harness.server.command("INFO", "commandstats")
    ours = ("cmdstat_fcall", "cmdstat_blpop", "cmdstat_xread", "cmdstat_function|load")
    return {name.removeprefix("cmdstat_"): found[name]["calls"] for name in ours if name in found}


async def test_a_fleet_at_rest_asks_nothing_but_who_reaps(harness: Stand) -> None:
    listeners = []
    for number in range(5):
        assert await harness.broker.claim(slot(f"gpu-{number}"), AT_ONCE) == NoWork(None)
        listeners.append(asyncio.create_task(harness.broker.wait_for_work(slot(f"gpu-{number}"), None)))
    readers = [asyncio.create_task(harness.broker.replies(f"g-{number}", 0)) for number in range(2)]
    await harness.settle()
    harness.server.command("CONFIG", "RESETSTAT")
    await harness.advance(60.0)
    assert calls(harness) == {}
    await harness.reaping(10.0)
    # One for each model.
    assert set(calls(harness)) == {"fcall"}
    assert calls(harness)["fcall"] <= 2 * (10.0 / function_library.REAP_EVERY + 2)
    assert not any(one.done() for one in (*listeners, *readers))
    for one in (*listeners, *readers):
        one.cancel()
    await asyncio.gather(*listeners, *readers, return_exceptions=True)


FLOW = RequestFlow(1.0, {"paid": 2}, ended={"m": 2}, latencies={"paid": {3: 2}})


@pytest.mark.parametrize("first", ["one that knew it", "a new one"])
async def test_a_loss_of_the_brokers_data_is_told_with_its_instant(harness: Stand, first: str) -> None:
    await harness.board.post(Notice("a", flow=FLOW))
    assert (await harness.board.history())[1].lost_at == 0.0
    await harness.advance(60)
    harness.server.command("FLUSHALL")
    posts = [harness.board, harness.board_peer]  # The peer didn't know the lost board.
    lost = harness.now()
    for board in posts if first == "one that knew it" else reversed(posts):
        await board.post(Notice("b", flow=FLOW))
    await harness.advance(5)
    await harness.board.post(Notice("a", flow=FLOW))
    for board in (*posts, RedisBoard(harness._links[1])):
        rows, news = await board.history()
        assert news.lost_at == pytest.approx(lost, abs=harness.grain)
        assert len(rows) == 2
        assert (await board.read("0-0")).lost_at == news.lost_at


async def test_whole_notices_take_bounded_memory(harness: Stand) -> None:
    batch = BatchDeparture("host/gpu-0", "m", "1", 7.25, 3, 0.75, "headway", (1, 0, 2))
    large = Notice("a", (batch,) * 1000)
    for _ in range(3 * RECENT_BYTES // 50_000):
        await harness.board.post(large)
    taken = int(harness.server.command("MEMORY", "USAGE", "headway:{fleet}:board"))
    assert RECENT_BYTES / 2 < taken < 1.3 * RECENT_BYTES
    assert not harness.endless()


NUMBERS = function_library._NUMBERS


def longest(key: str) -> float:
    """Seconds until a key must be gone if nobody comes back."""
    name = re.sub(r"^headway:\{[^}]*\}:", "", key)
    if name.startswith("k:"):
        return 600.0
    if name.startswith("r:"):
        return NUMBERS["STREAM_SECONDS"]
    if name == "q":
        return NUMBERS["FIGURES_SECONDS"]
    if name.partition(":")[0] in {"z", "zl", "o", "on", "oc", "ou", "ql"}:
        return NUMBERS["LETTER_SECONDS"]
    if re.fullmatch(r"k[bund]|ko:.*|qs", name):
        return NUMBERS["ACCOUNT_SECONDS"]
    if name == "w" and "{limits}" in key:
        return NUMBERS["LIFE_SECONDS"] + 3700.0
    return NUMBERS["LIFE_SECONDS"]


async def everything(harness: Stand) -> None:
    """Use every feature, and leave entries waiting, running, failed, joined, unread, kept, dead and owed."""
    limit = Limit("key:k", "key", 1.0, 60.0)
    await harness.healthy("gpu-0", "gpu-1")
    for worker in ("gpu-0", "gpu-1"):
        await harness.broker.claim(slot(worker), AT_ONCE)
    await harness.broker.enqueue([ask("dies", id="dies", tenant="poison", gateway="gone")])
    await fail_all(harness)
    await harness.broker.enqueue(
        [sharing("kept", task("kept", 600.0), key("kept", keep=600.0), same("kept", 600.0), limits=(limit,) * 1)]
    )
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("an output") for _ in lease.entries])
    await harness.broker.enqueue([ask(gateway="unread", limits=(limit,)) for _ in range(50)])
    await harness.broker.enqueue([sharing(id, task(id), key("k"), gateway="joins") for id in ("leads", "follows")])
    await harness.broker.withdraw([("t", "leads", 0)], "joins")
    await harness.broker.enqueue([ask(gateway="unread") for _ in range(10)])  # Enough for tenants to be counted.
    await harness.broker.release(await harness.claim(), failed(Cause.CRASHED))
    await harness.claim("gpu-1")
    await harness.broker.enqueue([ask(queue_timeout=1.0, tier=tier, tenant="in time") for tier in (0, 1, 2)])
    await harness.broker.enqueue([ask(tenant="poison")])
    await attend(harness.fleet, "a")
    await harness.fleet.acquire_leadership("a", 1.0)
    await harness.fleet.publish(Capacity(model="m", healthy=1, degraded=0, items_per_second=1, usable_per_second=1))
    await beat(harness.broker, "gpu-1", model="other")


async def test_all_keys_end_when_all_processes_are_gone(harness: Stand) -> None:
    names: set[str] = set()
    for how in (everything, lambda harness: harness.reaping(11.0)):
        await how(harness)
        ends = harness.server.ends()
        assert {key: left for key, left in ends.items() if not 0 <= left <= longest(key)} == {}
        names |= {key.partition("}:")[2].partition(":")[0] for key in ends}
    assert names >= {"q", "e", "p", "l1", "a1", "t1", "tw", "d", "x", "y", "s", "n", "h", "r", "g", "m", "v"}
    assert names >= {"vs", "vd", "k", "kb", "kd", "kn", "ko", "z", "o", "on", "oc", "ou", "w", "j", "capacity"}


async def test_whoever_is_there_keeps_what_is_stored(harness: Stand) -> None:
    await everything(harness)
    for name in harness.server.ends():
        if longest(name) != 600.0:
            harness.server.command("EXPIRE", name, 30)
    await harness.reaping(21.0)
    await attend(harness.fleet, "a")
    left = {name.partition("}:")[2].partition(":")[0] for name, left in harness.server.ends().items() if left <= 30}
    renewed_by_others = {"b", "z", "zl", "o", "on", "oc", "ou", "ql", "ko", "kc", "w", "j", "capacity"}
    # Followers of a flight end long before their list. Queues stay listed while they are used.
    assert left <= renewed_by_others | {"v", "qs"}


async def test_a_queue_whose_figures_have_ended_begins_anew(harness: Stand) -> None:
    """Leftovers that expire later aren't mistaken for waiting entries."""
    await harness.broker.enqueue([ask(id=f"old {number}") for number in range(3)])
    await harness.claim(limit=1)
    harness.server.command("DEL", harness.key("q"))
    assert await harness.broker.enqueue([ask(id="new", dedup_keys=(DedupKey(DedupKind.KEY, "k", b"", 1.0),))]) == [None]
    assert [entry.id for entry in (await harness.claim()).entries] == ["new"]
    assert [one.depth for one in await harness.broker.depths() if one.model == "m"] == [0, 0, 0]


def commands(harness: Stand) -> dict[str, int]:
    """Calls of each command, except those that open or maintain a connection."""
    stats = harness.server.command("INFO", "commandstats")
    calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
    return {
        name: count
        for name, count in calls.items()
        if name.partition("|")[0] not in ("client", "hello", "info", "ping")
    }


async def test_an_enqueue_makes_as_few_commands_for_many_tenants_as_for_one(harness: Stand) -> None:
    async def made(tenants: int) -> int:
        before = commands(harness)
        assert await harness.broker.enqueue([ask(tenant=f"t {n % tenants}") for n in range(8)]) == [None] * 8
        return sum(commands(harness).values()) - sum(before.values())

    await harness.broker.enqueue([ask()])
    assert await made(8) == await made(1)


async def test_who_joins_the_same_answer_costs_no_end_of_its_own(harness: Stand) -> None:
    async def ends(count: int) -> int:
        before = commands(harness).get("expire", 0)
        await harness.broker.enqueue([sharing(f"of {count}: {number}", key()) for number in range(count)])
        return commands(harness).get("expire", 0) - before

    await harness.broker.enqueue([sharing("first", key())])
    few = await ends(4)
    assert await ends(200) <= few


async def test_who_gets_a_kept_answer_costs_a_look_at_its_key_and_one_piece_of_replies(harness: Stand) -> None:
    await harness.broker.enqueue([sharing("first", key()), sharing("another", key("k2"))])
    await harness.answer(await harness.claim())
    _, read = await harness.broker.replies("g", 0)
    begun = commands(harness)
    joining = [sharing(f"one {number}", key(("k", "k2")[number % 2])) for number in range(64)]
    assert await harness.broker.enqueue(joining) == [None] * 64
    done = {name: calls - begun.get(name, 0) for name, calls in commands(harness).items()}
    assert done["xadd"] == 2
    assert done["hget"] <= 3 * 64
    assert sum(calls for name, calls in done.items() if name != "hget") <= 32
    replies = await drained(harness, after=read)
    assert {id: reply.output for id, reply in replies.items()} == {entry.id: output("asked") for entry in joining}
