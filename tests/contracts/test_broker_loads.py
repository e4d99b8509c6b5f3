"""Load of its models, as a broker knows it."""

from __future__ import annotations

import pytest

from headway.model import Lease, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, MODELS, Harness, ask, slot, story

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


@story
async def test_requests_are_admitted_by_the_share_of_its_gpu_that_a_slot_can_have(harness: Harness) -> None:
    async def admitted(*shares: float, status: WorkerStatus = WorkerStatus.HEALTHY) -> int:
        """Entries let in of many, which are withdrawn again."""
        for number, share in enumerate(shares):
            beat = WorkerInfo(worker_id=f"gpu-{number}", model="m", status=status, share=share)
            await harness.broker.heartbeat(beat)
        asked = [ask(tier=0, timeout=0.4) for _ in range(8 * MAX_BATCH)]
        answers = await harness.broker.enqueue(asked)
        await harness.broker.withdraw([one.submission for one in asked], asked[0].gateway)
        return answers.count(None)

    await harness.healthy("gpu-0", "gpu-1")
    for _ in range(8):
        await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
        lease = await harness.broker.claim(slot("gpu-0"), AT_ONCE)
        assert isinstance(lease, Lease)
        await harness.advance(BATCH_SECONDS)
        await harness.answer(lease)
    whole = await admitted(1.0, 1.0)
    assert 20 < whole < 50
    assert await admitted(0.5, 0.5) == pytest.approx(whole / 2, abs=2)
    assert await admitted(0.75, 0.75) == pytest.approx(whole * 0.75, abs=2)
    assert await admitted(1.0, 1.0) == pytest.approx(whole, abs=2)
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.COLD))
    assert await admitted(1.0) == pytest.approx(whole / 2, abs=2)
    assert (await harness.broker.loads())["m"].slots == 1
