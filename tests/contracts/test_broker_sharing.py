"""Promises of every broker on answers in common: which entry leads, which join, what is kept."""

from __future__ import annotations

import pytest

from headway import errors
from headway.model import Cause, DedupKey, DedupKind, Entry, ItemResult, Lease
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    Harness,
    ask,
    drained,
    failed,
    ids,
    output,
    read_mailbox,
    slot,
    story,
)
from tests.contracts.dedup_keys import (
    KINDS,
    TTL,
    admit,
    came_by,
    code,
    fail_for_good,
    key,
    nothing_runs,
    poll,
    refused,
    run_alone,
    same,
    share,
    sharing,
    task,
)


@pytest.mark.parametrize("kind", [DedupKind.KEY, DedupKind.SAME])
@story
async def test_who_comes_while_the_first_has_no_outcome_joins_it(harness: Harness, kind: DedupKind) -> None:
    await admit(harness, sharing("first", share(kind)), sharing("waiting", share(kind)))
    lease = await harness.claim()
    assert ids(lease.entries) == ["first"]
    await admit(harness, sharing("running", share(kind)))
    await nothing_runs(harness)
    await harness.advance(0.25)
    await harness.answer(lease)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == dict.fromkeys(
        ["first", "waiting", "running"], output("asked")
    )
    assert [came_by(replies[id]) for id in ("first", "waiting", "running")] == [
        (None, False),
        (kind, False),
        (kind, False),
    ]
    ran = replies["waiting"].ran
    assert ran is not None
    assert (ran.worker, ran.size, replies["waiting"].attempts) == ("gpu-0", 1, 1)
    await nothing_runs(harness)


@pytest.mark.parametrize("kind", [DedupKind.KEY, DedupKind.SAME])
@story
async def test_who_comes_later_gets_what_was_kept_without_a_run(harness: Harness, kind: DedupKind) -> None:
    await admit(harness, sharing("first", share(kind)))
    await run_alone(harness, "first")
    await harness.advance(TTL - 1.0)
    await admit(harness, sharing("later", share(kind)))
    await nothing_runs(harness)
    later = (await drained(harness))["later"]
    assert (later.tenant, later.output, came_by(later)) == ("t", output("asked"), (kind, True))
    assert await harness.broker.state("t", "later") is None


@pytest.mark.parametrize("kind", [DedupKind.KEY, DedupKind.SAME])
@story
async def test_what_was_kept_long_enough_is_forgotten(harness: Harness, kind: DedupKind) -> None:
    """The time counts from the outcome, and a hit does not renew it."""
    await admit(harness, sharing("first", share(kind)))
    await harness.advance(5.0)
    await run_alone(harness, "first")
    await harness.advance(TTL - 1.0)
    await admit(harness, sharing("hit", share(kind)))
    await harness.advance(1.0 + harness.grain)
    await admit(harness, sharing("miss", share(kind)))
    await run_alone(harness, "miss")
    replies = await drained(harness)
    assert [came_by(replies[id]) for id in ("hit", "miss")] == [(kind, True), (None, False)]


@story
async def test_what_is_not_to_be_kept_is_joined_all_the_same(harness: Harness) -> None:
    await admit(harness, *(sharing(id, same(keep=0.0)) for id in ("first", "second")))
    await run_alone(harness, "first")
    await admit(harness, sharing("third", same(keep=0.0)))
    await run_alone(harness, "third")
    replies = await drained(harness)
    assert [came_by(replies[id]) for id in ("first", "second", "third")] == [
        (None, False),
        (DedupKind.SAME, False),
        (None, False),
    ]


@story
async def test_who_does_not_join_runs_beside_and_gets_what_was_kept(harness: Harness) -> None:
    await admit(harness, *(sharing(id, same(joins=False)) for id in ("first", "second")))
    lease = await harness.claim()
    assert sorted(ids(lease.entries)) == ["first", "second"]
    await harness.answer(lease)
    await admit(harness, sharing("third", same(joins=False)))
    await nothing_runs(harness)
    replies = await drained(harness)
    assert [came_by(replies[id]) for id in ("first", "second", "third")] == [
        (None, False),
        (None, False),
        (DedupKind.SAME, True),
    ]


