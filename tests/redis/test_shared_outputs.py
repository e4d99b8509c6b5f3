"""Large outputs that several entries have in common, or that are kept: where they lie in the server, and when they go."""

from functools import partial
from typing import Any

import pytest

from headway import errors
from headway.brokers.redis import wire
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.completion import MOST_BYTES, fitting, pack, parts
from headway.brokers.redis.function_library import OUTPUT_SECONDS
from headway.brokers.redis.large_values import LargeValues
from headway.errors import BrokerUnavailable
from headway.model import MOST_OUTPUT, DedupKey, Entry, EntryState, ItemResult, Lease, QueueName, Reply, Value
from tests.contracts.brokers import ask, drained, leave
from tests.contracts.dedup_keys import TTL, admit, key, poll, same, sharing, task
from tests.contracts.dedup_keys import sharing as asked_with
from tests.redis.stand import Stand

LARGE = "x" * 5000


@pytest.fixture
def apart_from() -> float:
    return 1000


def names(harness: Stand) -> list[str]:
    return sorted(harness.keys())


def stored(harness: Stand) -> list[str]:
    """Kinds of what the server has of outputs apart: the outputs, and who reads or keeps them."""
    return sorted(name[0] for name in names(harness) if name[:2] in ("R:", "Q:", "K:"))


async def run(harness: Stand, output: Value = LARGE) -> None:
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult(output) for _ in lease.entries])


async def acknowledged(harness: Stand, gateway: str = "g") -> dict[str, Reply]:
    await drained(harness, gateway)
    replies, cursor = await harness.broker.replies(gateway, 0)
    await drained(harness, gateway, after=cursor)
    await harness.advance(0.1)
    return {reply.id: reply for reply in replies}


def sizes(harness: Stand) -> list[int]:
    """Bytes of the longest value of each stream and each kept outcome."""
    found = []
    for name in names(harness):
        if name.startswith("k:"):
            found.append(harness.server.command("STRLEN", harness.key(name)))
        if name.startswith("r:"):
            entries = harness.server.command("XRANGE", harness.key(name), "-", "+")
            found += [len(value) for _, fields in entries for value in fields]
    return found


@pytest.mark.parametrize("share", [task("first"), key(), same()])
async def test_an_outcome_that_is_kept_has_its_output_apart_for_as_long(harness: Stand, share: DedupKey) -> None:
    await admit(harness, sharing("first", share))
    await run(harness)
    assert max(sizes(harness)) < 300
    assert (await acknowledged(harness))["first"].output == LARGE
    assert stored(harness) == ["K", "R"]
    if share.kind.value != "task":
        await admit(harness, sharing("later", share))
        assert (await drained(harness, after=1))["later"].output == LARGE
    else:
        await admit(harness, poll("later", "first"))
        assert (await drained(harness, after=1))["later"].output == LARGE
        reply = await harness.peer().outcome("t", "first")
        assert isinstance(reply, Reply)
        assert reply.output == LARGE
    assert stored(harness) == ["K", "Q", "R"]
    await harness.advance(TTL)
    await harness.broker.reap()
    assert stored(harness) == ["Q", "R"], "who came last has not said yet that it was read"
    for name in ("Q", "R"):
        [lasts] = [
            harness.server.command("TTL", harness.key(one)) for one in names(harness) if one.startswith(f"{name}:")
        ]
        assert 0 < lasts <= OUTPUT_SECONDS


