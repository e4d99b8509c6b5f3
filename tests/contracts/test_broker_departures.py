"""Answers in common when somebody leaves, is late, or runs in vain."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import DedupKind, EntryState, ItemResult, Lease, Reply
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_QUEUE,
    Harness,
    ask,
    crowd,
    drained,
    failed,
    ids,
    output,
    slot,
    story,
)
from tests.contracts.dedup_keys import admit, came_by, code, key, nothing_runs, poll, run_alone, same, sharing, task


@story
async def test_a_follower_that_leaves_hears_nothing_and_changes_nothing(harness: Harness) -> None:
    await admit(harness, *(sharing(id, key()) for id in ("first", "second", "third")))
    await harness.peer().withdraw([("t", "second", 0)], "g")
    assert await harness.broker.state("t", "second") is None
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "third"}


@pytest.mark.parametrize("running", [False, True])
@story
async def test_a_leader_that_leaves_runs_on_for_its_followers(harness: Harness, running: bool) -> None:
    await admit(harness, sharing("first", key(), same()), sharing("second", key()))
    if running:
        lease = await harness.claim()
    await harness.peer().withdraw([("t", "first", 0)], "g")
    await harness.broker.withdraw([("t", "first", 0)], "g")
    assert await harness.broker.state("t", "first") is None
    assert await harness.broker.state("t", "second") is (EntryState.PROCESSING if running else EntryState.QUEUED)
    await admit(harness, sharing("third", same()))  # One may still join.
    if not running:
        lease = await harness.claim()
        assert len(lease.entries) == 1
    await nothing_runs(harness)
    await harness.answer(lease)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == dict.fromkeys(["second", "third"], output("asked"))
    await admit(harness, sharing("later", key()))
    assert (await drained(harness))["later"].kept


@pytest.mark.parametrize("when", ["waiting", "running", "with it"])
@story
async def test_who_takes_the_id_of_a_leader_that_left_gets_its_own_answer(harness: Harness, when: str) -> None:
    await admit(harness, sharing("first", same("a"), input="a"), sharing("second", same("a"), input="a"))
    leases = [await harness.claim("gpu-0")] if when == "running" else []
    await harness.broker.withdraw([("t", "first", 0)], "g")
    if when == "waiting":
        leases.append(await harness.claim("gpu-0"))
    await admit(harness, ask("mine", id="first", nonce=1))
    assert await harness.broker.state("t", "first") is EntryState.QUEUED
    while isinstance(claimed := await harness.broker.claim(slot("gpu-1"), AT_ONCE), Lease):
        leases.append(claimed)
    assert await harness.broker.state("t", "first") is EntryState.PROCESSING
    for lease in leases:
        await harness.answer(lease)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {"first": output("mine"), "second": output("a")}
    await nothing_runs(harness)


@pytest.mark.parametrize("order", [["first", "second", "third"], ["third", "second", "first"]])
@story
async def test_what_nobody_waits_for_any_more_never_runs(harness: Harness, order: list[str]) -> None:
    chain = (same("a"),), (same("b"), same("a")), (same("b"),)
    await admit(
        harness, *(sharing(id, *dedup_keys) for id, dedup_keys in zip(("first", "second", "third"), chain, strict=True))
    )
    for id in order[:2]:
        await harness.broker.withdraw([("t", id, 0)], "g")
        assert sum(one.depth for one in await harness.broker.depths()) == 1
    await harness.peer().withdraw([("t", order[2], 0)], "g")
    await nothing_runs(harness)
    assert await drained(harness) == {}
    await admit(harness, sharing("anew", same("a"), same("b")))
    await run_alone(harness, "anew")


@pytest.mark.parametrize("order", [["first", "second"], ["second", "first"]])
@pytest.mark.parametrize("running", [False, True])
@story
async def test_what_is_under_a_key_runs_on_when_everybody_has_left(
    harness: Harness, running: bool, order: list[str]
) -> None:
    await admit(harness, sharing("first", key(), nonce=1), sharing("second", key(), nonce=1))
    lease = await harness.claim() if running else None
    for id in order:
        await harness.peer().withdraw([("t", id, 1)], "g")
        assert await harness.broker.state("t", id) is None
    await admit(harness, sharing("first", key(), nonce=2, gateway="g2"))  # The id is free: it joins.
    assert await harness.broker.state("t", "first") is (EntryState.PROCESSING if running else EntryState.QUEUED)
    await harness.broker.withdraw([("t", "first", 2)], "g2")
    await harness.answer(lease or await harness.claim())
    await nothing_runs(harness)
    assert (await drained(harness), await drained(harness, "g2")) == ({}, {})
    await admit(harness, sharing("second", key(), nonce=3))
    assert came_by((await drained(harness))["second"]) == (DedupKind.KEY, True)


@story
async def test_what_is_under_a_key_and_was_identical_to_another_keeps_that_running(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("second", key(), same()))
    await harness.broker.withdraw([("t", "second", 0), ("t", "first", 0)], "g")
    await run_alone(harness, "first")
    await admit(harness, sharing("third", key()))
    assert came_by((await drained(harness))["third"]) == (DedupKind.KEY, True)


@story
async def test_what_is_under_a_key_and_expires_when_everybody_has_left_leaves_the_key_free(harness: Harness) -> None:
    await admit(harness, sharing("first", key(), queue_timeout=1.0))
    await harness.broker.withdraw([("t", "first", 0)], "g")
    await harness.reaping(1.0 + harness.grain)
    await nothing_runs(harness)
    await admit(harness, sharing("first", key(), nonce=1))
    await run_alone(harness, "first")


@story
async def test_a_task_under_a_key_that_is_deleted_does_not_run(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await harness.peer().cancel_task("t", "first")
    await nothing_runs(harness)
    await admit(harness, sharing("second", key()))
    await run_alone(harness, "second")


@story
async def test_who_left_a_chain_hears_nothing_and_passes_on_what_it_would_have_heard(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("second", key(), same()), sharing("third", key()))
    await harness.broker.withdraw([("t", "second", 0)], "g")
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "third"}
    await nothing_runs(harness)


@story
async def test_what_runs_for_nobody_any_more_answers_nobody(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("second", same()))
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "first", 0), ("t", "second", 0)], "g")
    settled = await harness.broker.complete(lease, [ItemResult("for nobody")])
    assert (settled.answered, settled.departed, settled.fenced) == (0, 1, False)
    assert await drained(harness) == {}


@story
async def test_what_runs_for_nobody_any_more_is_not_tried_again(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("second", same()))
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "first", 0), ("t", "second", 0)], "g")
    assert await harness.broker.release(lease, failed())
    await harness.advance(5.0)
    await nothing_runs(harness)


@story
async def test_a_foreign_id_takes_nobody_away(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("second", same()))
    await harness.broker.withdraw([("u", "first", 0), ("u", "second", 0)], "g")
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "second"}


@story
async def test_a_follower_has_its_own_deadline(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await admit(harness, sharing("first", key()), sharing("hasty", key(), timeout=1.0, queue_timeout=0.5))
    await harness.reaping(0.9)
    assert await drained(harness) == {}  # It is not in the queue, so that its deadline is not the queue's.
    await harness.reaping(0.1 + harness.grain)
    assert {id: code(reply) for id, reply in (await drained(harness)).items()} == {"hasty": errors.DEADLINE_EXCEEDED}
    assert await harness.broker.state("t", "hasty") is None
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "hasty"}


@story
async def test_the_last_follower_that_is_late_takes_its_leader_away(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), sharing("hasty", same(), timeout=1.0))
    await harness.broker.withdraw([("t", "first", 0)], "g")
    await harness.reaping(1.0 + harness.grain)
    await nothing_runs(harness)
    assert set(await drained(harness)) == {"hasty"}


@story
async def test_when_a_leader_is_late_its_first_follower_leads(harness: Harness) -> None:
    await admit(harness, sharing("first", same(), queue_timeout=1.0))
    await harness.reaping(0.5)
    await admit(harness, sharing("second", same()), sharing("third", same()))
    await harness.reaping(0.5 + harness.grain)
    assert {id: code(reply) for id, reply in (await drained(harness)).items()} in (
        {"first": errors.DEADLINE_EXCEEDED},
        {"first": errors.NO_WORKERS},
    )
    await run_alone(harness, "second")
    await nothing_runs(harness)
    replies = await drained(harness)
    assert [(replies[id].output, came_by(replies[id])) for id in ("second", "third")] == [
        (output("asked"), (None, False)),
        (output("asked"), (DedupKind.SAME, False)),
    ]


@story
async def test_a_leader_that_fails_when_its_time_is_over_is_late_too(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await admit(harness, sharing("first", same(), timeout=1.0), sharing("second", same()))
    lease = await harness.claim()
    await harness.advance(1.5)
    assert await harness.broker.release(lease, failed())
    assert set(await drained(harness)) == {"first"}
    await run_alone(harness, "second")
    assert (await drained(harness))["second"].output == output("asked")


@story
async def test_followers_of_followers_of_a_late_leader_stay_together(harness: Harness) -> None:
    await admit(
        harness,
        sharing("first", same(), queue_timeout=1.0),
        sharing("second", task("second"), key(), same()),
        sharing("third", key()),
        poll("poll", "second"),
    )
    await harness.reaping(1.0 + harness.grain)
    assert set(await drained(harness)) == {"first"}
    assert await harness.broker.outcome("t", "second") is EntryState.QUEUED
    await run_alone(harness, "second")
    await nothing_runs(harness)
    replies = await drained(harness)
    assert {id: replies[id].output for id in ("second", "third", "poll")} == dict.fromkeys(
        ["second", "third", "poll"], output("asked")
    )
    assert [came_by(replies[id])[0] for id in ("second", "third", "poll")] == [None, DedupKind.KEY, DedupKind.TASK]
    assert isinstance(await harness.broker.outcome("t", "second"), Reply)


@story
async def test_who_left_is_not_offered_anew_but_its_followers_are(harness: Harness) -> None:
    await admit(
        harness, sharing("first", same(), queue_timeout=1.0), sharing("second", key(), same()), sharing("third", key())
    )
    await harness.broker.withdraw([("t", "second", 0)], "g")
    await harness.reaping(1.0 + harness.grain)
    await run_alone(harness, "third")
    assert set(await drained(harness)) == {"first", "third"}


@story
async def test_a_follower_that_is_late_and_leads_is_late_for_itself_alone(harness: Harness) -> None:
    await admit(
        harness,
        sharing("first", same()),
        sharing("hasty", task("hasty"), key(), same(), timeout=1.0),
        sharing("patient", key()),
    )
    await harness.reaping(1.0 + harness.grain)
    assert set(await drained(harness)) == {"hasty"}
    kept = await harness.broker.outcome("t", "hasty")
    assert isinstance(kept, Reply)
    assert kept.failure is not None
    lease = await harness.claim()
    assert sorted(ids(lease.entries)) == ["first", "patient"]
    await harness.answer(lease)
    assert (await drained(harness))["patient"].output == output("asked")


@story
async def test_who_is_offered_anew_and_finds_no_room_is_told_so(harness: Harness) -> None:
    await admit(harness, sharing("first", same(), timeout=1.0), sharing("second", task("second"), same()))
    lease = await harness.claim()
    await admit(harness, *crowd(MAX_QUEUE), poll("poll", "second"))
    await harness.advance(1.5)
    await harness.broker.release(lease, failed())
    replies = await drained(harness)
    assert set(replies) == {"first", "second", "poll"}
    assert code(replies["second"]) == code(replies["poll"]) == errors.SERVICE_OVERLOADED
    kept = await harness.broker.outcome("t", "second")
    assert isinstance(kept, Reply)
    assert code(kept) == errors.SERVICE_OVERLOADED


@story
async def test_a_follower_that_is_too_late_itself_leaves_what_is_kept_as_it_is(harness: Harness) -> None:
    await admit(harness, sharing("early", same()))
    await run_alone(harness, "early")
    await drained(harness)
    await admit(harness, sharing("first", key(), timeout=1.0), sharing("second", key(), same(), timeout=1.0))
    lease = await harness.claim()
    assert ids(lease.entries) == ["first"]
    await harness.advance(1.5)
    await harness.broker.release(lease, failed())
    replies = await drained(harness)
    assert code(replies["second"]) == errors.DEADLINE_EXCEEDED
    await admit(harness, sharing("third", same()))
    assert came_by((await drained(harness))["third"]) == (DedupKind.SAME, True)


@story
async def test_work_given_back_keeps_what_is_in_common(harness: Harness) -> None:
    await admit(harness, sharing("first", task("first"), key()), sharing("second", key()))
    assert await harness.broker.release(await harness.claim())
    assert await harness.broker.outcome("t", "first") is EntryState.QUEUED
    assert await harness.broker.state("t", "second") is EntryState.QUEUED
    await admit(harness, sharing("third", key()), poll("poll", "first"))
    await run_alone(harness, "first")
    assert {reply.output for reply in (await drained(harness)).values()} == {output("asked")}
    assert set(await drained(harness)) == {"first", "second", "third", "poll"}


@pytest.mark.parametrize("lost", [False, True])
@story
async def test_a_run_that_is_tried_again_is_waited_for(harness: Harness, lost: bool) -> None:
    await admit(harness, sharing("first", key()), sharing("second", key()))
    lease = await harness.claim()
    if lost:
        await harness.reaping(harness.lease_seconds + 1.0)
    else:
        await harness.broker.release(lease, failed())
        await harness.advance(1.0)
    await admit(harness, sharing("third", key()))
    await run_alone(harness, "first")
    assert (await harness.broker.complete(lease, [ItemResult("from the dead")])).fenced
    replies = await drained(harness)
    assert {id: (reply.output, reply.attempts) for id, reply in replies.items()} == dict.fromkeys(
        ["first", "second", "third"], (output("asked"), 2)
    )


@story
async def test_a_leader_that_left_is_tried_again_for_its_followers(harness: Harness) -> None:
    await admit(harness, sharing("first", key()), sharing("second", key()))
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "first", 0)], "g")
    await harness.broker.release(lease, failed())
    await harness.advance(1.0)
    await harness.answer(await harness.claim())
    assert {id: reply.output for id, reply in (await drained(harness)).items()} == {"second": output("asked")}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("size", [0, 70_000])
@story
async def test_the_dead_letter_of_a_leader_that_left_is_found_by_its_id(
    harness: Harness, alone: bool, size: int
) -> None:
    text = "x" * size
    await admit(harness, sharing("first", key(), input=text), sharing("second", key(), input=text))
    await harness.broker.withdraw([("t", "first", 0)], "g")
    if alone:
        await harness.broker.complete(await harness.claim(), [ItemResult(None, "rejected")])
    else:
        for _ in range(2):
            await harness.broker.release(await harness.claim(), failed())
            await harness.advance(1.0)
    assert {id: code(reply) for id, reply in (await drained(harness)).items()} == {"second": errors.REJECTED_BY_MODEL}
    [letter] = await harness.dead.find("first", "t")
    assert (letter.entry.tenant, letter.entry.id, letter.entry.input) == ("t", "first", text)
    assert [letter.entry.id for letter in await harness.dead.list()] == ["first"]
    assert await harness.dead.remove("first", "t") == 1
    assert await harness.dead.count() == 0
