"""A broker bounds what waits in bytes, and tenant by tenant, and nothing of it is left behind."""

import math
from collections.abc import Iterator

import pytest

from headway import errors
from headway.brokers.memory.broker import MemoryBroker
from headway.core.memory_room import SMALL
from headway.model import Entry, ItemResult, Limit
from tests.contracts.brokers import MemoryHarness, NearBroker, RedisHarness, ask, drained, failed, leave
from tests.contracts.dedup_keys import admit, key, poll, refused, same, sharing, task
from tests.servers.redis import SharedServers

Roomy = MemoryHarness | RedisHarness
LARGE = "x" * 9_000
MOST = 1_000_000


@pytest.fixture(params=["memory", "near", "valkey", "apart"])
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[Roomy]:
    made: Roomy
    if request.param in ("memory", "near"):
        made = MemoryHarness(queue_bytes=MOST, kind=MemoryBroker if request.param == "memory" else NearBroker)
    else:
        apart_from = 1_000.0 if request.param == "apart" else math.inf
        made = RedisHarness(servers.of("valkey"), queue_bytes=MOST, apart_from=apart_from)
    yield made
    endless = made.endless()
    made.close()
    assert endless == []


def large(tenant: str, **how: object) -> Entry:
    return ask(LARGE, tenant=tenant, **how)  # type: ignore[arg-type]


async def test_a_tenant_that_fills_the_memory_refuses_itself_alone(harness: Roomy) -> None:
    limit = Limit("key:greedy", "key", 60.0, 51.0)
    for _ in range(50):
        await admit(harness, large("greedy", tier=2, limits=(limit,)))
    verdict = await refused(harness, large("greedy", tier=0, limits=(limit,)))
    assert (verdict.code, verdict.reason, verdict.retry_after) == (errors.SCARCE, "memory", 1.0)
    assert not harness.broker.memory_pressure
    for number in range(9):
        await admit(harness, large("other" if number % 2 else f"tenant {number}", tier=2))
    await harness.answer(await harness.claim(limit=1))
    await refused(harness, large("greedy", tier=0, limits=(limit,)))  # Others have taken of what was free.
    while sum(one.depth for one in await harness.broker.depths()) > 30:
        await harness.answer(await harness.claim())
    await admit(harness, large("greedy", limits=(limit,)))  # It was not charged for what was refused.


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "ä"])
async def test_a_tenant_fills_its_part_of_the_room_whatever_it_is_called(harness: Roomy, name: str) -> None:
    verdicts = await harness.broker.enqueue([large(name) for _ in range(60)])
    assert [verdict is None for verdict in verdicts[:50]] == [True] * 50
    assert verdicts[-1] is not None
    assert verdicts[-1].reason == "memory"
    while any(one.depth for one in await harness.broker.depths()):
        await harness.answer(await harness.claim())
    assert harness.room == MOST


async def test_all_queues_share_the_room(harness: Roomy) -> None:
    for _ in range(30):
        await admit(harness, large("greedy", model="other"))
    verdicts = await harness.broker.enqueue([large("greedy") for _ in range(30)])
    assert verdicts[0] is None
    assert verdicts[-1] is not None
    assert verdicts[-1].reason == "memory"
    await admit(harness, large("another"))


async def test_a_small_entry_gets_in_however_full_the_memory_is(harness: Roomy) -> None:
    for _ in range(50):
        await admit(harness, large("greedy"))
    left = harness.room
    await admit(harness, ask("x" * SMALL, tenant="greedy"))
    assert harness.room == left
    assert (await refused(harness, ask("x" * (SMALL + 1), tenant="greedy"))).reason == "memory"


async def test_who_joins_another_takes_room_too(harness: Roomy) -> None:
    await admit(harness, *(sharing(f"{n}", same(), input=LARGE) for n in range(50)))
    assert (await refused(harness, sharing("more", same(), input=LARGE))).reason == "memory"
    await harness.answer(await harness.claim())
    assert len(await drained(harness)) == 50
    assert harness.room == MOST


WAYS = ["answered", "dies", "late", "late on a GPU", "withdrawn", "withdrawn on a GPU", "handed back"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_whatever_becomes_of_an_entry_its_room_is_free_again(harness: Roomy, way: str, shared: bool) -> None:
    entries: list[Entry] = [ask(LARGE, id="first", queue_timeout=5.0, timeout=20.0)]
    if shared:
        entries = [
            sharing("first", task("first"), key(), same(), input=LARGE, queue_timeout=5.0, timeout=20.0),
            sharing("second", key(), input=LARGE, queue_timeout=5.0, timeout=10.0),
            sharing("third", same(), input=LARGE, queue_timeout=5.0, timeout=30.0),
            poll("fourth", "first"),
        ]
    await admit(harness, *entries)
    assert harness.room < MOST - 9_000
    lease = None if way in ("late", "withdrawn") else await harness.claim()
    if lease is not None and way == "answered":
        await harness.answer(lease)
    elif lease is not None and way == "dies":
        await harness.broker.release(lease, failed())
        for _ in range(5):
            await harness.advance(1.0)
            if harness.room < MOST:
                await harness.broker.release(await harness.claim(), failed())
    elif lease is not None and way == "handed back":
        await harness.broker.release(lease)
        await harness.answer(await harness.claim())
    elif way.startswith("withdrawn"):
        await leave(harness.broker, *entries)
        if lease is not None:
            await harness.broker.complete(lease, [ItemResult("x")])
    for _ in range(10):  # Each is overdue at its time, and the reaper comes much later.
        await harness.advance(7.0)
        await harness.broker.reap()
    assert harness.room == MOST
    assert harness.large_inputs == []
    if isinstance(harness, MemoryHarness):
        assert all(queued.reservation is None for queued in harness.broker._entries.values())
