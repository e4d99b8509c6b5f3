"""A broker limits the bytes that wait, in total and for each tenant, and leaves nothing behind."""

import pytest

from headway import errors
from headway.core.queue_limits import SMALL
from headway.model import Entry, ItemResult, Lease, Limit
from tests.contracts.brokers import AT_ONCE, MemoryHarness, RedisHarness, ask, failed, leave, slot
from tests.contracts.dedup_keys import admit, key, poll, refused, same, sharing, task

Roomy = MemoryHarness | RedisHarness
LARGE = "x" * 9_000
MOST = 1_000_000


pytestmark = pytest.mark.parametrize("harness", ["memory", "near", "valkey", "apart"], indirect=True)


@pytest.fixture
def bounds() -> dict[str, int]:
    return {"queue_bytes": MOST}


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
    await refused(harness, large("greedy", tier=0, limits=(limit,)))  # Others have used some of the free room.
    while sum(one.depth for one in await harness.broker.depths()) > 30:
        await harness.answer(await harness.claim())
    await admit(harness, large("greedy", limits=(limit,)))  # Refused entries weren't charged.


@pytest.mark.parametrize("name", ["", "a\0b", "ä"])
async def test_a_tenant_fills_its_part_of_the_room_whatever_it_is_called(harness: Roomy, name: str) -> None:
    await admit(harness, *(large(name, model="other") for _ in range(20)))
    verdicts = await harness.broker.enqueue([large(name, dedup_keys=(same(),)) for _ in range(40)])
    assert [verdict is None for verdict in verdicts[:30]] == [True] * 30
    assert verdicts[-1] is not None
    assert verdicts[-1].reason == "memory"
    left = harness.room
    await admit(harness, ask("x" * SMALL, tenant=name))
    assert harness.room == left, "small ones take none"
    assert (await refused(harness, ask("x" * (SMALL + 1), tenant=name))).reason == "memory"
    await admit(harness, large("another"))
    for model in ("m", "other"):
        while isinstance(lease := await harness.broker.claim(slot(model=model), AT_ONCE), Lease):
            await harness.answer(lease)
    assert harness.room == MOST


WAYS = ["answered", "dies", "late", "late on a GPU", "withdrawn", "withdrawn on a GPU", "cancelled", "handed back"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_whatever_becomes_of_an_entry_its_room_is_free_again(harness: Roomy, way: str, shared: bool) -> None:
    entries: list[Entry] = [sharing("first", task("first"), input=LARGE, queue_timeout=5.0, timeout=20.0)]
    if shared:
        entries = [
            sharing("first", task("first"), key(), same(), input=LARGE, queue_timeout=5.0, timeout=20.0),
            sharing("second", key(), input=LARGE, queue_timeout=5.0, timeout=10.0),
            sharing("third", same(), input=LARGE, queue_timeout=5.0, timeout=30.0),
            poll("fourth", "first"),
        ]
    await admit(harness, *entries)
    assert harness.room < MOST - 9_000
    lease = None if way in ("late", "withdrawn", "cancelled") else await harness.claim()
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
    elif way == "cancelled":
        await harness.broker.cancel_task("t", "first")
    elif way.startswith("withdrawn"):
        await leave(harness.broker, *entries)
        if lease is not None:
            await harness.broker.complete(lease, [ItemResult("x")])
    for _ in range(10):  # Each is overdue on time, but the reaper comes much later.
        await harness.advance(7.0)
        await harness.broker.reap()
    assert harness.room == MOST
    unread = shared or way in ("answered", "handed back")
    assert not harness.apart("P" if unread else "PR")
    if isinstance(harness, MemoryHarness):
        assert all(queued.reservation is None for queued in harness.broker._entries.values())
