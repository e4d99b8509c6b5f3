"""The server runs out of memory: nothing new is admitted, and everything admitted is finished."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.core.retention import KEPT
from headway.model import DedupKey, DedupKind, Entry, EntryState, Failure, ItemResult, Limit, NoWork, Reply
from tests.contracts.brokers import AT_ONCE, ask, attend, beat, drained, failed, ids, slot
from tests.redis.stand import Stand
from tests.servers.redis import RedisServer


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(kind, tmp_path) as own:
        # An empty server frees a tenth of its memory when it shrinks the buffer that the functions came in.
        own.command("SET", "ballast", "x" * 2**23)
        yield own


@pytest.fixture
def harness(server: RedisServer) -> Iterator[Stand]:
    made = Stand(server)
    yield made
    made.close()


def fill(server: RedisServer, share: float) -> None:
    """Make `share` of the server's memory count as used from now on; 0 removes the limit."""
    limit = int(server.command("INFO", "memory")["used_memory"] / share) if share else 0
    server.command("CONFIG", "SET", "maxmemory", limit)


async def offered(harness: Stand, *entries: Entry) -> Sequence[Failure | None]:
    await harness.advance(1.1)
    await harness.broker.enqueue([])
    await harness.broker.enqueue(entries[:1])
    await harness.settle()
    return await harness.broker.enqueue(entries)


def for_memory(failure: Failure | None) -> bool:
    assert failure is not None
    assert failure.retry_after is not None
    return (failure.code, failure.reason) == (errors.SCARCE, "memory") and failure.retry_after > 0.0


@pytest.mark.parametrize("share", [0.9, 2.0])
async def test_what_was_taken_in_comes_to_its_end(harness: Stand, server: RedisServer, share: float) -> None:
    known = [ask(id=f"id {number}") for number in range(6)]
    await harness.broker.enqueue(known[:3])
    lease = await harness.claim()
    await harness.broker.enqueue(known[3:])
    fill(server, share)
    assert await offered(harness, *known) == [None] * 6
    verdicts = await harness.broker.enqueue([ask(), *known, ask()])
    assert [verdict is None for verdict in verdicts] == [False, *[True] * 6, False]
    assert for_memory(verdicts[0])
    assert for_memory(verdicts[-1])
    assert await harness.broker.extend(lease)
    assert await harness.broker.release(lease, failed())
    await beat(harness.broker, "gpu-0")
    await attend(harness.fleet, "a")
    assert await harness.fleet.acquire_leadership("a", 1.0) == 0.0
    assert await harness.broker.state("t", "id 0") is EntryState.QUEUED
    await harness.broker.withdraw([("t", "id 5", 0)], "g")
    await harness.reaping(0.5)
    ran = 0
    while ran < 5:
        lease = await harness.claim()
        ran += len(lease.entries)
        await harness.answer(lease)
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert set(await drained(harness)) == set(ids(known[:5]))
    await harness.acknowledged()
    assert not harness.keys() & {"e", "p"}
    fill(server, 0.0)
    new = ask()
    await offered(harness, new)
    assert await harness.broker.enqueue([new]) == [None]


async def test_an_idle_system_finds_out_by_itself(harness: Stand, server: RedisServer) -> None:
    fill(server, 2.0)
    entry = ask()
    [verdict] = await harness.broker.enqueue([entry])
    assert for_memory(verdict)
    assert await harness.broker.state("t", entry.id) is None


async def test_who_asks_for_it_is_told_that_memory_is_scarce(harness: Stand, server: RedisServer) -> None:
    async def scarce() -> bool:
        await harness.advance(1.1)
        asked = harness.broker.memory_pressure
        await harness.settle()
        return harness.broker.memory_pressure or asked

    assert not await scarce()
    fill(server, 0.9)
    assert await scarce()
    fill(server, 0.7)
    await harness.advance(1.1)
    assert harness.broker.memory_pressure, "nobody has looked since"
    await harness.settle()
    assert not harness.broker.memory_pressure


async def test_a_past_shortage_and_four_fifths_refuse_nobody(harness: Stand, server: RedisServer) -> None:
    fill(server, 0.7)
    assert await offered(harness, ask()) == [None]
    fill(server, 0.9)
    assert for_memory((await offered(harness, ask(), ask()))[1])
    fill(server, 0.0)
    await harness.advance(25.0)
    assert await harness.broker.enqueue([ask()]) == [None], "also before a look"


async def test_who_is_refused_for_memory_is_not_charged_and_joins_nobody(harness: Stand, server: RedisServer) -> None:
    limit = Limit("key:k", "key", 60.0, 1.0)
    share = DedupKey(DedupKind.KEY, "k", b"", 60.0)
    first = ask(limits=(limit,), dedup_keys=(share,), gateway="g1")
    await harness.broker.enqueue([first])
    fill(server, 0.9)
    verdicts = await offered(harness, first, ask(limits=(limit,)), ask(dedup_keys=(share,)))
    assert verdicts[0] is None
    assert all(for_memory(verdict) for verdict in verdicts[1:])
    fill(server, 0.0)
    await harness.advance(60.0)
    await offered(harness, ask())
    assert await harness.broker.enqueue([ask(limits=(limit,))]) == [None]


async def keep(harness: Stand, id: str, tenant: str, output: str) -> None:
    shares = (DedupKey(DedupKind.TASK, id, b"", 600.0), DedupKey(DedupKind.KEY, id, b"", 600.0))
    await harness.broker.enqueue([ask(id=id, tenant=tenant, gateway="keeps", dedup_keys=shares)])
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(output)])


async def test_what_a_free_tenant_keeps_costs_nobody_else(harness: Stand, server: RedisServer) -> None:
    """The 45 answers of 1 MB, under keys of their own, would fill the server."""
    server.command("CONFIG", "SET", "maxmemory", 64 << 20)
    harness.broker = await harness.another(kept=KEPT)
    assert harness.broker.kept.total == 16 << 20
    await keep(harness, "own", "enterprise", "small")
    reader = asyncio.ensure_future(harness.broker.replies("keeps", 0))
    for number in range(45):
        await keep(harness, f"{number}", "free", "x" * 1_000_000)
        if number % 5 == 4:
            _, cursor = await reader
            reader = asyncio.ensure_future(harness.broker.replies("keeps", cursor))
            await harness.advance(0.1)
    reader.cancel()
    assert await offered(harness, ask(tier=0), ask(tier=2)) == [None, None]
    assert server.command("INFO", "memory")["used_memory"] < 32 << 20
    known = [isinstance(await harness.broker.outcome("free", f"{number}"), Reply) for number in range(45)]
    assert known == [False] * 43 + [True] * 2
    assert isinstance(await harness.broker.outcome("enterprise", "own"), Reply)
    again = ask(id="again", tenant="enterprise", dedup_keys=(DedupKey(DedupKind.KEY, "own", b"", 600.0),))
    assert await harness.broker.enqueue([again]) == [None]
    assert (await drained(harness))["again"].kept


async def test_a_changed_eviction_policy_is_told_by_who_reaps(harness: Stand, server: RedisServer) -> None:
    async def told(event: str) -> int:
        with capture_logs() as logs:
            for _ in range(3):
                await harness.advance(1.1)
                await harness.broker.reap()
                await harness.settle()
        lines = [line for line in logs if event in line["event"]]
        assert all(line["policy"] == ("noeviction" if event == right else "allkeys-lru") for line in lines)
        return len(lines)

    changed, right = "its eviction policy was changed", "eviction policy is right again"
    assert not await told(changed)
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert await told(changed) == 1
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert await told(right) == 1
