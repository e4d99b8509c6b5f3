"""Load of its models, as a broker knows it."""

from __future__ import annotations

import pytest

from headway.model import WorkerInfo, WorkerStatus
from tests.contracts.brokers import MAX_BATCH, MODELS, Harness, ask, story

BATCH_SECONDS = 0.1


@story
async def test_every_model_is_told_of_before_anything_has_happened(harness: Harness) -> None:
    loads = await harness.broker.loads()
    assert set(loads) == set(MODELS)
    for load in loads.values():
        assert (load.rate, load.alpha, load.beta, load.slots, load.depth) == (0.0, 0.0, 0.0, 0, 0)
        assert load.max_batch == MAX_BATCH


@story
async def test_slots_are_the_healthy_workers_of_the_model(harness: Harness) -> None:
    await harness.healthy("gpu-0", "gpu-1", "gpu-2")
    await harness.healthy("gpu-3", model="other")
    for worker, status in (("gpu-1", WorkerStatus.DEGRADED), ("gpu-2", WorkerStatus.OFFLINE)):
        await harness.broker.heartbeat(WorkerInfo(worker_id=worker, model="m", status=status))
    assert {model: load.slots for model, load in (await harness.broker.loads()).items()} == {"m": 1, "other": 1}


@story
async def test_depth_is_what_waits(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    await harness.broker.enqueue([ask() for _ in range(MAX_BATCH + 3)])
    assert (await harness.broker.loads())["m"].depth == MAX_BATCH + 3
    lease = await harness.claim()
    loads = await harness.peer().loads()
    assert (loads["m"].depth, loads["other"].depth) == (3, 0)
    await harness.answer(lease)


@story
async def test_the_pace_is_what_batches_were_measured_to_take(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    for _ in range(4):
        await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
        lease = await harness.claim()
        await harness.advance(BATCH_SECONDS)
        await harness.answer(lease)
    loads = await harness.peer().loads()
    assert loads["m"].batch_seconds(MAX_BATCH) == pytest.approx(BATCH_SECONDS, rel=0.1)
    assert loads["m"].departures == 4
    assert loads["other"].batch_seconds(MAX_BATCH) == 0.0


@story
async def test_before_any_batch_the_pace_is_that_of_the_warm_up(harness: Harness) -> None:
    runs = ((1, 0.02), (MAX_BATCH, 0.09))
    for name, warm_up in (("gpu-0", runs), ("gpu-1", ((1, 9.0), (MAX_BATCH, 9.0)))):
        await harness.broker.heartbeat(
            WorkerInfo(worker_id=name, model="m", status=WorkerStatus.HEALTHY, warm_up=warm_up)
        )
    load = (await harness.peer().loads())["m"]
    assert (load.alpha, load.beta, load.largest) == pytest.approx((0.01, 0.01, MAX_BATCH))
    await harness.broker.enqueue([ask()])
    lease = await harness.claim()
    await harness.advance(0.02)
    await harness.answer(lease)
    await harness.healthy("gpu-0")
    assert (await harness.peer().loads())["m"].batch_seconds(MAX_BATCH) == pytest.approx(0.09, rel=0.1)


@story
async def test_the_rate_is_that_of_arrivals(harness: Harness) -> None:
    await harness.healthy("gpu-0")
    for _ in range(40):
        await harness.broker.enqueue([ask(), ask()])
        await harness.advance(0.1)
    assert (await harness.broker.loads())["m"].rate == pytest.approx(20.0, rel=0.2)
