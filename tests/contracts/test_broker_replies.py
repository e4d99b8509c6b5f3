"""Promises of every broker about replies and how they are acknowledged."""

from __future__ import annotations

import asyncio

from tests.contracts.brokers import AT_ONCE, Harness, ask, drained, holds, ids, leave, output, slot, story


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
