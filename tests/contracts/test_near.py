"""Promises of a broker to a gateway in its own process: it takes entries immediately, and hands replies over."""

import weakref
from collections.abc import Sequence

import msgspec
import pytest

from headway import errors
from headway.core.queue_limits import SMALL
from headway.model import BatchFailure, Cause, Entry, ItemResult, Limit, Reply, TokenCount
from tests.contracts import dedup_keys as common
from tests.contracts.brokers import MemoryHarness, ask, failure_of, ids, outcome_of, output

pytestmark = pytest.mark.parametrize("harness", ["memory"], indirect=True)


class Held:
    """What a gateway holds for a request."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.key, self.id = entry, (entry.tenant, entry.id), entry.id


def several(*names: str) -> list[Held]:
    made = [msgspec.structs.replace(ask(id=name, nonce=ord(name)), payer=ord(names[0])) for name in names]
    return [Held(msgspec.structs.replace(made[0], count=len(names))), *map(Held, made[1:])]


def enter(harness: MemoryHarness, *held: Held) -> list[str | None]:
    verdicts = [harness.broker.enter(one, harness.now()) for one in held]
    return [None if verdict is None else verdict.code for verdict in verdicts]


Settled = list[tuple[Sequence[object], Sequence[Reply]]]


def attached(harness: MemoryHarness) -> tuple[Settled, list[Sequence[Reply]]]:
    settled: Settled = []
    told: list[Sequence[Reply]] = []

    def deliver(replies: Sequence[Reply], held: Sequence[object]) -> None:
        if held:
            settled.append((held, replies))
        else:
            told.append(replies)

    harness.broker.attach("g", deliver)
    return settled, told


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
    told.clear()
    assert harness.broker.take(ask(id="a", nonce=7, dedup_keys=(common.task("a"),))) is None
    assert harness.broker.take(other := ask(gateway="other")) is None
    await harness.broker.cancel_task("t", "a")
    await harness.settle()
    [[reply]] = told
    assert failure_of(reply).code == errors.NOT_FOUND
    assert await harness.broker.outcome("t", "a") is None
    await harness.answer(await harness.claim())
    replies, _ = await harness.broker.replies("other", 0)
    assert ids(replies) == [other.id], "who asks for replies gets those of other gateways"


async def test_who_is_known_without_a_queue_or_over_a_limit_is_refused(harness: MemoryHarness) -> None:
    limit = Limit("user-1", "user", 60.0, 1.0)
    assert enter(harness, Held(ask(id="a", model="nowhere"))) == [errors.NO_WORKERS]
    assert enter(harness, *[Held(ask(id=name, limits=(limit,))) for name in "bc"]) == [None, errors.RATE_LIMITED]
    verdicts = [harness.broker.take(ask(id="b", nonce=9)), harness.broker.take(ask(id="c", limits=(limit,)))]
    assert [verdict and verdict.code for verdict in verdicts] == [errors.IDEMPOTENCY_CONFLICT, errors.RATE_LIMITED]
    assert ids((await harness.claim()).entries) == ["b"]


async def test_a_large_input_that_gets_a_kept_answer_takes_no_room(harness: MemoryHarness) -> None:
    _, told = attached(harness)
    large, free = "x" * (2 * SMALL), harness.room
    assert harness.broker.take(common.sharing("first", common.key(), input=large)) is None
    await harness.answer(await harness.claim())
    assert harness.broker.take(common.sharing("again", common.key(), input=large)) is None
    await harness.settle()
    assert [(reply.id, reply.kept) for replies in told for reply in replies] == [("first", False), ("again", True)]
    assert harness.room == free


async def test_a_batch_of_which_all_is_held_is_settled_as_one(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    asked = [Held(ask(id="a", nonce=ord("a"))), *several("b", "c")]
    assert enter(harness, *asked) == [None] * 3
    await harness.answer(await harness.claim())
    assert settled == [], "it may be the turn in which the batch ends"
    await harness.settle()
    [(held, replies)] = settled
    assert (held, ids(replies), [reply.nonce for reply in replies]) == (asked, ["a", "b", "c"], [97, 98, 99])
    assert {(reply.attempts, reply.ran) for reply in replies} == {(1, replies[0].ran)}
    assert told == []
    assert not harness.broker._entries


@pytest.mark.parametrize(
    ("alien", "leaves", "item"),
    [
        (True, False, ItemResult("A")),
        (False, False, ItemResult(None, "bad")),
        (False, False, ItemResult("A", tokens=TokenCount(3, 3))),
        (False, True, ItemResult("A")),
    ],
    ids=["not held", "rejected", "tokens", "left"],
)
async def test_replies_are_delivered_where_a_batch_is_not_all_held_and_answered_by_an_output(
    harness: MemoryHarness, alien: bool, leaves: bool, item: ItemResult
) -> None:
    settled, told = attached(harness)
    assert enter(harness, Held(ask(id="a"))) == [None]
    if alien:
        assert harness.broker.take(ask(id="b")) is None
    else:
        assert enter(harness, Held(ask(id="b"))) == [None]
    lease = await harness.claim()
    if leaves:
        await harness.broker.withdraw([("t", "a", 0)], "g")
    await harness.broker.complete(lease, [ItemResult("fine"), item])
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["b"] if leaves else ["a", "b"]])


async def test_a_dedup_key_that_is_known_is_joined_whoever_entered_it(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    first, second, later = (Held(ask(id=name, dedup_keys=(common.key(),))) for name in "abc")
    assert enter(harness, first, second) == [None, None]
    assert harness.broker.take(ask(id="follower", dedup_keys=(common.key(),))) is None
    await harness.answer(await harness.claim())
    await harness.settle()
    kind = common.key().kind
    shared = [(reply.id, reply.shared) for replies in told for reply in replies]
    assert (settled, shared) == ([], [("a", None), ("b", kind), ("follower", kind)])
    assert enter(harness, later) == [None]
    await harness.settle()
    assert (settled, [(reply.id, reply.kept) for reply in told[-1]]) == ([], [("c", True)])
    assert not harness.broker._entries


async def test_an_outcome_that_is_too_large_to_be_kept_is_delivered_by_itself(harness: MemoryHarness) -> None:
    settled, told = attached(harness)
    assert enter(harness, Held(ask(id="a", dedup_keys=(common.task("a"),)))) == [None]
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("x" * harness.broker.kept.largest)])
    await harness.settle()
    assert (settled, [ids(replies) for replies in told]) == ([], [["a"]])
    outcome = await outcome_of(harness.broker, "a")
    assert failure_of(outcome).reason == "kept"


@pytest.mark.parametrize("tokens", [None, TokenCount(3, 3)], ids=["settled", "delivered"])
async def test_what_is_held_is_let_go_of_with_the_output_however_long_the_queue_remembers_the_entry(
    harness: MemoryHarness, tokens: TokenCount | None
) -> None:
    settled, _ = attached(harness)
    held = Held(ask(id="a", tier=0))
    assert enter(harness, Held(ask(id="first", tier=2)), held) == [None, None]
    told = weakref.ref(held)
    del held
    lease = await harness.claim(limit=1)
    assert [entry.id for entry in lease.entries] == ["a"]
    await harness.broker.complete(lease, [ItemResult("out", tokens=tokens)])
    await harness.settle()
    settled.clear()
    assert told() is None


async def test_a_repeated_batch_is_settled_with_all_attempts_and_frees_its_room(harness: MemoryHarness) -> None:
    settled, _ = attached(harness)
    free = harness.room
    asked = [Held(ask("x", id="a")), Held(ask("x" * (2 * SMALL), id="b"))]
    assert enter(harness, *asked) == [None, None]
    failed = BatchFailure(Cause.CRASHED, "gone", "gpu-0")
    assert await harness.broker.release(await harness.claim(), failed)
    await harness.reaping(5.0)
    await harness.answer(await harness.claim("gpu-1"))
    await harness.settle()
    [(held, replies)] = settled
    assert (set(held), {reply.attempts for reply in replies}) == (set(asked), {2})
    assert harness.room == free
