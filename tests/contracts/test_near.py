"""Promises of a broker to a gateway in its own process: entries are taken at once, and replies are handed over."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from headway import errors
from headway.core.memory_room import SMALL
from headway.model import BatchFailure, Cause, Entry, EntryState, ItemResult, Limit, Reply, TokenCount
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import MemoryHarness, ask, ids, output, story


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    made = MemoryHarness()
    yield made
    made.close()


Settled = list[tuple[Sequence[object], Sequence[Reply]]]


def attached(harness: MemoryHarness) -> tuple[Settled, list[Sequence[Reply]]]:
    """Batches that are settled, and replies that are delivered."""
    settled: Settled = []
    told: list[Sequence[Reply]] = []

    def deliver(replies: Sequence[Reply], held: Sequence[object]) -> None:
        if held:
            settled.append((held, replies))
        else:
            told.append(replies)

    harness.broker.attach("g", deliver)
    return settled, told


@story
async def test_a_reply_is_handed_over_once_on_a_later_turn_and_its_id_is_free(harness: MemoryHarness) -> None:
    _, told = attached(harness)
    first, second = ask(id="a"), ask(id="b")
    assert [harness.broker.take(entry) for entry in (first, second, first)] == [None, None, None]
    lease = await harness.claim()
    assert ids(lease.entries) == ["a", "b"]
    await harness.answer(lease)
    assert told == [], "it may be the turn in which the batch ends"
    await harness.settle()
    [replies] = told
    assert [(reply.id, reply.output) for reply in replies] == [("a", output(first.input)), ("b", output(second.input))]
    assert await harness.broker.state("t", "a") is None
    assert harness.broker.take(ask(id="a", nonce=7)) is None


@story
async def test_who_asks_for_replies_gets_those_of_other_gateways_only(harness: MemoryHarness) -> None:
    _, told = attached(harness)
    for gateway in ("g", "h"):
        assert harness.broker.take(ask(id=gateway, gateway=gateway)) is None
    await harness.answer(await harness.claim())
    replies, _ = await harness.broker.replies("h", 0)
    assert ids(replies) == ["h"]
    await harness.settle()
    assert [ids(replies) for replies in told] == [["g"]]


@story
async def test_what_is_cancelled_is_told_at_once_and_forgotten(harness: MemoryHarness) -> None:
    _, told = attached(harness)
    task = ask(id="a", dedup_keys=(common.task("a"),))
    assert harness.broker.take(task) is None
    await harness.broker.cancel_task("t", "a")
    await harness.settle()
    [[reply]] = told
    assert reply.failure is not None
    assert reply.failure.code == errors.NOT_FOUND
    assert await harness.broker.outcome("t", "a") is None


@story
async def test_another_submission_of_a_live_id_is_a_conflict_and_one_over_its_limit_is_refused(
    harness: MemoryHarness,
) -> None:
    limit = Limit("user-1", "user", 60.0, 1.0)
    assert harness.broker.take(ask(id="a", limits=(limit,))) is None
    verdicts = [harness.broker.take(ask(id="a", nonce=9)), harness.broker.take(ask(id="b", limits=(limit,)))]
    assert [verdict and verdict.code for verdict in verdicts] == [errors.IDEMPOTENCY_CONFLICT, errors.RATE_LIMITED]
    assert await harness.broker.state("t", "a") is EntryState.QUEUED


@story
async def test_a_large_input_may_get_the_answer_that_is_kept_or_follow_one_that_is_too_late(
    harness: MemoryHarness,
) -> None:
    _, told = attached(harness)
    large, free = "x" * (2 * SMALL), harness.room
    first = common.sharing("first", common.key(), input=large)
    assert harness.broker.take(first) is None
    await harness.answer(await harness.claim())
    again = common.sharing("again", common.key(), input=large)
    assert harness.broker.take(again) is None
    await harness.settle()
    assert [(reply.id, reply.kept) for replies in told for reply in replies] == [("first", False), ("again", True)]
    assert harness.room == free
    told.clear()
    original = common.sharing("original", common.same(), input=large, timeout=1.0)
    follower = common.sharing("follower", common.same(), input=large, timeout=9.0)
    assert [harness.broker.take(one) for one in (original, follower)] == [None, None]
    await harness.reaping(2.0)
    await harness.answer(await harness.claim())
    await harness.settle()
    assert [reply.id for replies in told for reply in replies] == ["original", "follower"]
    assert harness.room == free


@story
async def test_what_waits_too_long_is_told_in_time_however_late_the_reaper_comes(harness: MemoryHarness) -> None:
    _, told = attached(harness)
    for name, keys in (("alone", ()), ("shares", (common.same(),))):
        await harness.broker.reap(1.0)
        assert harness.broker.take(ask(id=name, dedup_keys=keys, queue_timeout=0.1, timeout=60.0)) is None
        await harness.advance(0.1 + harness.grain)
        [[reply]] = told
        assert (reply.id, reply.output) == (name, None)
        told.clear()


@story
async def test_a_batch_of_which_all_is_held_is_settled_as_one(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    for name in "abc":
        assert harness.broker.enter(ask(id=name, nonce=ord(name)), ("t", name), name.upper(), harness.now()) is None
    await harness.answer(await harness.claim())
    assert settled == [], "it may be the turn in which the batch ends"
    await harness.settle()
    [(held, replies)] = settled
    assert (held, ids(replies), [reply.nonce for reply in replies]) == (["A", "B", "C"], ["a", "b", "c"], [97, 98, 99])
    assert {(reply.attempts, reply.ran) for reply in replies} == {(1, replies[0].ran)}
    assert told == []
    assert not harness.broker._entries


@story
async def test_replies_are_delivered_one_by_one_where_not_all_of_a_batch_is_held(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    assert harness.broker.enter(ask(id="a"), ("t", "a"), "A", harness.now()) is None
    assert harness.broker.take(ask(id="b")) is None
    await harness.answer(await harness.claim())
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["a", "b"]])


@pytest.mark.parametrize(
    "item", [ItemResult(None, "bad"), ItemResult("A", tokens=TokenCount(3, 3))], ids=["rejected", "tokens"]
)
@story
async def test_what_is_more_than_an_output_is_delivered(harness: MemoryHarness, item: ItemResult) -> None:
    settled, told = attached(harness)
    for name in "ab":
        assert harness.broker.enter(ask(id=name), ("t", name), name, harness.now()) is None
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("fine"), item])
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["a", "b"]])


class Held:
    """What a gateway holds of a request."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.key = entry, (entry.tenant, entry.id)


