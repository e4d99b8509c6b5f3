"""Promises of every broker on values that aren't strings: they come out as they went in; k rows count as k."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.brokers.redis import entry_wire
from headway.core.rows import weight
from headway.core.tensors import rows_of
from headway.model import (
    Cause,
    CostLine,
    CostShape,
    DedupKind,
    Entry,
    ItemResult,
    Lease,
    Octets,
    Slot,
    TokenCount,
    Value,
    ValueKind,
)
from headway.ports import Broker
from tests.contracts.brokers import (
    AT_ONCE,
    EXAMPLES,
    MAX_BATCH,
    QUEUES,
    Harness,
    ask,
    beat,
    drained,
    failed,
    granted,
    outcome_of,
    output,
    slot,
    tensors,
)
from tests.contracts.dedup_keys import TTL, admit, came_by, key, poll, task
from tests.core.test_values import TREES

OCTETS = Octets(bytes(range(256)))
TENSORS = tensors(3)
OCTETS_LARGE = Octets(bytes(range(256)) * 40)
ASKED = '{"a":[1,"é",null]}'.encode()


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
async def test_a_json_value_goes_to_the_worker_and_its_answer_back(harness: Harness) -> None:
    inputs: list[Value] = [ASKED, b"[]", "text", '"quoted"', b'"quoted"', b"x" * 100_000, OCTETS, TENSORS]
    entries = [ask(value, id=f"id-{place}") for place, value in enumerate(inputs)]
    assert list(await harness.broker.enqueue(entries)) == [None] * len(entries)
    lease = await harness.claim()
    assert [entry.input for entry in lease.entries] == inputs
    await harness.answer(lease)
    replies = await drained(harness)
    assert [replies[entry.id].output for entry in entries] == [output(value) for value in inputs]


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
@pytest.mark.parametrize("value", [ASKED, TENSORS, OCTETS_LARGE], ids=["json", "tensors", "large"])
async def test_an_answer_and_its_tokens_are_kept_and_shared_as_they_are(harness: Harness, value: Value) -> None:
    first = ask(value, id="first", dedup_keys=(task("first"), key()))
    await admit(harness, first, ask(value, id="follower", dedup_keys=(key(),)), poll("poll", "first"), ask(id="untold"))
    lease = await harness.claim()
    items = {"first": ItemResult(output(value), tokens=TokenCount(7, 3)), "untold": ItemResult("x")}
    await harness.broker.complete(lease, [items[entry.id] for entry in lease.entries])
    replies = await drained(harness)
    assert {id: (reply.output, reply.tokens) for id, reply in replies.items() if id != "untold"} == dict.fromkeys(
        ["first", "follower", "poll"], (output(value), TokenCount(7, 3))
    )
    assert replies["untold"].tokens is None
    await admit(harness, ask(value, id="later", gateway="other", dedup_keys=(key(),)))
    [later] = (await drained(harness, "other")).values()
    assert (came_by(later), later.output) == ((DedupKind.KEY, True), output(value))
    for broker in (harness.broker, harness.peer()):
        kept = await outcome_of(broker, "first")
        assert (kept.output, kept.tokens) == (output(value), TokenCount(7, 3))
    await harness.advance(TTL + 1.0)
    assert await harness.broker.outcome("t", "first") is None


@pytest.mark.parametrize("harness", (*EXAMPLES, "apart"), indirect=True)
@pytest.mark.parametrize("value", [ASKED, TENSORS, OCTETS_LARGE], ids=["json", "tensors", "large"])
async def test_an_input_that_fails_alone_is_a_dead_letter_as_it_is_and_known(harness: Harness, value: Value) -> None:
    await harness.broker.enqueue([ask(value, id="bad", caller="ada")])
    for _ in range(2):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    [letter] = await harness.dead.find("bad")
    assert (letter.entry.input, type(letter.entry.input)) == (value, type(value))
    again = [ask(value, caller="ada"), ask(ASKED.decode(), caller="ada"), ask(b"[]", caller="ada")]
    assert [failure is not None for failure in await harness.broker.enqueue(again)] == [True, False, False]


@given(st.binary() | TREES, st.booleans())
def test_any_value_is_packed_for_redis_and_read_as_it_was(tree: object, text: bool) -> None:
    if isinstance(tree, bytes):
        value: Value = Octets(tree)
    else:
        value = json.dumps(tree) if text or isinstance(tree, str) else json.dumps(tree).encode()
    entry = Entry("id", "m", value, 0, "t", "g", 1.0, 1.0)
    assert entry_wire.entry_of(entry_wire.read_payload(entry_wire.pack_entry(entry))) == entry


def rows(count: int, text: str = "", model: str = "m", **how: Any) -> Entry:
    entry = ask(model=model, **how)
    value = tensors(count, text.encode() or entry.id.encode())
    limits = QUEUES[entry.model]
    return msgspec.structs.replace(entry, input=value, weight=weight(value, limits.max_batch, limits.max_weight))


async def takes(broker: Broker, kind: ValueKind = ValueKind.TENSORS, worker: str = "gpu-0", **how: Any) -> None:
    await beat(broker, worker, takes=kind.value, gives=kind.value, **how)


async def told(harness: Harness) -> None:
    """Let both processes know a worker that takes tensors: one sends its heartbeat, the other reads the registry."""
    await takes(harness.broker)
    await harness.peer().workers()


async def run_all(harness: Harness) -> list[list[int]]:
    batches = []
    while isinstance(lease := await harness.broker.claim(slot(), AT_ONCE), Lease):
        batches.append([rows_of(entry.input) for entry in lease.entries])
        await harness.answer(lease)
    return batches


async def test_a_batch_has_as_many_rows_as_it_may_have_entries(harness: Harness) -> None:
    await told(harness)
    for broker in (harness.broker, harness.peer()):
        await broker.enqueue([rows(3), rows(3), rows(2), rows(1)])
        lease = await granted(broker, Slot("gpu-0", "m", MAX_BATCH, MAX_BATCH))
        assert ([entry.weight for entry in lease.entries], lease.size, lease.rows) == ([3, 3, 2], 8, 8)
        await harness.answer(lease)
        assert await run_all(harness) == [[1]]
        broker.know(QUEUES)  # With new bounds, the model's rows still count.


async def test_without_a_word_of_tensors_entries_are_counted(harness: Harness) -> None:
    await takes(harness.broker, ValueKind.TEXT)
    await harness.peer().workers()
    await harness.broker.enqueue([rows(3) for _ in range(MAX_BATCH)])
    assert await run_all(harness) == [[3] * MAX_BATCH]


async def test_a_rollout_from_texts_to_tensors_and_back_breaks_nothing(harness: Harness) -> None:
    here, there = harness.broker, harness.peer()
    await takes(here, ValueKind.TEXT, "old")
    assert not any(await here.enqueue([ask(f"text {number}") for number in range(5)]))
    await takes(there, ValueKind.TENSORS, "new")
    await here.workers()
    assert not any(await there.enqueue([rows(5), rows(8)]))
    left, batches = 7, list[int]()
    for turn in range(9):
        worker, broker = (("old", here), ("new", there))[turn % 2]
        if isinstance(lease := await broker.claim(slot(worker), AT_ONCE), Lease):
            batches.append(sum(rows_of(entry.input) for entry in lease.entries))
            await broker.complete(lease, [_judged(worker, entry.input) for entry in lease.entries])
            left -= len(lease.entries)
    assert left == 0
    assert max(batches) <= MAX_BATCH
    assert len(await drained(harness)) == 7
    await takes(there, ValueKind.TEXT, "new")
    for broker in (here, there):
        await broker.workers()
    assert not any(await here.enqueue([ask() for _ in range(MAX_BATCH)]))
    assert await run_all(harness) == [[1] * MAX_BATCH]


def _judged(worker: str, value: Value) -> ItemResult:
    """A worker's answer to a value. Old workers don't take tensors."""
    wrong = worker == "old" and not isinstance(value, str)
    return ItemResult(None, "expected a text") if wrong else ItemResult(output(value))


@pytest.mark.parametrize("cost", [None, CostLine(CostShape.PADDED, 0.01, 0.001, 4.0)], ids=["constant", "padded"])
async def test_a_batch_of_before_its_parameters_counted_runs_again_with_one_value_of_them(
    harness: Harness, cost: CostLine | None
) -> None:
    entries = [msgspec.structs.replace(ask(), shape=1 + number % 3) for number in range(MAX_BATCH)]
    await harness.broker.enqueue(entries)
    mixed = await harness.claim()
    assert len(mixed.entries) == MAX_BATCH
    await takes(harness.broker, ValueKind.TEXT, per_call=("t",), cost=cost)
    await harness.peer().workers()
    await harness.broker.release(mixed, failed(Cause.RAISED))
    shapes, left = {entry.id: entry.shape for entry in entries}, MAX_BATCH
    while left:
        lease = await harness.claim()
        assert len({shapes[entry.id] for entry in lease.entries}) == 1
        if len(lease.entries) > 1:
            await harness.broker.release(lease, failed(Cause.RAISED))
        else:
            left -= 1
            await harness.answer(lease)