async def test_followers_read_an_output_once_until_the_last(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = LargeValues.output_of

    async def noted(values: LargeValues, queue: str, name: str, *more: Any) -> Value | None:
        reads.append(name)
        return await read(values, queue, name, *more)

    monkeypatch.setattr(LargeValues, "output_of", noted)
    await admit(harness, sharing("first", same(keep=0.0)))
    for number in range(30):
        await admit(harness, sharing(f"one {number}", same(keep=0.0)))
        await admit(harness, sharing(f"two {number}", same(keep=0.0), gateway="h"))
    await run(harness)
    reads.clear()
    found = await acknowledged(harness)
    assert len(found) == 31
    assert len({id(reply.output) for name, reply in found.items() if name != "first"}) == 1
    assert {reply.output for reply in found.values()} == {LARGE}
    assert len(reads) == 2, "that of the first, and that of its followers"
    assert stored(harness) == ["Q", "R"]
    assert {reply.output for reply in (await acknowledged(harness, "h")).values()} == {LARGE}
    assert stored(harness) == []


async def test_a_receipt_that_comes_twice_takes_the_output_from_nobody(harness: Stand) -> None:
    await admit(harness, sharing("first", same(keep=0.0)), sharing("second", same(keep=0.0), gateway="h"))
    await run(harness)
    with harness.losing("acknowledge"):
        await acknowledged(harness)
    await harness.advance(1.0)
    assert stored(harness) == ["Q", "R"]
    assert (await acknowledged(harness, "h"))["second"].output == LARGE
    assert stored(harness) == []


async def test_an_output_goes_with_the_last_key_under_which_it_is_kept(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness)
    await acknowledged(harness)
    await harness.broker.cancel_task("t", "first")
    assert stored(harness) == ["K", "R"]
    await admit(harness, sharing("later", key()))
    assert (await acknowledged(harness))["later"].output == LARGE
    await harness.advance(TTL)
    await harness.broker.reap()
    assert stored(harness) == []


async def test_outputs_go_with_what_has_to_go_for_the_budgets(harness: Stand) -> None:
    for number in range(40):
        await admit(harness, sharing(f"{number}", key(f"{number}")))
        await run(harness, "x" * 10_000)
        await acknowledged(harness)
    assert stored(harness) == ["K"] * 8 + ["R"] * 8
    held = sum(harness.server.command("STRLEN", harness.key(name)) for name in names(harness) if name[:2] == "R:")
    assert held == 8 * 10_000


async def test_an_output_that_was_lost_is_forgotten_with_its_outcome(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()))
    await run(harness)
    await acknowledged(harness)
    [lost] = [harness.key(name) for name in names(harness) if name.startswith("R:")]
    harness.server.command("DEL", lost)
    assert await harness.peer().outcome("t", "first") is None
    await admit(harness, sharing("again", key()))
    await run(harness, "y" * 5000)
    assert (await acknowledged(harness))["again"].output == "y" * 5000


async def test_an_output_that_nobody_wants_any_more_goes_at_once(harness: Stand) -> None:
    first = sharing("first", same(keep=0.0))
    second = sharing("second", same(keep=0.0))
    await admit(harness, first, second)
    lease = await harness.claim()
    await leave(harness.broker, first)
    await leave(harness.broker, second)
    await harness.broker.complete(lease, [ItemResult(LARGE)])
    assert stored(harness) == []


async def test_an_output_that_the_first_no_longer_wants_is_there_for_who_follows(harness: Stand) -> None:
    first, second = sharing("first", same(keep=0.0)), sharing("second", same(keep=0.0))
    await admit(harness, first, second)
    lease = await harness.claim()
    await leave(harness.broker, first)
    await harness.broker.complete(lease, [ItemResult(LARGE)])
    assert (await acknowledged(harness))["second"].output == LARGE
    assert stored(harness) == []


async def test_an_output_too_large_to_be_kept_goes_when_it_was_read(harness: Stand) -> None:
    await admit(harness, sharing("first", task("first"), key()), sharing("second", key()))
    await run(harness, "x" * 30_000)
    found = await acknowledged(harness)
    assert {name: len(reply.output or "") for name, reply in found.items()} == {"first": 30_000, "second": 30_000}
    assert stored(harness) == []


def left(entries: list[Entry], sizes: list[int], most: int, letter: str = "x") -> list[bool]:
    items = [ItemResult(letter * size) for size in sizes]
    return [item.output is not None for item in fitting(entries, items, most=most)]


def test_what_fits_stays_as_it_is() -> None:
    items = [ItemResult("x" * 50), ItemResult(None, "no"), ItemResult("é" * 25)]
    assert fitting([ask() for _ in items], items, most=100) is items


def test_the_largest_outputs_of_a_tenant_are_left_out() -> None:
    assert left([ask() for _ in range(4)], [60, 10, 50, 20], 100) == [False, True, True, True]


def test_a_tenant_with_many_large_outputs_costs_no_other_its_own() -> None:
    entries = [ask(tenant="greedy") for _ in range(8)] + [ask(tenant="modest")]
    assert left(entries, [12] * 8 + [12], 30) == [True, *[False] * 7, True]


def test_bytes_count_and_not_characters() -> None:
    assert left([ask(), ask()], [30, 30], 100, "é") == [True, False]


def test_the_largest_output_fits_alone_in_any_case() -> None:
    assert MOST_OUTPUT <= MOST_BYTES


