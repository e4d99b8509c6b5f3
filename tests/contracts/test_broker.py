"""Promises of every broker: which entries ride together, and that each batch ends once."""

from __future__ import annotations

import pytest

from headway.core.departure import Rule
from headway.model import Completion, ItemResult, Lease
from tests.contracts.brokers import (
    MAX_BATCH,
    WHEN_FULL,
    Fixed,
    Harness,
    ask,
    drained,
    holds,
    ids,
    output,
    slot,
    story,
)


@story
async def test_an_admitted_entry_is_claimed_run_and_answered(harness: Harness) -> None:
    entry = ask("hello")
    assert list(await harness.broker.enqueue([entry])) == [None]
    await harness.advance(0.5)
    claimed_at = harness.now()
    lease = await harness.claim("gpu-7")
    assert list(lease.entries) == [entry]
    await harness.advance(0.25)
    assert await harness.broker.complete(lease, [ItemResult(output("hello"))]) == Completion(answered=1, departed=0)
    [reply] = (await drained(harness)).values()
    assert (reply.id, reply.tenant, reply.output, reply.failure) == (entry.id, entry.tenant, output("hello"), None)
    assert reply.attempts == 1
    assert reply.queued == pytest.approx(0.5, abs=harness.grain)
    assert reply.ran is not None
    assert (reply.ran.worker, reply.ran.size) == ("gpu-7", 1)
    assert reply.ran.seconds == pytest.approx(0.25, abs=harness.grain)
    assert reply.ran.claimed_at == pytest.approx(claimed_at, abs=harness.grain)


@story
async def test_the_lease_says_whose_it_is_since_when_and_until_when(harness: Harness) -> None:
    await harness.broker.enqueue([ask(timeout=9.0), ask(timeout=5.0), *(ask() for _ in range(MAX_BATCH))])
    await harness.advance(1.0)
    first, second = await harness.claim("gpu-1"), await harness.claim("gpu-2")
    assert first.slot == slot("gpu-1")
    assert second.fence > first.fence
    assert first.reason == "full"
    assert first.expires_at - first.granted_at == pytest.approx(harness.lease_seconds)
    assert first.time_left == pytest.approx(4.0, abs=harness.grain)


@story
async def test_a_policy_that_holds_says_until_when(harness: Harness) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    await harness.broker.enqueue([ask()])
    wait = holds(await harness.broker.claim(slot(), patient))
    assert wait.until is not None
    assert wait.until == pytest.approx(harness.now() + 0.5, abs=harness.grain)
    await harness.advance(wait.until - harness.now())
    lease = await harness.broker.claim(slot(), patient)
    assert isinstance(lease, Lease)
    assert lease.reason == "window"


@pytest.mark.parametrize("count", [0, 1, 3])
@story
async def test_a_wrong_number_of_items_is_an_error_and_loses_nothing(harness: Harness, count: int) -> None:
    await harness.broker.enqueue([ask(), ask()])
    lease = await harness.claim()
    with pytest.raises(ValueError, match=f"{count} items"):
        await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await drained(harness) == {}
    await harness.answer(lease)
    assert len(await drained(harness)) == 2


@story
async def test_a_held_batch_keeps_filling(harness: Harness) -> None:
    """The queue is the batch until it leaves: who comes later rides along, and the highest tier first."""
    await harness.broker.enqueue([ask(id=f"free-{n}", tier=2) for n in range(MAX_BATCH - 1)])
    holds(await harness.broker.claim(slot(), WHEN_FULL))
    await harness.broker.enqueue([ask(id="enterprise", tier=0)])
    lease = await harness.broker.claim(slot(), WHEN_FULL)
    assert isinstance(lease, Lease)
    assert ids(lease.entries)[0] == "enterprise"
    assert len(lease.entries) == MAX_BATCH
