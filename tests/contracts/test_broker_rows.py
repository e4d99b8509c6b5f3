"""Promises of every broker on models that take tensors: an entry of k rows counts as k, from the heartbeat of their first worker on."""

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from headway.core.ratelimit import all_counting_as
from headway.core.rows import weight
from headway.core.tensors import rows_of
from headway.model import Cause, Entry, ItemResult, Lease, Limit, Slot, Value, ValueKind, WorkerInfo, WorkerStatus
from headway.ports import Broker
from headway.runtime.counters import DepartureLog
from tests.contracts.brokers import (
    AT_ONCE,
    MAX_BATCH,
    MAX_QUEUE,
    QUEUES,
    Harness,
    ask,
    drained,
    failed,
    ids,
    measure,
    output,
    slot,
    tensors,
)


def rows(count: int, text: str = "", model: str = "m", **how: Any) -> Entry:
    """An entry whose tensors have so many rows, which it weighs."""
    entry = ask(model=model, **how)
    value = tensors(count, text.encode() or entry.id.encode())
    limits = QUEUES[entry.model]
    return msgspec.structs.replace(entry, input=value, weight=weight(value, limits.max_batch, limits.max_weight))


async def takes(
    broker: Broker, kind: ValueKind = ValueKind.TENSORS, worker: str = "gpu-0", model: str = "m", version: str = ""
) -> None:
    """Heartbeat of a worker whose target takes values of a kind."""
    status = WorkerStatus.HEALTHY
    await broker.heartbeat(
        WorkerInfo(worker_id=worker, model=model, status=status, takes=kind.value, gives=kind.value, version=version)
    )


async def told(harness: Harness) -> None:
    """Have both processes know of a worker that takes tensors: one beats its heart, the other reads the registry."""
    await takes(harness.broker)
    await harness.peer().workers()


async def run_all(harness: Harness, limit: int = MAX_BATCH) -> list[list[int]]:
    """Run what waits. Returns the rows of each entry of each batch."""
    batches = []
    while isinstance(lease := await harness.broker.claim(slot(limit=limit), AT_ONCE), Lease):
        batches.append([rows_of(entry.input) for entry in lease.entries])
        await harness.answer(lease)
    return batches


async def test_a_batch_has_as_many_rows_as_it_may_have_entries(harness: Harness) -> None:
    await told(harness)
    for broker in (harness.broker, harness.peer()):
        await broker.enqueue([rows(3), rows(3), rows(2), rows(1)])
        lease = await harness.claim()
        assert [entry.weight for entry in lease.entries] == [3, 3, 2]
        await harness.answer(lease)
        assert await run_all(harness) == [[1]]


async def test_rows_count_in_the_queues_of_versions_too(harness: Harness) -> None:
    await takes(harness.broker, version="3")
    await harness.broker.enqueue([rows(6, version="3"), rows(6, version="3"), rows(6), rows(6)])
    for model in ("m", "m@3"):
        for _ in range(2):
            assert [entry.weight for entry in (await harness.claim(model=model)).entries] == [6]


async def test_other_bounds_of_a_model_leave_its_rows_counted(harness: Harness) -> None:
    await told(harness)
    for broker in (harness.broker, harness.peer()):
        broker.know(QUEUES)
    await harness.peer().enqueue([rows(6), rows(6)])
    assert await run_all(harness) == [[6], [6]]


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


async def test_a_batch_is_of_one_shape_also_when_it_runs_again(harness: Harness) -> None:
    await told(harness)
    numbers = (7, 1 << 39, 7, 9, 1 << 39, 7)
    entries = [msgspec.structs.replace(rows(1, id=f"shape-{at}"), shape=one) for at, one in enumerate(numbers)]
    for entry in entries:
        assert not any(await harness.broker.enqueue([entry]))
    batches = []
    for turn in range(4):
        lease = await harness.claim()
        batches.append(ids(lease.entries))
        await (harness.answer(lease) if turn else harness.broker.release(lease))
    assert batches == [[f"shape-{at}" for at in one] for one in ((0, 2, 5), (0, 2, 5), (1, 4), (3,))]