async def test_an_output_too_many_fails_and_others_do_not(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.brokers.redis.completion.fitting", partial(fitting, most=70))
    await admit(harness, asked_with("large", task("large")), ask(id="small"))
    lease = await harness.claim()
    assert isinstance(lease, Lease)
    outputs = [ItemResult("x" * (60 if entry.id == "large" else 20)) for entry in lease.entries]
    assert (await harness.broker.complete(lease, outputs)).answered == 2
    replies = await drained(harness)
    assert replies["small"].output == "x" * 20
    failure = replies["large"].failure
    assert failure is not None
    assert (failure.code, failure.reason) == (errors.BACKEND_ERROR, "item")
    kept: Reply | EntryState | None = await harness.broker.outcome("t", "large")
    assert isinstance(kept, Reply)
    assert kept.failure == failure


def cut(sizes: list[int], most: int) -> list[list[int]]:
    return [list(part) for part in parts([ItemResult("x" * size) for size in sizes], most=most)]


def test_outputs_are_cut_into_parts_in_order() -> None:
    assert cut([10, 10, 10], 200) == [[0, 1, 2]]
    assert cut([30, 30, 30, 10], 60) == [[0, 1], [2, 3]]
    assert cut([100, 100], 60) == [[0], [1]], "one that is too large has a part of its own"
    assert cut([10, 100, 10], 60) == [[0], [1], [2]]
    assert cut([], 0) == [[]]


def test_large_outputs_come_last() -> None:
    items = [ItemResult("x" * size) for size in (90, 10, 90, 10)]
    assert [list(part) for part in parts(items, {0, 2}, 100)] == [[1, 3], [0], [2]]
    assert [list(part) for part in parts(items, {0, 2}, 1000)] == [[1, 3], [0, 2]]
    assert [list(part) for part in parts(items, {0, 1, 2, 3}, 100)] == [[0, 1], [2, 3]]


async def test_an_output_that_is_answered_and_kept_is_sent_once(harness: Stand) -> None:
    await admit(harness, asked_with("task", task("task")), ask(id="id"))
    lease = await harness.claim()
    assert isinstance(lease, Lease)
    items = [ItemResult(f"of {entry.id}") for entry in lease.entries]
    assert isinstance(harness.broker, RedisBroker)
    sent = wire.encode(
        harness.broker._queues[QueueName("m")][0].completions._arguments(pack(lease, items, [0.0, 0.0], range(2)))
    )
    assert [sent.count(b"of task"), sent.count(b"of id")] == [1, 1]
    assert (await harness.broker.complete(lease, items)).answered == 2
    kept = await harness.broker.outcome("t", "task")
    assert isinstance(kept, Reply)
    assert kept == (await drained(harness))["task"]


@pytest.fixture
def singly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output is so large that it goes in a step of its own."""
    monkeypatch.setattr("headway.brokers.redis.completion.parts", lambda items, large: parts(items, large, 1))


@pytest.mark.usefixtures("singly")
async def test_large_outputs_go_in_steps_and_each_is_answered_once(harness: Stand) -> None:
    await admit(harness, asked_with("task", task("task")), *(ask(id=f"id {number}") for number in range(4)))
    lease = await harness.claim()
    assert isinstance(lease, Lease)
    await harness.broker.withdraw([("t", "id 1", 0)], "g")
    items = [ItemResult(None, "no") if entry.id == "id 2" else ItemResult(f"of {entry.id}") for entry in lease.entries]
    settled = await harness.broker.complete(lease, items)
    assert (settled.answered, settled.departed, settled.fenced) == (4, 1, False)
    replies = await drained(harness)
    assert {id: reply.output for id, reply in replies.items()} == {
        "task": "of task",
        "id 0": "of id 0",
        "id 2": None,
        "id 3": "of id 3",
    }
    kept = await harness.broker.outcome("t", "task")
    assert isinstance(kept, Reply)
    assert kept.output == "of task"
    assert [letter.entry.id for letter in await harness.dead.list()] == ["id 2"]
    assert harness.server.command("HLEN", harness.key("x")) == 0


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("lost", ["deliver", "complete"])
async def test_steps_whose_answers_are_lost_are_told_again_to_no_effect(harness: Stand, lost: str) -> None:
    await admit(harness, *(ask(id=f"id {number}") for number in range(3)))
    lease = await harness.claim()
    with harness.losing(lost), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    settled = await harness.broker.complete(lease, [ItemResult("told again") for _ in lease.entries])
    assert settled.fenced is (lost == "complete")
    outputs = [reply.output for reply in (await drained(harness)).values()]
    assert outputs.count("told again") == (2 if lost == "deliver" else 0)
    assert len(outputs) == 3


@pytest.mark.usefixtures("singly")
async def test_a_lease_that_ends_between_two_steps_runs_the_rest_again(harness: Stand) -> None:
    await admit(harness, *(ask(id=f"id {number}") for number in range(3)))
    lease = await harness.claim()
    with harness.losing("deliver"), pytest.raises(BrokerUnavailable):
        await harness.answer(lease)
    await harness.reaping(harness.lease_seconds + 1.0)
    assert (await harness.broker.complete(lease, [ItemResult("too late") for _ in lease.entries])).fenced
    again = await harness.claim()
    assert [entry.id for entry in again.entries] == ["id 1", "id 2"]
    await harness.answer(again)
    replies = await drained(harness)
    assert {id: reply.attempts for id, reply in replies.items()} == {"id 0": 1, "id 1": 2, "id 2": 2}
    assert "too late" not in {reply.output for reply in replies.values()}
