"""The bound on the outputs of one completion, and who is left out."""

from __future__ import annotations

from functools import partial

import pytest

from headway import errors
from headway.brokers.redis import wire
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.completion import MOST_BYTES, fitting, pack, parts
from headway.errors import BrokerUnavailable
from headway.model import MOST_OUTPUT, Entry, EntryState, ItemResult, Lease, QueueName, Reply
from tests.contracts.brokers import ask, drained, story
from tests.contracts.dedup_keys import admit, task
from tests.contracts.dedup_keys import sharing as asked_with
from tests.redis.stand import Stand


def left(entries: list[Entry], sizes: list[int], most: int, letter: str = "x") -> list[bool]:
    """Whether each output is still there."""
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


@story
async def test_an_output_too_many_fails_and_the_rest_is_answered(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Places of each part."""
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


@story
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
@story
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
@story
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
@story
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
