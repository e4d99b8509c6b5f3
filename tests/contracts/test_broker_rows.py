"""Promises of every broker on models that take tensors: an entry of k rows counts as k, from the heartbeat of their first worker on."""

from typing import Any

import msgspec
import pytest

from headway.core.rows import weight
from headway.core.tensors import rows_of
from headway.model import (
    Cause,
    CostLine,
    CostShape,
    Entry,
    ItemResult,
    Lease,
    Slot,
    Value,
    ValueKind,
    WorkerInfo,
    WorkerStatus,
)
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, QUEUES, Harness, ask, drained, failed, output, slot, tensors


def rows(count: int, text: str = "", model: str = "m", **how: Any) -> Entry:
    """An entry whose tensors have so many rows, which it weighs."""
    entry = ask(model=model, **how)
    value = tensors(count, text.encode() or entry.id.encode())
    limits = QUEUES[entry.model]
    return msgspec.structs.replace(entry, input=value, weight=weight(value, limits.max_batch, limits.max_weight))


async def takes(broker: Broker, kind: ValueKind = ValueKind.TENSORS, worker: str = "gpu-0", **how: Any) -> None:
    """Heartbeat of a worker whose target takes values of a kind."""
    status = WorkerStatus.HEALTHY
    beat = WorkerInfo(worker_id=worker, model="m", status=status, takes=kind.value, gives=kind.value, **how)
    await broker.heartbeat(beat)


async def told(harness: Harness) -> None:
    """Have both processes know of a worker that takes tensors: one beats its heart, the other reads the registry."""
    await takes(harness.broker)
    await harness.peer().workers()


async def run_all(harness: Harness) -> list[list[int]]:
    """Run what waits. Returns the rows of each entry of each batch."""
    batches = []
    while isinstance(lease := await harness.broker.claim(slot(), AT_ONCE), Lease):
        batches.append([rows_of(entry.input) for entry in lease.entries])
        await harness.answer(lease)
    return batches


async def test_a_batch_has_as_many_rows_as_it_may_have_entries(harness: Harness) -> None:
    await told(harness)
    for broker in (harness.broker, harness.peer()):
        await broker.enqueue([rows(3), rows(3), rows(2), rows(1)])
        lease = await broker.claim(Slot("gpu-0", "m", MAX_BATCH, MAX_BATCH), AT_ONCE)
        assert isinstance(lease, Lease)
        assert ([entry.weight for entry in lease.entries], lease.size, lease.rows) == ([3, 3, 2], 8, 8)
        await harness.answer(lease)
        assert await run_all(harness) == [[1]]
        broker.know(QUEUES)  # Other bounds of the model leave its rows counted.


async def test_rows_count_in_the_queues_of_versions_too(harness: Harness) -> None:
    await takes(harness.broker, version="3")
    await harness.broker.enqueue([rows(6, version="3"), rows(6, version="3"), rows(6), rows(6)])
    for model in ("m", "m@3"):
        for _ in range(2):
            assert [entry.weight for entry in (await harness.claim(model=model)).entries] == [6]


async def test_without_a_word_of_tensors_entries_are_counted(harness: Harness) -> None:
    await takes(harness.broker, ValueKind.TEXT)
    await harness.peer().workers()
    await harness.broker.enqueue([rows(3) for _ in range(MAX_BATCH)])
    assert await run_all(harness) == [[3] * MAX_BATCH]


async def test_a_rollout_from_texts_to_tensors_and_back_breaks_nothing(harness: Harness) -> None:
    """Both kinds of workers claim from one queue, and texts wait beside tensors."""
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
    """What a worker makes of a value; those of before take no tensors."""
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
