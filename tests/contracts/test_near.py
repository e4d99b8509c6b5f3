"""Promises of a broker to a gateway in its own process: entries are taken at once, and replies are handed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from headway import errors
from headway.core.memory_room import SMALL
from headway.model import EntryState, Limit, Reply
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import MemoryHarness, ask, ids, output, story


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    made = MemoryHarness()
    yield made
    made.close()


@story
async def test_a_reply_is_handed_over_once_on_a_later_turn_and_its_id_is_free(harness: MemoryHarness) -> None:
    told: list[Sequence[Reply]] = []
    harness.broker.attach("g", told.append)
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
    told: list[Sequence[Reply]] = []
    harness.broker.attach("g", told.append)
    for gateway in ("g", "h"):
        assert harness.broker.take(ask(id=gateway, gateway=gateway)) is None
    await harness.answer(await harness.claim())
    replies, _ = await harness.broker.replies("h", 0)
    assert ids(replies) == ["h"]
    await harness.settle()
    assert [ids(replies) for replies in told] == [["g"]]


@story
async def test_what_is_cancelled_is_told_at_once_and_forgotten(harness: MemoryHarness) -> None:
    told: list[Sequence[Reply]] = []
    harness.broker.attach("g", told.append)
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
    told: list[Sequence[Reply]] = []
    harness.broker.attach("g", told.append)
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
    told: list[Sequence[Reply]] = []
    harness.broker.attach("g", told.append)
    for name, keys in (("alone", ()), ("shares", (common.same(),))):
        await harness.broker.reap_and_rest()
        assert harness.broker.take(ask(id=name, dedup_keys=keys, queue_timeout=0.1, timeout=60.0)) is None
        await harness.advance(0.1 + harness.grain)
        [[reply]] = told
        assert (reply.id, reply.output) == (name, None)
        told.clear()
