"""Promises of every broker on tasks that are asked anew or cancelled, and on followers whose time, or whose original's, is over."""

import pytest

from headway import errors
from headway.model import DedupKind, ItemResult, Reply
from tests.contracts.brokers import MAX_QUEUE, Harness, ask, drained, failed, ids, leave
from tests.contracts.dedup_keys import (
    admit,
    came_by,
    code,
    key,
    nothing_runs,
    poll,
    refused,
    run_alone,
    same,
    sharing,
    task,
)


async def test_a_task_asked_anew_after_its_answer_was_read_is_answered_by_what_was_kept(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first")))
    await run_alone(harness, "first")
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, "g", cursor) == {}
    await admit(harness, sharing("first", task("first")))
    await nothing_runs(harness)
    assert came_by((await drained(harness, "g", cursor))["first"]) == (DedupKind.TASK, True)


@pytest.mark.parametrize("running", [False, True])
async def test_a_task_that_is_cancelled_is_forgotten_and_who_waits_is_told(harness: Harness, running: bool) -> None:
    await admit(harness, sharing("first", task("first")), poll("poll", "first"))
    lease = await harness.claim() if running else None
    await harness.peer().cancel_task("t", "first")
    told = await drained(harness)
    assert {id: (code(reply), reply.output) for id, reply in told.items()} == dict.fromkeys(
        ["first", "poll"], (errors.NOT_FOUND, None)
    )
    assert await harness.broker.outcome("t", "first") is None
    assert await harness.broker.state("t", "first") is None
    if lease is not None:
        assert (await harness.broker.complete(lease, [ItemResult("late")])).answered == 0
    await nothing_runs(harness)
    assert await harness.broker.outcome("t", "first") is None
    assert set(await drained(harness)) == {"first", "poll"}
    assert (await refused(harness, poll("again", "first"))).code == errors.NOT_FOUND


@pytest.mark.parametrize("running", [False, True])
async def test_a_cancelled_task_tells_its_gateway_and_runs_for_its_key(harness: Harness, running: bool) -> None:
    led, plain = sharing("led", task("led"), key(), nonce=7), ask(id="plain")
    await admit(harness, led, plain, sharing("joined", key()))
    lease = await harness.claim() if running else None
    for id in ("led", "plain", "unknown"):
        await harness.peer().cancel_task("t", id)
    [told] = (await drained(harness)).values()
    assert told.failure is not None
    assert (told.id, told.nonce, told.failure.code) == ("led", 7, errors.NOT_FOUND)
    assert told.failure.reason == "cancelled"
    assert await harness.broker.state("t", "led") is None
    if lease is None:
        lease = await harness.claim()
    assert set(ids(lease.entries)) == {"led", "plain"}  # What is no task goes on.
    await harness.broker.complete(lease, [ItemResult(f"output of {entry.id}") for entry in lease.entries])
    assert {id: reply.output for id, reply in (await drained(harness)).items() if id != "led"} == {
        "joined": "output of led",
        "plain": "output of plain",
    }
    await nothing_runs(harness)


async def test_a_task_without_room_after_a_late_original_fails_for_who_waits(harness: Harness) -> None:
    await admit(harness, sharing("first", same(), timeout=1.0), sharing("second", task("second"), same()))
    lease = await harness.claim()
    await admit(harness, *(ask(tenant=f"tenant {number}") for number in range(MAX_QUEUE)), poll("poll", "second"))
    await harness.advance(1.5)
    await harness.broker.release(lease, failed())
    replies = await drained(harness)
    assert set(replies) == {"first", "second", "poll"}
    kept = await harness.broker.outcome("t", "second")
    assert isinstance(kept, Reply)
    assert code(replies["second"]) == code(replies["poll"]) == code(kept) == errors.SERVICE_OVERLOADED


async def test_who_is_offered_anew_waits_for_no_longer_than_it_would_have_waited_in_the_queue(harness: Harness) -> None:
    await admit(harness, sharing("first", same(), timeout=1.0), sharing("second", same(), queue_timeout=2.0))
    lease = await harness.claim()
    await harness.advance(1.5)
    await harness.broker.release(lease, failed())
    assert set(await drained(harness)) == {"first"}
    await harness.reaping(2.0 + harness.grain)
    assert code((await drained(harness))["second"]) == errors.NO_WORKERS
    await nothing_runs(harness)


async def test_the_last_follower_that_is_late_takes_its_original_away(harness: Harness) -> None:
    first = sharing("first", same())
    await admit(harness, first, sharing("hasty", same(), timeout=1.0))
    await leave(harness.broker, first)
    await harness.reaping(1.0 + harness.grain)
    await nothing_runs(harness)
    assert set(await drained(harness)) == {"hasty"}
