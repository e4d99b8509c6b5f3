"""Promises of every broker about what it admits, what it refuses, and what it knows already."""

from __future__ import annotations

import re

import msgspec

from headway import errors
from headway.core import failures
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    MAX_QUEUE,
    MAX_WEIGHT,
    Harness,
    ask,
    crowd,
    drained,
    holds,
    in_mailbox,
    measure,
    slot,
    story,
)


@story
async def test_verdicts_come_in_the_order_of_the_entries(harness: Harness) -> None:
    await harness.broker.enqueue(crowd(MAX_QUEUE - 1))
    verdicts = await harness.broker.enqueue([ask(), ask(), ask(model="other")])
    assert [verdict is None for verdict in verdicts] == [True, False, True]


@story
async def test_a_full_queue_refuses_and_says_for_how_long(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    refused = ask()
    [verdict] = await harness.broker.enqueue([refused])
    assert verdict is not None
    assert verdict.code == errors.SERVICE_OVERLOADED
    assert verdict.reason
    assert verdict.retry_after is not None
    assert verdict.retry_after > 0.0
    assert await harness.broker.state(refused.tenant, refused.id) is None
    assert await drained(harness) == {}


@story
async def test_a_refused_entry_may_ask_again(harness: Harness) -> None:
    await harness.broker.enqueue([ask() for _ in range(MAX_QUEUE)])
    refused = ask()
    assert list(await harness.broker.enqueue([refused])) != [None]
    await harness.claim()
    assert list(await harness.broker.enqueue([refused])) == [None]


@story
async def test_what_cannot_be_answered_in_time_is_refused_at_the_door(harness: Harness) -> None:
    """One GPU of 8 in 100 ms drains 80 a second: within 500 ms it takes some 31 that wait, and not 60."""
    await measure(harness, 0.1)
    verdicts = await harness.broker.enqueue([ask(timeout=0.5) for _ in range(MAX_QUEUE)])
    admitted = [verdict is None for verdict in verdicts]
    assert admitted == sorted(admitted, reverse=True)
    assert 20 <= sum(admitted) <= 32
    assert all(verdict is None or verdict.retry_after for verdict in verdicts)


@story
async def test_the_lowest_tier_is_shed_while_the_highest_is_admitted(harness: Harness) -> None:
    await measure(harness, 0.1)
    await harness.broker.enqueue([ask(timeout=0.5, tier=2) for _ in range(MAX_QUEUE)])
    free, enterprise = await harness.broker.enqueue([ask(timeout=0.5, tier=2), ask(timeout=0.5, tier=0)])
    assert free is not None
    assert free.code == errors.SHED
    assert enterprise is None


@story
async def test_an_idle_system_admits_whatever_it_believes(harness: Harness) -> None:
    await measure(harness, 5.0)
    assert list(await harness.broker.enqueue([ask(timeout=0.05, tier=2)])) == [None]


@story
async def test_an_idle_system_admits_what_fits_into_one_batch_whatever_it_believes(harness: Harness) -> None:
    """Of several inputs of one request none fares worse than an input by itself."""
    await measure(harness, 5.0)
    verdicts = await harness.broker.enqueue([ask(timeout=0.05, tier=2) for _ in range(MAX_BATCH + 1)])
    assert [verdict is None for verdict in verdicts] == [True] * MAX_BATCH + [False]


@story
async def test_an_idle_system_admits_a_batch_for_each_free_gpu_whatever_it_believes(harness: Harness) -> None:
    await measure(harness, 5.0)
    await harness.healthy("gpu-0", "gpu-1", "gpu-2")
    await harness.broker.enqueue([ask()])
    await harness.claim()
    verdicts = await harness.broker.enqueue([ask(timeout=0.05, tier=2) for _ in range(2 * MAX_BATCH + 1)])
    assert [verdict is None for verdict in verdicts] == [True] * 2 * MAX_BATCH + [False]


@story
async def test_what_is_heavy_takes_the_room_of_several_in_a_free_gpus_batch(harness: Harness) -> None:
    await measure(harness, 5.0, model="other")
    heavy = [ask(timeout=0.05, tier=2, model="other", weight=MAX_WEIGHT // 2) for _ in range(3)]
    verdicts = await harness.broker.enqueue(heavy)
    assert [verdict is None for verdict in verdicts] == [True, True, False]


@story
async def test_a_busy_system_admits_no_second_that_would_be_late(harness: Harness) -> None:
    await measure(harness, 5.0)
    await harness.broker.enqueue([ask()])
    await harness.claim()
    verdicts = await harness.broker.enqueue([ask(timeout=0.05, tier=2) for _ in range(2)])
    assert [verdict is None for verdict in verdicts] == [True, False]


@story
async def test_enqueue_is_idempotent_by_tenant_and_id(harness: Harness) -> None:
    entry, foreign = ask(id="same", tenant="a"), ask(id="same", tenant="b")
    assert list(await harness.broker.enqueue([entry, entry, foreign])) == [None, None, None]
    assert list(await harness.peer().enqueue([entry])) == [None]
    lease = await harness.claim()
    assert sorted(rider.tenant for rider in lease.entries) == ["a", "b"]
    assert list(await harness.broker.enqueue([entry])) == [None]  # While it runs.
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))
    await harness.answer(lease)
    assert list(await harness.broker.enqueue([entry])) == [None]  # Answered, but nobody has read it.
    holds(await harness.broker.claim(slot("gpu-1"), AT_ONCE))
    replies = await in_mailbox(harness)
    assert sorted((reply.tenant, reply.id) for reply in replies) == [("a", "same"), ("b", "same")]


@story
async def test_what_is_in_flight_at_another_gateway_is_refused_and_can_be_asked_anew_once_it_is_answered(
    harness: Harness,
) -> None:
    here, there = ask(id="same", gateway="g1"), ask(id="same", gateway="g2")
    await harness.broker.enqueue([here])
    [while_it_waits] = await harness.peer().enqueue([there])
    lease = await harness.claim()
    [while_it_runs] = await harness.peer().enqueue([there])
    for verdict in (while_it_waits, while_it_runs):
        assert verdict is not None
        assert verdict.code == errors.IDEMPOTENCY_CONFLICT
    await harness.answer(lease)
    assert list(await harness.peer().enqueue([there])) == [None]
    await harness.answer(await harness.claim())
    assert list(await drained(harness, "g1")) == ["same"]
    assert list(await drained(harness, "g2")) == ["same"]


@story
async def test_one_that_comes_for_several_is_judged_as_the_last_of_them(harness: Harness) -> None:
    """One GPU of 8 in 100 ms drains 80 a second: within 500 ms it takes some 31 that wait."""
    await measure(harness, 0.1)
    for count, fits in ((60, False), (20, True), (9, True), (60, False)):
        first = msgspec.structs.replace(ask(timeout=0.5, nonce=count), payer=count, count=count)
        other = msgspec.structs.replace(ask(timeout=0.5, nonce=count + 1), payer=count)
        verdicts = await harness.broker.enqueue([first, other])
        assert [verdict is None for verdict in verdicts] == [fits, fits]


@story
async def test_several_that_are_too_many_for_ever_are_told_how_many_are_not(harness: Harness) -> None:
    await measure(harness, 0.1)
    first = msgspec.structs.replace(ask(timeout=0.5, tier=0, nonce=1), payer=1, count=100)
    [refused] = await harness.broker.enqueue([first])
    assert refused is not None
    assert (refused.code, refused.reason, refused.retry_after) == (errors.PAYLOAD_TOO_LARGE, failures.LIST, None)
    [found] = re.findall("up to (\\d+) may be", refused.message)
    assert MAX_BATCH < int(found) < 100
    fewer = msgspec.structs.replace(first, id="fewer", nonce=2, payer=2, count=int(found))
    assert list(await harness.broker.enqueue([fewer])) == [None]


@story
async def test_several_for_which_a_batch_is_too_slow_are_told_so_and_not_a_number_that_would_be_answered(
    harness: Harness,
) -> None:
    await measure(harness, 5.0)
    first = msgspec.structs.replace(ask(timeout=0.05, nonce=1), payer=1, count=MAX_BATCH + 1)
    [refused] = await harness.broker.enqueue([first])
    assert refused is not None
    assert (refused.code, refused.reason, refused.retry_after) == (errors.PAYLOAD_TOO_LARGE, failures.LIST, None)
    assert refused.message == (
        "so many inputs in one request cannot be answered within the deadline at the model's pace now: one batch takes longer. "
        f"Give it more time; up to {MAX_BATCH} at once are tried all the same"
    )


@story
async def test_several_that_fit_into_a_batch_are_let_in_whatever_an_idle_system_believes(harness: Harness) -> None:
    await measure(harness, 5.0)
    first = msgspec.structs.replace(ask(timeout=0.05, nonce=7), payer=7, count=MAX_BATCH)
    assert list(await harness.broker.enqueue([first])) == [None]