@story
async def test_keys_are_of_a_kind_and_of_a_tenant(harness: Harness) -> None:
    await admit(
        harness,
        sharing("key", key("x", b"")),
        sharing("same", same("x")),
        sharing("x", task("x")),
        sharing("other key", key("y")),
        sharing("foreign", key("x", b"another"), tenant="u"),
        sharing("x", task("x"), tenant="u"),
    )
    lease = await harness.claim()
    assert len(lease.entries) == 6
    await harness.answer(lease)
    await admit(harness, sharing("later", same("x"), tenant="u"))
    await run_alone(harness, "later")


@story
async def test_an_entry_without_shares_meets_nobody(harness: Harness) -> None:
    await admit(harness, sharing("first", same()), ask("asked", id="plain"))
    lease = await harness.claim()
    assert sorted(ids(lease.entries)) == ["first", "plain"]
    await harness.answer(lease)
    assert came_by((await drained(harness))["plain"]) == (None, False)


@story
async def test_another_task_under_the_same_id_is_a_conflict_and_who_waits_need_not_know_what_was_asked(
    harness: Harness,
) -> None:
    def asked(digest: bytes, gateway: str = "g") -> Entry:
        return sharing("first", DedupKey(DedupKind.TASK, "first", digest, TTL), gateway=gateway)

    await admit(harness, asked(b"one"), poll("waits", "first"))
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "waits"}
    verdict = await refused(harness, asked(b"another", "h"))
    assert (verdict.code, verdict.reason) == (errors.IDEMPOTENCY_MISUSE, "conflict")
    await admit(harness, asked(b"one", "i"), poll("later", "first", gateway="i"))
    assert set(await drained(harness, "i")) == {"first", "later"}
    await nothing_runs(harness)


@story
async def test_another_request_under_the_same_key_is_a_conflict_in_flight_and_kept(harness: Harness) -> None:
    await admit(harness, sharing("first", key(digest=b"one")))
    for when in ("waiting", "running", "kept"):
        verdict = await refused(harness, sharing(when, key(digest=b"another")))
        assert (verdict.code, verdict.reason) == (errors.IDEMPOTENCY_MISUSE, "conflict")
        assert await harness.broker.state("t", when) is None
        if when == "waiting":
            lease = await harness.claim()
        elif when == "running":
            await harness.answer(lease)
    await admit(harness, sharing("foreign", key(digest=b"another"), tenant="u"))
    await run_alone(harness, "foreign")
    await harness.advance(TTL + harness.grain)
    await admit(harness, sharing("after", key(digest=b"another")))
    await run_alone(harness, "after")
    assert set(await drained(harness)) == {"first", "foreign", "after"}


@story
async def test_only_who_has_the_outcome_in_common_is_told(harness: Harness) -> None:
    """Each reply goes to its own gateway, and is there once."""
    await admit(harness, sharing("first", key(), gateway="g1"))
    assert list(await harness.peer().enqueue([sharing("second", key(), gateway="g2")])) == [None]
    await run_alone(harness, "first")
    assert list(await harness.peer().enqueue([sharing("third", key(), gateway="g2")])) == [None]
    assert set(await drained(harness, "g1")) == {"first"}
    there, _ = await read_mailbox(harness, harness.peer(), "g2")
    assert [(reply.id, reply.kept) for reply in there] == [("second", False), ("third", True)]


@story
async def test_a_thousand_at_once_are_one_run_and_a_thousand_more_are_none(harness: Harness) -> None:
    async def ask_all(named: str) -> None:
        for start in range(0, 1000, 100):
            entries = [sharing(f"{named} {start + n}", same()) for n in range(100)]
            broker = harness.broker if start % 200 else harness.peer()
            assert list(await broker.enqueue(entries)) == [None] * 100

    await ask_all("at once")
    await run_alone(harness, "at once 0")
    await nothing_runs(harness)
    replies, cursor = await read_mailbox(harness, harness.broker)
    assert len({reply.id for reply in replies}) == len(replies) == 1000
    assert sum(came_by(reply) == (DedupKind.SAME, False) for reply in replies) == 999
    await ask_all("later")
    await nothing_runs(harness)
    again = await drained(harness, "g", cursor)
    assert len(again) == 1000
    assert {came_by(reply) for reply in again.values()} == {(DedupKind.SAME, True)}
    assert {reply.output for reply in (*replies, *again.values())} == {output("asked")}