def held(*names: str, **of_each: Any) -> list[Held]:
    """Entries of one request, the first of which pays for all."""
    made = [msgspec.structs.replace(ask(id=name, nonce=ord(name)), payer=ord(names[0]), **of_each) for name in names]
    return [Held(msgspec.structs.replace(made[0], count=len(names))), *map(Held, made[1:])]


@story
async def test_entries_that_go_in_together_are_settled_as_one(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    several = held("a", "b", "c")
    assert harness.broker.enter_all(several, harness.now())
    await harness.answer(await harness.claim())
    await harness.settle()
    [(found, replies)] = settled
    assert (found, ids(replies), told) == (several, ["a", "b", "c"], [])
    assert not harness.broker._entries


@story
async def test_entries_that_have_to_be_judged_do_not_go_in_together_and_nothing_is_done(harness: MemoryHarness) -> None:
    limit = Limit("user-1", "user", 60.0, 1.0)
    assert not harness.broker.enter_all(held("a", input="x" * (2 * SMALL)), harness.now())
    assert not harness.broker.enter_all(held("a", model="nowhere"), harness.now())
    assert harness.broker.enter_all(held("b", limits=(limit,)), harness.now())
    assert not harness.broker.enter_all(held("c", limits=(limit,)), harness.now())
    crowd = [held(name)[0] for name in map(chr, range(0x100, 0x1000))]
    assert not harness.broker.enter_all(crowd, harness.now()), "there are more than the queue holds"
    assert ids((await harness.claim()).entries) == ["b"]


@story
async def test_a_dedup_key_that_is_new_goes_in_and_one_that_is_known_has_to_be_judged(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    assert harness.broker.enter_all(held("a", dedup_keys=(common.key(),)), harness.now())
    assert not harness.broker.enter_all(held("b", dedup_keys=(common.key(),)), harness.now())
    assert harness.broker.take(ask(id="follower", dedup_keys=(common.key(),))) is None
    await harness.answer(await harness.claim())
    await harness.settle()
    shared = [(reply.id, reply.shared) for replies in told for reply in replies]
    assert (settled, shared) == ([], [("a", None), ("follower", common.key().kind)])
    assert not harness.broker.enter_all(held("c", dedup_keys=(common.key(),)), harness.now())
    assert harness.broker.take(ask(id="later", dedup_keys=(common.key(),))) is None
    await harness.settle()
    assert [(reply.id, reply.kept) for reply in told[-1]] == [("later", True)]


@story
async def test_an_outcome_that_is_too_large_to_be_kept_is_delivered_by_itself(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    assert harness.broker.enter_all(held("a", dedup_keys=(common.task("a"),)), harness.now())
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("x" * harness.broker.kept.largest)])
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["a"]])
    outcome = await harness.broker.outcome("t", "a")
    assert isinstance(outcome, Reply)
    assert outcome.failure is not None


@pytest.mark.parametrize("tokens", [None, TokenCount(3, 3)], ids=["settled", "delivered"])
@story
async def test_what_is_held_is_let_go_of_with_the_output_however_long_the_queue_remembers_the_entry(
    harness: MemoryHarness, tokens: TokenCount | None
) -> None:
    settled, _ = attached(harness)
    assert harness.broker.enter(ask(id="first", tier=2), ("t", "first"), "first", harness.now()) is None
    [one] = held("a")
    told = weakref.ref(one)
    assert harness.broker.enter(ask(id="a", tier=0), ("t", "a"), one, harness.now()) is None
    del one
    lease = await harness.claim(limit=1)
    assert [entry.id for entry in lease.entries] == ["a"]
    await harness.broker.complete(lease, [ItemResult("out", tokens=tokens)])
    await harness.settle()
    settled.clear()
    assert told() is None


@story
async def test_who_has_left_is_no_part_of_what_is_delivered(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    for name in "ab":
        assert harness.broker.enter(ask(id=name), ("t", name), name, harness.now()) is None
    lease = await harness.claim()
    await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.answer(lease)
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["b"]])


@story
async def test_a_batch_that_ran_again_is_settled_with_all_its_attempts_and_frees_its_room(
    harness: MemoryHarness,
) -> None:
    settled, _ = attached(harness)
    free = harness.room
    for name, input in (("a", "x"), ("b", "x" * (2 * SMALL))):
        assert harness.broker.enter(ask(id=name, input=input), ("t", name), name, harness.now()) is None
    failed = BatchFailure(Cause.CRASHED, "gone", "gpu-0")
    assert await harness.broker.release(await harness.claim(), failed)
    await harness.reaping(5.0)
    await harness.answer(await harness.claim("gpu-1"))
    await harness.settle()
    [(held, replies)] = settled
    assert (sorted(map(str, held)), {reply.attempts for reply in replies}) == (["a", "b"], {2})
    assert harness.room == free
