"""Promises of every broker about replies and how they are acknowledged."""

from __future__ import annotations

import asyncio

from tests.contracts.brokers import AT_ONCE, Harness, ask, drained, holds, ids, leave, output, slot, story


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
async def test_cancelling_what_is_answered_leaves_the_answer_the_only_one(harness: Harness) -> None:
    entry = ask(id="a")
    await harness.broker.enqueue([entry])
    await harness.answer(await harness.claim())
    await harness.broker.withdraw([entry.submission], "g")
    await harness.broker.enqueue([entry])
    holds(await harness.broker.claim(slot(), AT_ONCE))
    assert list(await drained(harness)) == ["a"]


@story
async def test_who_leaves_while_a_batch_runs_is_told_nothing_of_it_and_the_others_of_its_gateway_are(
    harness: Harness,
) -> None:
    entries = [ask(id=id) for id in ("first", "left", "last")]
    await harness.broker.enqueue(entries)
    lease = await harness.claim()
    await leave(harness.broker, entries[1])
    await harness.answer(lease)
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == {
        id: output(f"input of {id}") for id in ("first", "last")
    }
