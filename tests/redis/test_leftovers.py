"""Leftovers in the server when everything has been answered, and when processes vanish; and the cost of waiting."""

from __future__ import annotations

import asyncio

import pytest

from headway.brokers.redis import function_library
from headway.core.departure import Rule
from headway.core.health import DEGRADED_AFTER
from headway.model import DeadLetter, ItemResult, Lease, NoWork, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Fixed, ask, drained, failed, slot, story
from tests.redis.stand import Stand
from tests.servers.redis import KINDS

FIGURES = {"q", "qs"}
HOUSEKEEPING = {"m", "f", "c", "g", "h", "hf", "hp", "hc", "hd", "hn"}
"""Keys of the reaper, the watch, the woken slots, the gateways, the healthy slots, their factors and their codes."""
LETTERS = {"ql", "z", "zl", "o", "on", "oc", "ou", "o:t"}


async def acknowledged(harness: Stand, gateway: str = "g") -> int:
    """Read and acknowledge all replies there are; how many."""
    cursor = 0
    while True:
        reading = asyncio.ensure_future(harness.broker.replies(gateway, cursor))
        await harness.advance(1.0)
        if not reading.done():
            reading.cancel()
            return cursor
        _, cursor = await reading


@pytest.mark.parametrize("kind", KINDS)
@story
async def test_when_all_is_answered_and_read_only_figures_are_left(harness: Stand) -> None:
    await harness.healthy("gpu-0", "gpu-1")
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("gpu-1"), None))
    for round in range(20):
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
    assert await acknowledged(harness) > 150
    await harness.healthy("gpu-0", "gpu-1")
    await harness.reaping(12.0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert harness.keys() <= FIGURES | HOUSEKEEPING | {"r:g"}
    assert harness.server.command("XLEN", harness.key("r:g")) == 0
    await rest(harness, 130.0)
    assert harness.keys() <= FIGURES | {"m", "f", "c", "hn"}


@story
async def test_dead_letters_are_all_that_is_left_of_the_dead(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    while any(one.depth for one in await harness.broker.depths()):
        claimed = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(claimed, Lease):
            await harness.broker.release(claimed, failed())
        await harness.advance(0.5)
    assert await acknowledged(harness) == 2
    await harness.reaping(12.0)
    left = harness.keys()
    culprits = {"ca"} | {key for key in left if key.startswith("kc:")}
    assert harness.keys() <= FIGURES | HOUSEKEEPING | LETTERS | culprits | {"i", "r:g"}
    for letter in await harness.dead.list():
        assert await harness.dead.remove(letter.entry.id)
    assert harness.keys() <= FIGURES | HOUSEKEEPING | culprits | {"on", "ql", "i", "r:g"}


@story
async def test_letters_of_a_tenant_that_has_had_none_for_long_make_room_for_others(harness: Stand) -> None:
    """The list of its letters has ended before those that all letters have in common."""
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
    """Let time pass without any call, but for a reaper in the end, which waits a little before it sweeps."""
    await harness.advance(seconds - 11.0)
    for _ in range(4):
        await harness.reaping(0.2)
        await harness.advance(3.6)
    await harness.reaping(0.2)


@story
async def test_a_gateway_that_vanished_is_swept_away_with_its_replies(harness: Stand) -> None:
    """The gateway asked, and never read."""
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
    assert await acknowledged(harness, "here") == 2
    left = harness.keys()
    assert "e" not in left


@story
async def test_what_a_vanished_gateway_asked_for_leaves_nothing_either(harness: Stand) -> None:
    """All processes are gone for minutes; when some are back, it takes time until the entry is at its end."""
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


@story
async def test_a_gateway_that_asks_seldom_is_not_swept_away(harness: Stand) -> None:
    for number in range(3):
        await rest(harness, 90.0)
        await harness.broker.enqueue([ask(id=f"id {number}")])
        await rest(harness, 11.0)
        await harness.answer(await harness.claim())
        await rest(harness, 11.0)
        assert f"id {number}" in await drained(harness)


@story
async def test_slots_of_a_dead_host_do_not_keep_requests_waiting(harness: Stand) -> None:
    """Each of them would be rung for first, and waited for."""
    dead = [f"dead-{number}" for number in range(8)]
    for worker in (*dead, "alive"):
        await harness.broker.heartbeat(WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY))
        assert await harness.broker.claim(slot(worker), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("alive"), None))
    for _ in range(4):
        await harness.reaping(1.0)
        await harness.healthy("alive")
    assert harness.idle() == 1
    await harness.broker.enqueue([ask()])
    await harness.settle()
    assert listening.done()


@story
async def test_a_slot_that_was_only_late_with_its_heartbeat_claims_again(harness: Stand) -> None:
    await harness.healthy("late")
    assert await harness.broker.claim(slot("late"), AT_ONCE) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot("late"), None))
    await harness.reaping(DEGRADED_AFTER - 0.1)
    assert not listening.done()
    await harness.reaping(0.3)
    assert listening.done()
    assert harness.idle() == 0


@story
async def test_workers_that_vanished_leave_the_registry(harness: Stand) -> None:
    await harness.healthy("gone", "here")
    for _ in range(125):
        await harness.advance(1.0)
        await harness.healthy("here")
    await harness.reaping(11.0)
    assert [worker.worker_id for worker in await harness.broker.workers()] == ["here"]
    assert harness.server.command("HKEYS", "headway:{fleet}:w") == [b"here"]


def calls(harness: Stand) -> dict[str, int]:
    """Calls of each command since the statistics were reset, but for what the tests themselves ask."""
    found = harness.server.command("INFO", "commandstats")
    ours = ("cmdstat_fcall", "cmdstat_blpop", "cmdstat_xread", "cmdstat_function|load")
    return {name.removeprefix("cmdstat_"): found[name]["calls"] for name in ours if name in found}


@story
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
    assert not any(task.done() for task in (*listeners, *readers))
    for task in (*listeners, *readers):
        task.cancel()
    await asyncio.gather(*listeners, *readers, return_exceptions=True)


@story
async def test_a_batch_that_is_held_wakes_one_slot(harness: Stand) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=5.0, rate=1e6))
    await harness.broker.enqueue([ask()])
    listeners = []
    for number in range(5):
        wait = await harness.broker.claim(slot(f"gpu-{number}"), patient)
        assert isinstance(wait, NoWork)
        listeners.append(asyncio.create_task(harness.broker.wait_for_work(slot(f"gpu-{number}"), wait.until)))
        await harness.settle()
    harness.server.command("CONFIG", "RESETSTAT")
    await harness.advance(4.9)
    assert calls(harness) == {}
    assert not any(listener.done() for listener in listeners)
    await harness.advance(0.11)
    assert sum(listener.done() for listener in listeners) == 1
    [awake] = [number for number, listener in enumerate(listeners) if listener.done()]
    assert isinstance(await harness.broker.claim(slot(f"gpu-{awake}"), patient), Lease)
    await harness.advance(10.0)
    assert sum(listener.done() for listener in listeners) == 1
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)
