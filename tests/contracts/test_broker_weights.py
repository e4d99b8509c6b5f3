"""Batches by weight, on every broker: the model `other` has a bound on it."""

from __future__ import annotations

from headway.core.departure import Rule
from headway.model import Cause, Lease, NoWork
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    MAX_WEIGHT,
    Fixed,
    Harness,
    ask,
    failed,
    slot,
    story,
)

WHEN_FULL = Fixed(Rule(size=MAX_BATCH, headway=60.0))


async def enqueue(harness: Harness, *weights: int, tier: int = 1, tenant: str = "t", model: str = "other") -> None:
    entries = [ask(model=model, weight=weight, tier=tier, tenant=tenant) for weight in weights]
    assert list(await harness.broker.enqueue(entries)) == [None] * len(weights)


async def claim(harness: Harness, limit: int = MAX_BATCH, model: str = "other") -> list[int]:
    """Weights of a batch of what waits, which is then answered."""
    lease = await harness.claim(model=model, limit=limit)
    await harness.answer(lease)
    return [entry.weight for entry in lease.entries]


@story
async def test_a_batch_is_full_by_weight_or_by_number(harness: Harness) -> None:
    await enqueue(harness, 20, 15, 6, *[1] * MAX_BATCH, 10 * MAX_WEIGHT, 1)
    assert await claim(harness) == [20, 15]
    assert await claim(harness) == [6, *[1] * (MAX_BATCH - 1)]
    assert [await claim(harness) for _ in range(3)] == [[1], [10 * MAX_WEIGHT], [1]]


@story
async def test_a_slot_that_takes_fewer_takes_less_weight(harness: Harness) -> None:
    await enqueue(harness, 10, 10, 10)
    assert await claim(harness, limit=MAX_BATCH // 2) == [10, 10]


@story
async def test_a_model_without_the_bound_does_not_weigh(harness: Harness) -> None:
    await enqueue(harness, *[MAX_WEIGHT] * MAX_BATCH, model="m")
    assert await claim(harness, model="m") == [MAX_WEIGHT] * MAX_BATCH


@story
async def test_full_goes_by_weight(harness: Harness) -> None:
    await harness.healthy("gpu-0", model="other")
    await enqueue(harness, 1)
    assert isinstance(await harness.broker.claim(slot(model="other"), Fixed(Rule(size=1))), Lease)
    await enqueue(harness, MAX_WEIGHT - 1)
    assert isinstance(await harness.broker.claim(slot(model="other"), WHEN_FULL), NoWork)
    await enqueue(harness, 1)
    claimed = await harness.broker.claim(slot(model="other"), WHEN_FULL)
    assert isinstance(claimed, Lease)
    assert (claimed.reason, len(claimed.entries)) == ("full", 2)


@story
async def test_tenants_take_turns_by_weight(harness: Harness) -> None:
    await enqueue(harness, *[20] * 8, tenant="heavy")
    await enqueue(harness, *[5] * 32, tenant="light")
    rode = [weight for _ in range(5) for weight in await claim(harness)]
    assert 60 <= sum(weight for weight in rode if weight == 20) <= 140


@story
async def test_tenants_of_many_tiny_entries_do_not_go_before_others(harness: Harness) -> None:
    for number in range(5):
        await enqueue(harness, *[1] * MAX_BATCH, tenant=f"flood {number}")
    await enqueue(harness, 3, tenant="friend")
    assert 3 in [*await claim(harness), *await claim(harness)]


@story
async def test_what_is_heavier_than_a_batch_counts_as_a_full_one(harness: Harness) -> None:
    await harness.healthy("gpu-0", model="other")
    for _ in range(8):
        await enqueue(harness, 100 * MAX_WEIGHT)
        lease = await harness.claim(model="other")
        await harness.advance(0.5)
        await harness.answer(lease)
    load = (await harness.broker.loads())["other"]
    assert abs(load.batch_seconds(MAX_BATCH) - 0.5) < 1e-3
    assert abs(load.entry_size - MAX_BATCH) < 1e-6


@story
async def test_a_heavy_one_of_a_lower_tier_does_not_starve(harness: Harness) -> None:
    await enqueue(harness, 25, tier=2)
    for _ in range(4):
        await enqueue(harness, *[5] * 8, tier=0, tenant="high")
        if 25 in await claim(harness):
            return
    raise AssertionError("it waits on")


@story
async def test_who_leaves_takes_its_weight_along(harness: Harness) -> None:
    entries = [ask(model="other", weight=30) for _ in range(3)]
    await harness.broker.enqueue(entries)
    await harness.broker.withdraw([entries[0].submission], "g")
    await enqueue(harness, 10)
    assert await claim(harness) == [30]
    assert await claim(harness) == [30, 10]
    assert isinstance(await harness.broker.claim(slot(model="other"), AT_ONCE), NoWork)


@story
async def test_what_failed_runs_again_within_the_weight(harness: Harness) -> None:
    await enqueue(harness, *[20] * 4)
    for _ in range(2):
        lease = await harness.claim(model="other")
        assert await harness.broker.release(lease, failed(Cause.REMOTE))
    await harness.advance(5.0)
    assert await claim(harness) == [20, 20]
    assert await claim(harness) == [20, 20]


@story
async def test_run_times_are_learnt_by_weight(harness: Harness) -> None:
    await harness.healthy("gpu-0", model="other")
    for weight in (5, 10, 20, 40):
        await enqueue(harness, weight)
        lease = await harness.claim(model="other")
        await harness.advance(0.1 + 0.01 * weight)
        await harness.answer(lease)
    load = (await harness.broker.loads())["other"]
    assert abs(load.alpha - 0.1) < 1e-3
    assert abs(load.batch_seconds(MAX_BATCH) - 0.5) < 1e-3
    assert load.entry_size > 1.0
