"""Batches of 4,096 inputs, and batches that run for ten minutes."""

from collections.abc import Callable, Iterator

import pytest

from headway.config.settings import MAX_BATCH
from headway.core.queue_limits import QueueLimits
from headway.errors import DEADLINE_EXCEEDED, NO_WORKERS, REJECTED_BY_MODEL
from headway.model import Entry, Reply
from tests.contracts.brokers import Harness, MemoryHarness, RedisHarness, ask, drained, failed, leave, output
from tests.servers.redis import SharedServers

LIMITS = QueueLimits(tiers=3, max_batch=MAX_BATCH, reserved_share=0.25, max_queue=20_000)
BATCH_SECONDS = 600.0

HARNESSES: dict[str, Callable[[SharedServers], Harness]] = {
    "memory": lambda _: MemoryHarness(limits=LIMITS),
    "valkey": lambda servers: RedisHarness(servers.of("valkey"), limits=LIMITS),
}


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, servers: SharedServers) -> Iterator[Harness]:
    """A fresh broker of each kind, whose batches may be as large as can be."""
    made = HARNESSES[request.param](servers)
    yield made
    made.close()


def crowd(tier: int = 1, **how: float) -> list[Entry]:
    return [ask(tier=tier, **how) for _ in range(MAX_BATCH)]  # type: ignore[arg-type]


async def enqueued(harness: Harness, entries: list[Entry]) -> None:
    assert [verdict for verdict in await harness.broker.enqueue(entries) if verdict is not None] == []


async def replies_to(harness: Harness, entries: list[Entry]) -> list[Reply]:
    by_id = await drained(harness)
    return [by_id[entry.id] for entry in entries]


async def test_a_batch_of_4096_comes_back_whole_and_in_order(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = crowd()
    await enqueued(harness, entries)
    lease = await harness.claim(limit=MAX_BATCH)
    assert [entry.id for entry in lease.entries] == [entry.id for entry in entries]
    await harness.answer(lease)
    assert [reply.output for reply in await replies_to(harness, entries)] == [output(entry.input) for entry in entries]


async def test_tiers_share_a_batch_of_4096(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    for tier in range(3):
        await enqueued(harness, crowd(tier))
    seen = []
    for _ in range(3):
        lease = await harness.claim(limit=MAX_BATCH)
        assert len(lease.entries) == MAX_BATCH
        seen.append([sum(entry.tier == tier for entry in lease.entries) for tier in range(3)])
        await harness.answer(lease)
    kept = int(MAX_BATCH * LIMITS.reserved_share)
    assert seen[0] == [MAX_BATCH - kept, kept, 0]
    assert sum(map(sum, seen)) == 3 * MAX_BATCH
    assert sum(depth.depth for depth in await harness.broker.depths()) == 0


async def test_one_culprit_among_4096_is_found_and_the_others_are_answered(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = crowd()
    culprit = entries[1234]
    await enqueued(harness, entries)
    runs = 0
    while sum(depth.depth for depth in await harness.broker.depths()) or not runs:
        lease = await harness.claim(limit=MAX_BATCH)
        runs += 1
        if culprit.id in {entry.id for entry in lease.entries}:
            await harness.broker.release(lease, failed())
        else:
            await harness.answer(lease)
        await harness.advance(0.1)
    replies = await replies_to(harness, entries)
    assert [reply.id for reply in replies if reply.output is None] == [culprit.id]
    assert (await drained(harness))[culprit.id].failure.code == REJECTED_BY_MODEL  # type: ignore[union-attr]
    assert runs <= 30, "the search halves"


async def test_4096_that_wait_too_long_are_all_told_so(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = crowd(queue_timeout=0.5)
    await enqueued(harness, entries)
    await harness.reaping(0.6)
    codes = [reply.failure.code for reply in await replies_to(harness, entries) if reply.failure is not None]
    assert codes == [DEADLINE_EXCEEDED] * MAX_BATCH


async def test_4096_suspects_that_run_out_of_time_are_all_told_so(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = crowd(timeout=1.0)
    await enqueued(harness, entries)
    lease = await harness.claim(limit=MAX_BATCH)
    await harness.broker.release(lease, failed())
    await harness.reaping(1.1)
    replies = await replies_to(harness, entries)
    assert all(reply.failure is not None for reply in replies)
    assert sum(depth.depth for depth in await harness.broker.depths()) == 0


async def test_4096_may_be_withdrawn(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entries = crowd()
    await enqueued(harness, entries)
    await leave(harness.broker, *entries)
    assert sum(depth.depth for depth in await harness.broker.depths()) == 0


async def test_a_batch_may_run_for_ten_minutes_while_its_gateway_is_silent(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entry = ask(queue_timeout=BATCH_SECONDS, timeout=BATCH_SECONDS + 10)
    await enqueued(harness, [entry])
    lease = await harness.claim(limit=MAX_BATCH)
    step = harness.lease_seconds * 0.9
    begun = harness.now()
    while harness.now() < begun + BATCH_SECONDS:
        await harness.advance(step)
        await harness.healthy("gpu-0")
        await harness.broker.reap()
        assert await harness.broker.extend(lease)
    await harness.answer(lease)
    await harness.broker.reap()
    assert (await drained(harness))[entry.id].output == output(entry.input)


async def test_who_has_waited_for_minutes_in_silence_is_told_that_it_is_too_late(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    entry = ask(queue_timeout=BATCH_SECONDS, timeout=BATCH_SECONDS)
    await enqueued(harness, [entry])
    await harness.advance(BATCH_SECONDS)
    await harness.broker.reap()
    await harness.broker.reap()
    failure = (await drained(harness))[entry.id].failure
    assert failure is not None
    assert failure.code == DEADLINE_EXCEEDED or failure.code == NO_WORKERS
