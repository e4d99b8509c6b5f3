"""Promises of every broker on tasks: polled by id, waited for, forgotten."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import DedupKind, EntryState, ItemResult, Reply
from tests.contracts.brokers import (
    Harness,
    ask,
    drained,
    ids,
    output,
    story,
)
from tests.contracts.dedup_keys import (
    TTL,
    admit,
    came_by,
    code,
    key,
    nothing_runs,
    poll,
    refused,
    run_alone,
    sharing,
    task,
)


@story
async def test_a_task_asked_anew_after_its_answer_was_read_is_answered_by_what_was_kept(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first")))
    await run_alone(harness, "first")
    _, cursor = await harness.broker.replies("g", 0)
    assert await drained(harness, "g", cursor) == {}
    await admit(harness, sharing("first", task("first")))
    await nothing_runs(harness)
    assert came_by((await drained(harness, "g", cursor))["first"]) == (DedupKind.TASK, True)


@story
async def test_tasks_under_one_key_are_each_asked_for_by_their_id(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), key()), sharing("second", task("second"), key()))
    assert await harness.broker.outcome("t", "second") is EntryState.QUEUED
    await admit(harness, poll("poll", "second"))
    lease = await harness.claim()
    assert ids(lease.entries) == ["first"]
    assert await harness.broker.outcome("t", "second") is EntryState.PROCESSING
    assert await harness.broker.state("t", "second") is EntryState.PROCESSING
    await harness.answer(lease)
    await admit(harness, sharing("third", task("third"), key()))
    for id in ("first", "second", "third"):
        kept = await harness.broker.outcome("t", id)
        assert isinstance(kept, Reply)
        assert (kept.id, kept.output) == (id, output("asked"))
    assert set(await drained(harness)) == {"first", "second", "third", "poll"}


@story
async def test_a_task_is_recalled_until_it_is_forgotten(harness: Harness) -> None:
    broker = harness.broker
    assert await broker.outcome("t", "first") is None
    await admit(harness, sharing("first", task("first")), ask(id="plain"))
    assert await broker.outcome("t", "first") is await harness.peer().outcome("t", "first") is EntryState.QUEUED
    assert await broker.outcome("u", "first") is None
    assert await broker.outcome("t", "plain") is None  # It is no task.
    lease = await harness.claim()
    assert await harness.peer().outcome("t", "first") is EntryState.PROCESSING
    await harness.answer(lease)
    for _ in range(2):
        kept = await harness.peer().outcome("t", "first")
        assert isinstance(kept, Reply)
        assert (kept.id, kept.tenant, kept.output) == ("first", "t", output("asked"))
        assert (kept.attempts, kept.ran is not None, came_by(kept)) == (1, True, (None, False))
        assert await broker.outcome("u", "first") is None
        await drained(harness)
    await harness.advance(TTL - 1.0)
    assert isinstance(await broker.outcome("t", "first"), Reply)
    await harness.advance(1.0 + harness.grain)
    assert await broker.outcome("t", "first") is None
    assert (await refused(harness, poll("late", "first"))).code == errors.NOT_FOUND


@story
async def test_a_task_is_kept_though_its_gateway_never_reads_it(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), gateway="gone"))
    await run_alone(harness, "first")
    await admit(harness, poll("poll", "first", gateway="g2"))
    assert (await drained(harness, "g2"))["poll"].output == output("asked")


@story
async def test_who_waits_for_a_task_gets_its_outcome(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first")), poll("early", "first"))
    await harness.peer().subscribe([poll("elsewhere", "first", gateway="g2")])
    await run_alone(harness, "first")
    await admit(harness, poll("late", "first"))
    replies = await drained(harness)
    assert [(replies[id].output, came_by(replies[id])) for id in ("early", "late")] == [
        (output("asked"), (DedupKind.TASK, False)),
        (output("asked"), (DedupKind.TASK, True)),
    ]
    assert (await drained(harness, "g2"))["elsewhere"].output == output("asked")
    await nothing_runs(harness)


@story
async def test_there_is_nothing_to_wait_for_where_there_is_no_task_of_the_tenant(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first")), ask(id="plain"))
    for entry in (poll("p1", "nothing"), poll("p2", "first", tenant="u"), poll("p3", "plain")):
        assert (await refused(harness, entry)).code == errors.NOT_FOUND
        assert await harness.broker.state(entry.tenant, entry.id) is None
    assert sorted(ids((await harness.claim()).entries)) == ["first", "plain"]


@story
async def test_who_waits_for_a_task_in_vain_leaves_it_as_it_is(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await admit(harness, sharing("first", task("first")), poll("short", "first", timeout=1.0))
    await harness.reaping(1.0 + harness.grain)
    short = (await drained(harness))["short"]
    assert (code(short), short.shared) == (errors.DEADLINE_EXCEEDED, None)
    assert await harness.broker.outcome("t", "first") is EntryState.QUEUED
    await admit(harness, poll("gone", "first"))
    await harness.broker.withdraw([("t", "gone", 0)], "g")
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "short"}


@pytest.mark.parametrize("running", [False, True])
@story
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
@story
async def test_a_cancelled_task_tells_its_gateway_and_runs_on_for_others_under_its_key(
    harness: Harness, running: bool
) -> None:
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


@story
async def test_what_is_kept_of_a_task_is_forgotten_when_it_is_cancelled(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run_alone(harness, "first")
    await harness.broker.cancel_task("u", "first")
    assert isinstance(await harness.broker.outcome("t", "first"), Reply)
    await harness.peer().cancel_task("t", "first")
    assert await harness.broker.outcome("t", "first") is None
    assert (await refused(harness, poll("poll", "first"))).code == errors.NOT_FOUND
    await admit(harness, sharing("second", key()))  # The key is another matter.
    assert came_by((await drained(harness))["second"]) == (DedupKind.KEY, True)


@story
async def test_a_task_that_was_too_late_is_a_task_with_an_outcome(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), queue_timeout=1.0), poll("poll", "first"))
    await harness.reaping(1.0 + harness.grain)
    kept = await harness.broker.outcome("t", "first")
    assert isinstance(kept, Reply)
    replies = await drained(harness)
    assert kept.failure == replies["first"].failure == replies["poll"].failure
    assert code(kept) in (errors.DEADLINE_EXCEEDED, errors.NO_WORKERS)