@story
async def test_a_follower_offered_again_has_joined_once(harness: Harness) -> None:
    follower = sharing("second", key())
    await admit(harness, sharing("first", key()), follower, follower)
    assert list(await harness.peer().enqueue([follower])) == [None]
    await run_alone(harness, "first")
    await admit(harness, follower)  # Answered, but nobody has read it.
    replies, cursor = await read_mailbox(harness, harness.broker)
    assert sorted(ids(replies)) == ["first", "second"]
    assert await drained(harness, "g", cursor) == {}


@story
async def test_a_leader_offered_again_does_not_join_itself(harness: Harness) -> None:
    original = sharing("first", task("first"), key(), same())
    await admit(harness, original, original)
    lease = await harness.claim()
    await admit(harness, original)
    await harness.answer(lease)
    await admit(harness, original)
    replies, cursor = await read_mailbox(harness, harness.broker)
    assert ids(replies) == ["first"]
    assert await drained(harness, "g", cursor) == {}
    await nothing_runs(harness)


@story
async def test_a_follower_at_another_gateway_is_a_conflict_like_anybody(harness: Harness) -> None:
    await admit(harness, sharing("first", key()), sharing("second", key()))
    [verdict] = await harness.peer().enqueue([sharing("second", key(), gateway="g2")])
    assert verdict is not None
    assert verdict.code == errors.IDEMPOTENCY_CONFLICT
    await run_alone(harness, "first")
    assert set(await drained(harness)) == {"first", "second"}


