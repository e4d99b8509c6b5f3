"""Promises of every broker about replies, how they are acknowledged, and what was cancelled."""

from __future__ import annotations

import asyncio

from headway.model import Completion, ItemResult, NoWork
from tests.contracts.brokers import AT_ONCE, Harness, ask, drained, failed, holds, ids, slot, story


@story
async def test_replies_wait_for_whoever_asks(harness: Harness) -> None:
    reader = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    assert not reader.done()
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    replies, cursor = await reader
    assert ids(replies) == ["a"]
    assert cursor > 0


@story
async def test_the_same_cursor_repeats_and_a_later_one_acknowledges(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    await harness.answer(await harness.claim(limit=1))
    first, cursor = await harness.broker.replies("g", 0)
    await harness.answer(await harness.claim(limit=1))
    await harness.settle()  # An output that is stored apart is read after its reply.
    again, further = await harness.broker.replies("g", 0)
    assert (ids(first), ids(again)) == (["a"], ["a", "b"])
    rest, end = await harness.broker.replies("g", cursor)
    assert (ids(rest), end) == (["b"], further)
    assert await drained(harness, after=end) == {}


@story
async def test_replies_survive_a_reconnect(harness: Harness) -> None:
    """A reader that went away, before the answer or with it, has taken nothing with it."""
    lost = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    lost.cancel()
    await harness.broker.enqueue([ask(id="a")])
    abandoned = asyncio.ensure_future(harness.broker.replies("g", 0))
    reconnected = asyncio.ensure_future(harness.peer().replies("g", 0))
    await harness.settle()
    await harness.answer(await harness.claim())
    abandoned.cancel()
    replies, _ = await reconnected
    assert ids(replies) == ["a"]


@story
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


@story
async def test_an_acknowledged_entry_is_forgotten(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, after=cursor) == {}
    await harness.broker.enqueue([entry])
    assert ids((await harness.claim()).entries) == ["a"]


@story
async def test_a_cancelled_entry_never_reaches_a_gpu(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    await harness.peer().withdraw([("t", "a", 0)], "g")
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_an_entry_cancelled_while_it_runs_is_not_replied_to(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    settled = await harness.broker.complete(lease, [ItemResult("A"), ItemResult("B")])
    assert settled == Completion(answered=1, departed=1)
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == {"b": "B"}


@story
async def test_an_entry_cancelled_while_it_runs_does_not_run_again(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a"), ask(id="b")])
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.broker.release(lease, failed())
    await harness.advance(1.0)
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_an_entry_that_waits_to_run_again_can_be_cancelled(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await harness.broker.release(await harness.claim(), failed())
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.advance(1.0)
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    assert await drained(harness) == {}


@story
async def test_cancelling_is_by_tenant_and_what_is_unknown_is_nothing(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a", tenant="mine")])
    await harness.broker.withdraw([("theirs", "a", 0), ("mine", "unknown", 0)], "g")
    assert ids((await harness.claim()).entries) == ["a"]


@story
async def test_a_cancelled_entry_can_be_enqueued_anew(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    stale = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    assert list(await harness.broker.enqueue([entry])) == [None]
    fresh = await harness.claim("gpu-1")
    await harness.broker.complete(stale, [ItemResult("stale")])
    assert await drained(harness) == {}
    await harness.broker.complete(fresh, [ItemResult("fresh")])
    assert (await drained(harness))["a"].output == "fresh"


@story
async def test_cancelling_what_is_answered_leaves_the_answer_the_only_one(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.broker.enqueue([entry])
    holds(await harness.broker.claim(slot(), AT_ONCE))
    assert list(await drained(harness)) == ["a"]