async def test_shapes_of_a_tier_leave_the_tiers_below_their_share(harness: Harness) -> None:
    await told(harness)
    numbers, rode = itertools.count(1), Counter[int]()

    async def wait(tier: int) -> None:
        assert not any(await harness.broker.enqueue([msgspec.structs.replace(rows(1, tier=tier), shape=next(numbers))]))

    for tier in (0, 0, 0, 2):
        await wait(tier)
    for _ in range(24):
        lease = await harness.claim()
        [entry] = lease.entries
        rode[entry.tier] += 1
        await harness.answer(lease)
        await wait(entry.tier)
    assert 4 <= rode[2] <= 6


async def test_tenants_share_rows(harness: Harness) -> None:
    await told(harness)
    rode = Counter[str]()
    await harness.broker.enqueue([rows(8, tenant="many") for _ in range(6)])
    await harness.broker.enqueue([rows(1, tenant="few") for _ in range(48)])
    for _ in range(6):
        lease = await harness.claim()
        for entry in lease.entries:
            rode[entry.tenant] += entry.weight
        await harness.answer(lease)
    assert abs(rode["many"] - rode["few"]) <= 2 * MAX_BATCH


@pytest.mark.parametrize("count", [1, 4, 8])
async def test_as_many_rows_are_admitted_in_whatever_requests(harness: Harness, count: int) -> None:
    """Batches of 8 rows take 1 s, so that 5 s are enough for about 4 of them ahead."""
    await told(harness)
    await measure(harness, 1.0)
    entries = [rows(count, queue_timeout=5.0, timeout=5.0) for _ in range(MAX_QUEUE // count)]
    verdicts = await harness.broker.enqueue(entries)
    admitted = count * list(verdicts).count(None)
    assert 3 * MAX_BATCH <= admitted <= 5 * MAX_BATCH


async def test_a_limit_counts_rows_at_all_gateways(harness: Harness) -> None:
    await told(harness)
    limit = Limit("key:k", "key", 60.0, 8.0)
    brokers, admitted = (harness.broker, harness.peer()), 0
    for turn in range(8):
        entry = rows(2, limits=all_counting_as((limit,), 2))
        [verdict] = await brokers[turn % 2].enqueue([entry])
        admitted += verdict is None
    assert admitted == 4
    await harness.advance(2.001)
    [verdict] = await harness.broker.enqueue([rows(2, limits=all_counting_as((limit,), 2))])
    assert verdict is None
    [verdict] = await harness.peer().enqueue([rows(1, limits=(limit,))])
    assert verdict is not None


async def test_the_size_of_a_lease_is_its_rows(harness: Harness) -> None:
    await told(harness)
    await harness.broker.enqueue([rows(3), rows(1)])
    by_rows = Slot("gpu-0", "m", MAX_BATCH, MAX_BATCH)
    lease = await harness.broker.claim(by_rows, AT_ONCE)
    assert isinstance(lease, Lease)
    assert (lease.size, lease.fill, lease.rows) == (4, 0.5, 4)
    log = DepartureLog()
    log.left(lease)
    [[batch], _, _] = log.take()
    assert (batch.size, sum(batch.tiers)) == (4, 4)
    await harness.broker.release(lease, failed(Cause.RAISED))


async def test_the_load_tells_the_mean_rows_of_a_request(harness: Harness) -> None:
    await told(harness)
    await harness.healthy("gpu-0")
    for _ in range(40):
        await harness.broker.enqueue([rows(4)])
        await harness.advance(0.05)
        await harness.answer(await harness.claim())
    [load] = [load for name, load in (await harness.broker.loads()).items() if str(name) == "m"]
    assert load.entry_size == pytest.approx(4.0)