OUTCOMES = {
    "output": (ItemResult("fine"), {DedupKind.TASK, DedupKind.KEY, DedupKind.SAME}),
    "rejected": (ItemResult(None, "no such word"), {DedupKind.TASK, DedupKind.KEY}),
    "fault": (ItemResult(None, "not a string", fault=True), {DedupKind.TASK}),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("kind", KINDS)
@story
async def test_each_kind_keeps_what_is_of_use_later(harness: Harness, kind: DedupKind, outcome: str) -> None:
    item, keeping = OUTCOMES[outcome]
    await admit(harness, sharing("first", share(kind)))
    joined = poll("joined", "first") if kind is DedupKind.TASK else sharing("joined", share(kind))
    await admit(harness, joined)
    await harness.broker.complete(await harness.claim(), [item])
    later = poll("later", "first") if kind is DedupKind.TASK else sharing("later", share(kind))
    await admit(harness, later)
    replies = await drained(harness)
    first = replies["first"]
    assert (replies["joined"].output, replies["joined"].failure) == (first.output, first.failure)
    assert came_by(replies["joined"]) == (kind, False)
    if kind in keeping:
        await nothing_runs(harness)
        assert (replies["later"].output, replies["later"].failure) == (first.output, first.failure)
        assert came_by(replies["later"]) == (kind, True)
    else:
        await run_alone(harness, "later")


@pytest.mark.parametrize("cause", [Cause.RAISED, Cause.REMOTE])
@pytest.mark.parametrize("kind", KINDS)
@story
async def test_a_verdict_after_retries_is_passed_on(harness: Harness, kind: DedupKind, cause: Cause) -> None:
    """A rejection by the model is kept under a key; a failure of the backend with tasks alone."""
    await admit(harness, sharing("first", share(kind)))
    await admit(harness, poll("joined", "first") if kind is DedupKind.TASK else sharing("joined", share(kind)))
    await fail_for_good(harness, "first", cause)
    replies = await drained(harness)
    assert code(replies["first"]) in (errors.REJECTED_BY_MODEL, errors.BACKEND_ERROR)
    assert replies["joined"].failure == replies["first"].failure
    assert replies["joined"].attempts == replies["first"].attempts
    assert await harness.dead.count() == 1
    if kind is DedupKind.TASK:
        await admit(harness, poll("later", "first"))
        assert (await drained(harness))["later"].failure == replies["first"].failure
        return
    await admit(harness, sharing("later", share(kind)))
    if kind is DedupKind.KEY and code(replies["first"]) == errors.REJECTED_BY_MODEL:
        assert came_by((await drained(harness))["later"]) == (kind, True)
    else:
        await run_alone(harness, "later")


@story
async def test_a_spent_retry_budget_is_passed_on(harness: Harness) -> None:
    """Batches fail until there are no more retries; who had joined a member hears what it hears."""
    pairs = [(f"original {n}", f"follower {n}") for n in range(6 * MAX_BATCH)]
    for original, follower in pairs:
        await admit(harness, sharing(original, same(original)), sharing(follower, same(original)))
    for attempt in range(3 * len(pairs)):
        claimed = await harness.broker.claim(slot(f"gpu-{attempt % 2}"), AT_ONCE)
        if isinstance(claimed, Lease):
            assert all(id.startswith("original") for id in ids(claimed.entries))
            assert await harness.broker.release(claimed, failed(Cause.CRASHED))
        else:
            await harness.advance(0.05)
    replies = await drained(harness)
    spent = [id for id, reply in replies.items() if reply.failure and "retry budget" in reply.failure.message]
    assert spent
    assert len(replies) % 2 == 0
    for original, follower in pairs:
        if original in replies:
            assert replies[follower].failure == replies[original].failure
            assert came_by(replies[follower]) == (DedupKind.SAME, False)


@story
async def test_the_first_share_that_can_be_joined_or_is_kept_decides(harness: Harness) -> None:
    await admit(harness, sharing("same", same()))
    await run_alone(harness, "same")
    await admit(harness, sharing("key", key(), input="by key"))
    await admit(harness, sharing("both", key(), same()), sharing("turned", same(), key()))
    await run_alone(harness, "key")
    replies = await drained(harness)
    assert (replies["both"].output, came_by(replies["both"])) == (output("by key"), (DedupKind.KEY, False))
    assert (replies["turned"].output, came_by(replies["turned"])) == (output("asked"), (DedupKind.SAME, True))


@story
async def test_who_joins_leads_where_nobody_is_yet(harness: Harness) -> None:
    """Outcomes run along chains: the second joins the first as the same, the third joins the second by its key."""
    await admit(harness, sharing("first", same()), sharing("second", key(), same()), sharing("third", key(), same("t")))
    verdict = await refused(harness, sharing("misused", key(digest=b"another")))
    assert verdict.code == errors.IDEMPOTENCY_MISUSE
    await run_alone(harness, "first")
    await admit(harness, sharing("by key", key()), sharing("by t", same("t")))
    await nothing_runs(harness)
    replies = await drained(harness)
    assert {reply.output for reply in replies.values()} == {output("asked")}
    assert [came_by(replies[id]) for id in ("first", "second", "third", "by key", "by t")] == [
        (None, False),
        (DedupKind.SAME, False),
        (DedupKind.KEY, False),
        (DedupKind.KEY, True),
        (DedupKind.SAME, True),
    ]


@story
async def test_what_comes_from_what_was_kept_is_kept_where_nobody_was_yet(harness: Harness) -> None:
    await admit(harness, sharing("first", same()))
    await run_alone(harness, "first")
    await harness.advance(TTL - 1.0)
    await admit(harness, sharing("second", task("second"), key(), same()))
    await harness.advance(2.0)
    await admit(harness, sharing("third", key()), poll("fourth", "second"))
    await nothing_runs(harness)
    replies = await drained(harness)
    assert [came_by(replies[id]) for id in ("second", "third", "fourth")] == [
        (DedupKind.SAME, True),
        (DedupKind.KEY, True),
        (DedupKind.TASK, True),
    ]
