"""Promises of every broker on models whose calls have parameters: requests of other ones never ride together, and harm nobody."""

import msgspec
import pytest

from headway.core import call_parameters
from headway.model import ALL_PARAMETERS, Cause, CostLine, CostShape, Entry, Lease, PerCall, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, LIMITS, MAX_BATCH, MAX_QUEUE, Harness, ask, failed, ids, slot

PADS = CostLine(CostShape.PADDED, 0.01, 0.001, 4.0)


async def told(harness: Harness, names: PerCall = ("t",), cost: CostLine | None = None) -> None:
    """Have both processes know of a worker whose calls have these parameters."""
    worker = WorkerInfo(
        worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, takes="text", gives="text", per_call=names, cost=cost
    )
    await harness.broker.heartbeat(worker)
    for broker in (harness.broker, harness.peer()):
        await broker.workers()


def asking(value: object, names: PerCall = ("t",), weight: int = 1, **how: object) -> Entry:
    """An entry with a value of a parameter that a call has once."""
    parameters = msgspec.json.encode({"t": value})
    shape = call_parameters.shape_number(parameters, names, 0)
    return msgspec.structs.replace(ask(**how), parameters=parameters, shape=shape, weight=weight)  # type: ignore[arg-type]


async def claimed(harness: Harness) -> list[Lease]:
    leases = []
    while isinstance(lease := await harness.broker.claim(slot(), AT_ONCE), Lease):
        leases.append(lease)
        await harness.answer(lease)
    return leases


def are_alike(leases: list[Lease]) -> bool:
    return all(len({entry.parameters for entry in lease.entries}) == 1 for lease in leases)


@pytest.mark.parametrize("cost", [None, PADS], ids=["constant", "padded"])
@pytest.mark.parametrize("names", [("t",), ALL_PARAMETERS], ids=str)
async def test_only_equal_parameters_ride_together(harness: Harness, names: PerCall, cost: CostLine | None) -> None:
    await told(harness, names, cost)
    for broker in (harness.broker, harness.peer()):
        for count in (1, 2):  # Fewer than a batch holds, and more.
            entries = [asking(at % 2, names, 1 + 3 * at % 7 if cost else 1) for at in range(count * MAX_BATCH - 2)]
            assert not any(await broker.enqueue(entries))
            leases = await claimed(harness)
            assert sum(len(lease.entries) for lease in leases) == len(entries)
            assert are_alike(leases)
            assert len(leases) <= 2 * count


async def test_without_a_word_of_them_all_ride_together(harness: Harness) -> None:
    await told(harness, ())
    await harness.broker.enqueue([asking(at, ()) for at in range(MAX_BATCH)])
    assert [len(lease.entries) for lease in await claimed(harness)] == [MAX_BATCH]


@pytest.mark.parametrize("cost", [None, PADS], ids=["constant", "padded"])
async def test_those_that_run_again_ride_with_their_like(harness: Harness, cost: CostLine | None) -> None:
    """Batches that were put together before it was known: they fail, and are halved."""
    entries = [asking(at % 3) for at in range(MAX_BATCH)]
    await harness.broker.enqueue(entries)
    mixed = await harness.claim()
    assert len(mixed.entries) == MAX_BATCH
    await told(harness, cost=cost)
    await harness.broker.release(mixed, failed(Cause.RAISED))
    left = set(ids(entries))
    for _ in range(4 * MAX_BATCH):
        if not left:
            break
        lease = await harness.claim()
        assert are_alike([lease])
        if len(lease.entries) > 1:
            await harness.broker.release(lease, failed(Cause.RAISED))
        else:
            left -= set(ids(lease.entries))
            await harness.answer(lease)
    assert not left


@pytest.mark.parametrize("cost", [None, PADS], ids=["constant", "padded"])
async def test_bulk_entries_ride_with_their_like(harness: Harness, cost: CostLine | None) -> None:
    await told(harness, cost=cost)
    how = {"tier": LIMITS.tiers, "gateway": "feeder", "queue_timeout": 3600.0, "timeout": 3600.0}
    lines = [asking(at % 2, **how) for at in range(6)] + [ask(**how) for _ in range(3)]  # type: ignore[arg-type]
    assert not any(await harness.broker.enqueue_bulk(lines))
    await harness.broker.enqueue([asking(0), asking(1), ask()])
    left = set(ids(lines))
    leases = []
    for _ in range(40):
        lease = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(lease, Lease):
            leases.append(lease)
            left -= set(ids(lease.entries))
            await harness.answer(lease)
        await harness.advance(2.0)
    assert not left
    assert are_alike(leases)


@pytest.mark.parametrize("cost", [None, PADS], ids=["constant", "padded"])
async def test_a_tenant_of_a_thousand_values_harms_nobody(harness: Harness, cost: CostLine | None) -> None:
    """Its batches have one request each, and those of a neighbour leave in every other one, all that wait."""
    await told(harness, cost=cost)
    weight = 4 if cost else 1
    flood = [asking(at, weight=weight, tenant="flood") for at in range(MAX_QUEUE // 2)]
    assert not any(await harness.broker.enqueue(flood))
    leases = []
    for _ in range(6):
        calm = [asking("calm", weight=weight, tenant="calm") for _ in range(MAX_BATCH // 2)]
        assert not any(await harness.broker.enqueue(calm))
        leases.append(await harness.claim())
        await harness.answer(leases[-1])
    assert are_alike(leases)
    batches = [lease.entries for lease in leases if lease.entries[0].tenant == "calm"]
    assert [len(batch) for batch in batches] in ([4, 8, 8], [8, 8, 8])
