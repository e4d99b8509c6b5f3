"""Promises of every broker when an id is used again: each submission has its own outcome, and nobody else's."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import DedupKind, Entry, EntryState, ItemResult, Reply
from tests.contracts.brokers import Harness, ask, drained, failed, in_mailbox, leave, output, story
from tests.contracts.dedup_keys import admit, came_by, code, nothing_runs, poll, refused, run_alone, sharing, task


def again(entry: Entry, text: str = "other", **how: object) -> Entry:
    """Make a second submission under the id of an entry."""
    return ask(text, id=entry.id, tenant=entry.tenant, nonce=entry.nonce + 1, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("gateway", ["g", "g2"])
@pytest.mark.parametrize("when", ["waiting", "running", "failed"])
@story
async def test_another_submission_under_an_id_that_is_live_is_a_conflict(
    harness: Harness, when: str, gateway: str
) -> None:
    first = ask("first", id="a", nonce=5)
    await admit(harness, first)
    lease = await harness.claim() if when != "waiting" else None
    if when == "failed" and lease is not None:
        await harness.broker.release(lease, failed())
        await harness.advance(1.0)
        lease = None
    assert (await refused(harness, again(first, gateway=gateway))).code == errors.IDEMPOTENCY_CONFLICT
    await admit(harness, first)  # The same submission is let in as it is.
    await harness.answer(lease or await harness.claim())
    [reply] = (await drained(harness)).values()
    assert (reply.nonce, reply.output) == (5, output("first"))
    assert await drained(harness, "g2") == {}
    await nothing_runs(harness)


@pytest.mark.parametrize("read", [False, True])
@story
async def test_an_id_is_free_again_when_its_request_has_its_outcome(harness: Harness, read: bool) -> None:
    first = ask("first", id="a", nonce=1)
    await admit(harness, first)
    await run_alone(harness, "a")
    cursor = 0
    if read:
        _, cursor = await harness.broker.replies("g", 0)
        await drained(harness, after=cursor)
    second = again(first)
    await admit(harness, second)
    await run_alone(harness, "a")
    await admit(harness, second)  # Its outcome was not read yet.
    await nothing_runs(harness)
    replies = {reply.nonce: reply.output for reply in await in_mailbox(harness, after=cursor)}
    assert replies == ({} if read else {1: output("first")}) | {2: output("other")}


@pytest.mark.parametrize("acknowledged", [False, True])
@story
async def test_who_has_read_an_id_s_first_outcome_still_hears_of_its_second(
    harness: Harness, acknowledged: bool
) -> None:
    first = ask("first", id="a", nonce=1)
    await admit(harness, first)
    await run_alone(harness, "a")
    _, cursor = await harness.broker.replies("g", 0)
    second = again(first)
    await admit(harness, second)
    if acknowledged:
        assert await drained(harness, after=cursor) == {}  # This acknowledges the first.
        await harness.advance(1.0)
        assert await harness.broker.state("t", "a") is EntryState.QUEUED
    await run_alone(harness, "a")
    [reply] = (await drained(harness, after=cursor)).values()
    assert (reply.nonce, reply.output) == (2, output("other"))
    await harness.advance(1.0)
    await admit(harness, second)  # Known still, so it does not run again.
    await nothing_runs(harness)


@pytest.mark.parametrize("running", [False, True])
@story
async def test_a_withdrawal_of_another_submission_or_gateway_changes_nothing(harness: Harness, running: bool) -> None:
    entry = ask("first", id="a", nonce=5)
    await admit(harness, entry)
    lease = await harness.claim() if running else None
    await harness.peer().withdraw([("t", "a", 4), ("t", "a", 6)], "g")
    await harness.peer().withdraw([("t", "a", 5)], "g2")
    await harness.answer(lease or await harness.claim())
    assert (await drained(harness))["a"].output == output("first")


@pytest.mark.parametrize("running", [False, True])
@story
async def test_a_submission_after_a_withdrawal_gets_its_own_answer(harness: Harness, running: bool) -> None:
    first = ask("first", id="a", nonce=1)
    await admit(harness, first)
    leases = [await harness.claim()] if running else []
    await leave(harness.broker, first)
    second = again(first)
    await admit(harness, second)
    leases.append(await harness.claim("gpu-1"))
    await leave(harness.peer(), first)  # Once more, late: the second is not meant.
    for lease in leases:
        await harness.broker.complete(lease, [ItemResult(output(entry.input)) for entry in lease.entries])
    [reply] = (await drained(harness)).values()
    assert (reply.nonce, reply.output) == (2, output("other"))


@story
async def test_a_withdrawal_leaves_the_outcome_of_a_task(harness: Harness) -> None:
    first = sharing("first", task("first"), nonce=1)
    await admit(harness, first)
    await run_alone(harness, "first")
    for _ in range(2):
        await leave(harness.peer(), first)
        kept = await harness.broker.outcome("t", "first")
        assert isinstance(kept, Reply)
        await drained(harness)
    second = sharing("first", task("first"), nonce=2, gateway="g2")
    await admit(harness, second)  # Answered at once by what is kept.
    await leave(harness.broker, second)
    assert isinstance(await harness.broker.outcome("t", "first"), Reply)
    assert came_by((await drained(harness, "g2"))["first"]) == (DedupKind.TASK, True)


@story
async def test_who_waits_for_a_task_and_leaves_does_not_cancel_it(harness: Harness) -> None:
    waits = poll("poll", "first", nonce=3)
    await admit(harness, sharing("first", task("first")), waits)
    await harness.broker.cancel_task("t", "poll")  # It is no task.
    await leave(harness.broker, waits)
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first"}


@story
async def test_a_cancelled_task_that_is_offered_again_does_not_run(harness: Harness) -> None:
    first = sharing("first", task("first"), nonce=1)
    await admit(harness, first)
    await harness.peer().cancel_task("t", "first")
    await admit(harness, first)  # Its gateway has not read yet what became of it.
    await nothing_runs(harness)
    assert [code(reply) for reply in (await drained(harness)).values()] == [errors.NOT_FOUND]


@story
async def test_the_id_of_a_kept_task_stands_for_what_it_asked(harness: Harness) -> None:
    def asked(nonce: int, digest: bytes) -> Entry:
        return ask("text", id="first", nonce=nonce, digest=digest, gateway="g2")

    await admit(harness, asked(1, b"this"))  # Nothing is known of it yet: it runs.
    await run_alone(harness, "first")
    await admit(harness, sharing("first", task("first", digest=b"this"), nonce=2))
    await run_alone(harness, "first")
    assert (await refused(harness, asked(3, b"that"))).code == errors.IDEMPOTENCY_MISUSE
    await admit(harness, asked(4, b""))  # Its client did not choose the id.
    await run_alone(harness, "first")


@story
async def test_who_asks_the_same_under_the_id_of_a_kept_task_gets_its_outcome(harness: Harness) -> None:
    kept = sharing("first", task("first", digest=b"this"), nonce=1)
    await admit(harness, kept)
    await run_alone(harness, "first")
    await admit(harness, ask("asked", id="first", nonce=2, digest=b"this", gateway="g2"))
    await nothing_runs(harness)
    reply = (await drained(harness, "g2"))["first"]
    assert (reply.nonce, reply.output, came_by(reply)) == (2, output("asked"), (DedupKind.TASK, True))
    assert isinstance(await harness.broker.outcome("t", "first"), Reply)


@story
async def test_a_probe_finds_a_broker_that_takes_changes_and_makes_none(harness: Harness) -> None:
    await admit(harness, ask("asked", id="first", gateway="g"))
    await harness.broker.probe("g")
    await harness.peer().probe("nobody")
    assert await harness.broker.state("t", "first") is EntryState.QUEUED
    await run_alone(harness, "first")
    assert [reply.output for reply in (await drained(harness)).values()] == [output("asked")]
