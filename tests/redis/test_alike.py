"""Entries of one call that have nothing rare about them are let in together; the outcome is that of one call for each."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from headway.model import Entry, Failure, ItemResult, Lease, Limit, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, ask, output, slot
from tests.redis.stand import Stand

TOGETHER, ALONE = "m", "m@3"
"""Two queues with the same bounds."""
LIMITED = "c"
"""Tenant with a limit, which some of its entries are over."""


def drawn(rng: random.Random, count: int, first: int) -> list[Entry]:
    """Entries of five tenants; of some a submission or its id comes twice."""
    found: list[Entry] = []
    for number in range(first, first + count):
        if found and rng.random() < 0.1:
            twin = rng.choice(found)
            found.append(replace(twin, nonce=twin.nonce + rng.randrange(2) * 10_000))
            continue
        tenant = rng.choice("abcde")
        queue_timeout, timeout = rng.choice(((60.0, 120.0), (60.0, 120.0), (20.0, 30.0), (0.3, 0.5)))
        found.append(ask(
            id=f"id-{number}", tier=rng.choice((0, 1, 1, 1, 2)), tenant=tenant, nonce=number, queue_timeout=queue_timeout,
            timeout=timeout, gateway=rng.choice(("g", "g", "h")),
        ))  # fmt: skip
    return found


def of(entry: Entry, queue: str) -> Entry:
    """The entry for a queue, with the limit that its tenant has there."""
    limits = (Limit(f"limit of {queue}", "key", 1.0, 6.0),) if entry.tenant == LIMITED else ()
    return replace(entry, version=queue.partition("@")[2], limits=limits)


def told(verdict: Failure | None) -> object:
    return verdict and (verdict.code, verdict.reason, round(verdict.retry_after or 0.0, 6))


async def left(harness: Stand, queue: str) -> tuple[object, ...]:
    """What leaves the queue, in batches of 5, and what it has learnt."""
    found: list[Any] = []
    while isinstance(lease := await harness.broker.claim(slot(f"of {queue}", queue, 5), AT_ONCE), Lease):
        found.append(([(one.tenant, one.id, one.nonce) for one in lease.entries], lease.reason))
        await harness.broker.complete(lease, [ItemResult(output(one.input)) for one in lease.entries])
    model, _, version = queue.partition("@")
    depths = [
        (one.tier, one.depth) for one in await harness.broker.depths() if (one.model, one.version) == (model, version)
    ]
    return found, depths


@pytest.mark.parametrize("seed", range(6))
async def test_what_comes_together_fares_as_what_comes_one_by_one(harness: Stand, seed: int) -> None:
    rng, first = random.Random(seed), 0
    for queue in (TOGETHER, ALONE):
        model, _, version = queue.partition("@")
        warm_up = ((1, 0.2), (8, 0.4))
        await harness.broker.heartbeat(WorkerInfo(
            worker_id=f"of {queue}", model=model, version=version, status=WorkerStatus.HEALTHY, warm_up=warm_up,
        ))  # fmt: skip
    for _ in range(6):
        entries = drawn(rng, rng.choice((2, 9, 25)), first)
        first += len(entries)
        together = await harness.broker.enqueue([of(entry, TOGETHER) for entry in entries])
        alone = [(await harness.broker.enqueue([of(entry, ALONE)]))[0] for entry in entries]
        assert list(map(told, together)) == list(map(told, alone))
        assert await left(harness, TOGETHER) == await left(harness, ALONE) if rng.random() < 0.3 else True
        await harness.advance(rng.choice((0.01, 0.4)))
    assert await left(harness, TOGETHER) == await left(harness, ALONE)


async def test_an_enqueue_makes_as_few_commands_for_many_tenants_as_for_one(harness: Stand) -> None:
    async def commands(tenants: int) -> int:
        entries = [ask(tenant=f"tenant-{number % tenants}") for number in range(8)]
        before = harness.server.command("INFO", "commandstats")
        assert await harness.broker.enqueue(entries) == [None] * 8
        return count(harness.server.command("INFO", "commandstats")) - count(before)

    def count(stats: Any) -> int:
        text = stats.decode() if isinstance(stats, bytes) else str(stats)
        return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in text.splitlines() if "calls=" in line)

    await harness.broker.enqueue([ask()])
    assert await commands(8) == await commands(1)
