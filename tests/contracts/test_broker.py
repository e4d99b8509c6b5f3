"""Promises of every broker: who rides together, that each batch ends once, replies, traces, and several models."""

import asyncio

import pytest
from msgspec.structs import replace

from headway import errors
from headway.model import Completion, ItemResult, Lease
from tests.contracts.brokers import AT_ONCE, LIMITS, MAX_BATCH, Harness, ask, drained, failed, ids, output, slot
from tests.contracts.dedup_keys import admit


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


async def test_the_lease_says_whose_it_is_since_when_and_until_when(harness: Harness) -> None:
    await harness.broker.enqueue([ask(timeout=9.0), ask(timeout=5.0), *(ask() for _ in range(MAX_BATCH))])
    await harness.advance(1.0)
    first, second = await harness.claim("gpu-1"), await harness.claim("gpu-2")
    assert first.slot == slot("gpu-1")
    assert second.fence > first.fence
    assert first.reason == "full"
    assert first.expires_at - first.granted_at == pytest.approx(harness.lease_seconds)
    assert first.time_left == pytest.approx(4.0, abs=harness.grain)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_wrong_number_of_items_is_an_error_and_loses_nothing(harness: Harness, count: int) -> None:
    await harness.broker.enqueue([ask(), ask()])
    lease = await harness.claim()
    with pytest.raises(ValueError, match=f"{count} items"):
        await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await drained(harness) == {}
    await harness.answer(lease)
    assert len(await drained(harness)) == 2


async def test_a_second_reader_does_not_leave_the_first_waiting(harness: Harness) -> None:
    first = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second.cancel()
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    await harness.settle()
    assert first.done()
    assert ids((await first)[0]) == ["a"]


TRACE = bytes(range(33)) + b"vendor=1"


async def test_a_trace_comes_with_its_entry_to_each_run_and_to_the_dead_letter(harness: Harness) -> None:
    traced, plain = replace(ask(id="a"), trace=TRACE), ask(id="b")
    await harness.broker.enqueue([traced, plain])
    first = await harness.claim()
    assert ({one.id: one.trace for one in first.entries}, first.attempt) == ({"a": TRACE, "b": b""}, 1)
    attempts = []
    await harness.broker.release(first, failed())
    for _ in range(20):
        claimed = await harness.broker.claim(slot("gpu-1"), AT_ONCE)
        if not isinstance(claimed, Lease):
            await harness.advance(0.5)
            continue
        if any(one.id == "a" for one in claimed.entries):
            attempts.append(claimed.attempt)
        assert all(one.trace == (TRACE if one.id == "a" else b"") for one in claimed.entries)
        await harness.broker.release(claimed, failed(worker="gpu-1"))
    assert attempts[0] == 2
    [letter] = await harness.dead.find("a")
    assert letter.entry.trace == TRACE


async def test_a_model_that_comes_later_is_served_to_whoever_waits_already(harness: Harness) -> None:
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    refusal, admitted = await harness.broker.enqueue([ask("early", model="late"), ask("x", gateway="other")])
    assert refusal is not None
    assert (refusal.code, admitted) == (errors.NO_WORKERS, None)
    harness.broker.know({"late": LIMITS, "m": LIMITS})
    assert [one.input for one in (await harness.claim()).entries] == ["x"], (
        "a model that is named again keeps its queue"
    )
    await harness.healthy("late-0", model="late")
    entry = ask("later", model="late")
    await admit(harness, entry)
    lease = await harness.claim("late-0", "late")
    await harness.answer(lease)
    await harness.settle()
    assert reading.done(), "a gateway that waited before the model came gets its replies"
    replies, _ = await reading
    assert [(reply.id, reply.output) for reply in replies] == [(entry.id, output("later"))]
    assert {one.model for one in await harness.broker.depths()} == {"m", "other", "late"}
    assert set(map(str, await harness.broker.loads())) == {"m", "other", "late"}
