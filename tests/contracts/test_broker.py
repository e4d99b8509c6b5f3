"""Promises of every broker: who rides together, that each batch ends once, replies, traces, and several models."""

import asyncio

import pytest
from msgspec.structs import replace

from headway import errors
from headway.core.dedup import follower
from headway.core.departure import Rule
from headway.model import Completion, ItemResult, Lease, ModelReport, Slot
from tests.contracts.brokers import (
    AT_ONCE,
    LIMITS,
    MAX_BATCH,
    WHEN_FULL,
    Fixed,
    Harness,
    ask,
    drained,
    failed,
    holds,
    ids,
    leave,
    output,
    slot,
)
from tests.contracts.dedup_keys import admit, refused, task


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
async def test_a_wrong_number_of_items_is_an_error_and_loses_nothing(harness: Harness, count: int) -> None:
    await harness.broker.enqueue([ask(), ask()])
    lease = await harness.claim()
    with pytest.raises(ValueError, match=f"{count} items"):
        await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await drained(harness) == {}
    await harness.answer(lease)
    assert len(await drained(harness)) == 2


async def test_a_held_batch_keeps_filling(harness: Harness) -> None:
    """The queue is the batch until it leaves: who comes later rides along, and the highest tier first."""
    await harness.broker.enqueue([ask(id=f"free-{n}", tier=2) for n in range(MAX_BATCH - 1)])
    holds(await harness.broker.claim(slot(), WHEN_FULL))
    await harness.broker.enqueue([ask(id="enterprise", tier=0)])
    lease = await harness.broker.claim(slot(), WHEN_FULL)
    assert isinstance(lease, Lease)
    assert ids(lease.entries)[0] == "enterprise"
    assert len(lease.entries) == MAX_BATCH


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


async def test_cancelling_what_is_answered_leaves_the_answer_the_only_one(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.broker.withdraw([entry.submission], "g")
    await harness.broker.enqueue([entry])
    holds(await harness.broker.claim(slot(), AT_ONCE))
    assert list(await drained(harness)) == ["a"]


async def test_who_leaves_during_a_batch_hears_nothing_and_its_neighbours_do(harness: Harness) -> None:
    entries = [ask(id=id) for id in ("first", "left", "last")]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    await leave(harness.broker, entries[1])
    await harness.answer(lease)
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == {
        id: output(f"input of {id}") for id in ("first", "last")
    }


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


async def test_a_lease_that_lapsed_counts_as_an_attempt(harness: Harness) -> None:
    await harness.broker.enqueue([replace(ask(id="a"), trace=TRACE)])
    await harness.claim("gpu-0")
    await harness.reaping(harness.lease_seconds + 1.0)
    again = await harness.claim("gpu-1")
    assert (again.attempt, [one.trace for one in again.entries]) == (2, [TRACE])
    await harness.answer(again)


async def test_an_entry_for_a_model_without_a_queue_is_refused_and_the_others_are_let_in(harness: Harness) -> None:
    strange, known = ask("x", model="strange"), ask("y")
    refusal, admitted = await harness.broker.enqueue([strange, known])
    assert refusal is not None
    assert (refusal.code, admitted) == (errors.NO_WORKERS, None)
    assert [entry.input for entry in (await harness.claim()).entries] == ["y"]


async def test_a_model_that_comes_later_is_served_to_whoever_waits_already(harness: Harness) -> None:
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    assert (await refused(harness, ask("early", model="late"))).code == errors.NO_WORKERS
    harness.broker.know({"late": LIMITS})
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


async def test_a_model_that_is_known_keeps_what_waits_when_it_is_named_again(harness: Harness) -> None:
    await admit(harness, ask("a"))
    harness.broker.know({"m": LIMITS})
    assert [entry.input for entry in (await harness.claim()).entries] == ["a"]


async def test_a_task_is_found_by_who_does_not_know_its_model(harness: Harness) -> None:
    await admit(harness, ask("a", model="other", dedup_keys=(task("job"),), id="job"))
    assert await harness.broker.enqueue([follower("sub", "job", "t", "g2", 60.0, 1)]) == [None]
    await harness.answer(await harness.claim("other-0", "other"))
    [reply] = (await drained(harness, "g2")).values()
    assert (reply.id, reply.output) == ("sub", output("a"))
    [refusal] = await harness.broker.enqueue([follower("none", "no such", "t", "g2", 60.0, 2)])
    assert refusal is not None


async def test_the_run_of_a_reply_tells_the_version_that_ran(harness: Harness) -> None:
    await admit(harness, ask("a"), ask("b", dedup_keys=(task("job"),), id="job"))
    versioned = Slot("gpu-0", "m", MAX_BATCH, 0, ModelReport("7"))
    lease = await harness.broker.claim(versioned, AT_ONCE)
    await harness.broker.complete(lease, [ItemResult("x"), ItemResult("y")])  # type: ignore[arg-type]
    versions = {reply.ran.version for reply in (await drained(harness)).values() if reply.ran is not None}
    kept = await harness.broker.outcome("t", "job")
    assert (versions, kept.ran.version) == ({"7"}, "7")  # type: ignore[union-attr]
    assert slot().runs.version == ""
