"""What every broker tells of itself: stages, depths, contenders for a GPU, workers, loads and its epoch."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from headway.core.locality import FairOrder
from headway.model import EntryState, QueueName, Slot, WeightLine, WorkerInfo, WorkerStatus
from tests.contracts.brokers import (
    MAX_BATCH,
    MODELS,
    Harness,
    ask,
    drained,
    failed,
    measure,
    output,
)
from tests.contracts.dedup_keys import admit, run_alone


async def test_the_state_of_an_entry_goes_from_queued_to_processing_and_ends(harness: Harness) -> None:
    stage = harness.broker.state
    assert await stage("t", "a") is None
    await harness.broker.enqueue([ask(id="a")])
    assert await stage("t", "a") is EntryState.QUEUED
    assert await stage("other tenant", "a") is None
    assert await stage(None, "a") is EntryState.QUEUED
    assert await stage(None, "b") is await stage(None, "*") is None
    lease = await harness.claim()
    assert await stage("t", "a") is EntryState.PROCESSING
    await harness.broker.release(lease, failed())
    assert await stage("t", "a") is EntryState.QUEUED
    await harness.advance(1.0)
    await harness.answer(await harness.claim())
    assert await stage("t", "a") is None
    assert await stage(None, "a") is None
    await admit(harness, *(ask(id=f"{n}", tenant=f"tenant {n}", model=MODELS[n % 2]) for n in range(12)))
    for id, state in {"0": EntryState.QUEUED, "7": EntryState.QUEUED, "11": EntryState.QUEUED, "1?": None}.items():
        assert await harness.peer().state(None, id) is state


async def test_depths_and_oldest_ages_are_told_by_model_and_tier(harness: Harness) -> None:
    await harness.broker.enqueue([ask(tier=0), ask(tier=2)])
    await harness.advance(1.5)
    await harness.broker.enqueue([ask(tier=2), ask(tier=1, model="other")])
    depths = {(one.model, one.tier): one for one in await harness.peer().depths()}
    assert [depths[model, tier].depth for model in MODELS for tier in range(3)] == [1, 0, 2, 0, 1, 0]
    assert depths["m", 2].oldest_seconds == pytest.approx(1.5, abs=harness.grain)
    assert depths["m", 1].oldest_seconds == 0.0
    lease = await harness.claim()
    assert sum(one.depth for one in await harness.broker.depths()) == 1
    await harness.broker.release(lease)
    assert sum(one.depth for one in await harness.broker.depths()) == 4


async def test_the_registry_goes_by_the_last_heartbeat(harness: Harness) -> None:
    figures: dict[str, Any] = {
        "utilisation": 0.5,
        "in_flight": 1,
        "restarts": 2,
        "pid": 77,
        "weight": WeightLine(2.0, 0.25),
    }
    beat = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, last_heartbeat=-1.0, **figures)
    await harness.broker.heartbeat(beat)
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.STARTING))
    first = {one.worker_id: one for one in await harness.peer().workers()}
    assert first["gpu-0"].last_heartbeat == pytest.approx(harness.now(), abs=harness.grain)
    assert replace(first["gpu-0"], last_heartbeat=-1.0) == beat
    seen = []
    for seconds in (1.4, 0.2, 8.3, 0.2):
        await harness.advance(seconds)
        seen.append({one.worker_id: one.status.value for one in await harness.broker.workers()})
    assert [one["gpu-0"] for one in seen] == ["healthy", "degraded", "degraded", "offline"]
    assert [one["gpu-1"] for one in seen] == ["starting", "starting", "starting", "offline"]
    await harness.healthy("gpu-0")
    assert {one.worker_id: one.status.value for one in await harness.broker.workers()}["gpu-0"] == "healthy"


async def test_only_healthy_workers_are_capacity(harness: Harness) -> None:
    async def slots() -> int:
        return (await harness.broker.loads())[QueueName("m")].slots

    await harness.healthy("gpu-0", "gpu-1")
    await harness.healthy("elsewhere", model="other")
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-2", model="m", status=WorkerStatus.STARTING))
    assert await slots() == 2
    for status in (WorkerStatus.DEGRADED, WorkerStatus.DRAINED):
        await harness.healthy("gpu-0", "gpu-1")
        assert await slots() == 2
        await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=status))
        assert await slots() == 1
    await harness.reaping(4.0)
    assert await slots() == 0


async def test_what_policies_go_by_is_told_to_all(harness: Harness) -> None:
    idle = await harness.peer().loads()
    assert set(idle) == {*map(QueueName, MODELS)}
    assert [(one.rate, one.alpha, one.slots, one.depth, one.departures) for one in idle.values()] == [
        (0, 0, 0, 0, 0)
    ] * 2
    await measure(harness, 0.1, workers=("gpu-0", "gpu-1"))
    await harness.broker.enqueue([ask() for _ in range(5)])
    load = (await harness.peer().loads())[QueueName("m")]
    assert (load.slots, load.depth, load.departures, load.max_batch) == (2, 5, 3, MAX_BATCH)
    assert load.rate > 0.0
    assert load.batch_seconds(MAX_BATCH) == pytest.approx(0.1, rel=0.05)
    assert 0.0 < load.utilisation <= 1.0
    other = (await harness.broker.loads())[QueueName("other")]
    assert (other.rate, other.slots, other.depth, other.departures) == (0.0, 0, 0, 0)


async def test_before_any_batch_the_pace_is_that_of_the_warm_up(harness: Harness) -> None:
    runs = ((1, 0.02), (MAX_BATCH, 0.09))
    for name, warm_up in (("gpu-0", runs), ("gpu-1", ((1, 9.0), (MAX_BATCH, 9.0)))):
        await harness.healthy(name, warm_up=warm_up)
    load = (await harness.peer().loads())[QueueName("m")]
    assert (load.alpha, load.beta, load.largest) == pytest.approx((0.01, 0.01, MAX_BATCH))
    await harness.broker.enqueue([ask()])
    lease = await harness.claim()
    await harness.advance(0.02)
    await harness.answer(lease)
    await harness.healthy("gpu-0")
    assert (await harness.peer().loads())[QueueName("m")].batch_seconds(MAX_BATCH) == pytest.approx(0.09, rel=0.1)


async def test_requests_are_admitted_by_the_share_of_its_gpu_that_a_slot_can_have(harness: Harness) -> None:
    async def admitted(*shares: float) -> int:
        """Entries let in of many, which are withdrawn again."""
        for number, share in enumerate(shares):
            await harness.healthy(f"gpu-{number}", share=share)
        asked = [ask(tier=0, timeout=0.4) for _ in range(8 * MAX_BATCH)]
        answers = await harness.broker.enqueue(asked)
        await harness.broker.withdraw([one.submission for one in asked], asked[0].gateway)
        return answers.count(None)

    await harness.healthy("gpu-0", "gpu-1")
    for _ in range(8):
        await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
        lease = await harness.claim("gpu-0")
        await harness.advance(0.1)
        await harness.answer(lease)
    whole = await admitted(1.0, 1.0)
    assert 20 < whole < 50
    assert await admitted(0.5, 0.5) == pytest.approx(whole / 2, abs=2)
    assert await admitted(0.75, 0.75) == pytest.approx(whole * 0.75, abs=2)
    assert await admitted(1.0, 1.0) == pytest.approx(whole, abs=2)
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.COLD))
    assert await admitted(1.0) == pytest.approx(whole / 2, abs=2)
    assert (await harness.broker.loads())[QueueName("m")].slots == 1


async def test_a_probe_finds_a_broker_that_takes_changes_and_makes_none(harness: Harness) -> None:
    await admit(harness, ask("asked", id="first", gateway="g"))
    epoch = harness.broker.epoch
    await harness.broker.probe("g")
    await harness.peer().probe("nobody")
    assert await harness.broker.state("t", "first") is EntryState.QUEUED
    await run_alone(harness, "first")
    assert [reply.output for reply in (await drained(harness)).values()] == [output("asked")]
    await harness.reaping(1.0)
    assert harness.broker.epoch == epoch != "", "nothing is lost"


SLOTS = Slot("m/gpu-0", "m", MAX_BATCH), Slot("other/gpu-0", "other", MAX_BATCH)


async def test_of_models_that_share_a_gpu_the_one_whose_first_entry_is_due_first_goes_first(harness: Harness) -> None:
    async def order() -> list[str]:
        return FairOrder().order(await harness.broker.contenders(SLOTS))

    for one, seconds in zip(SLOTS, (1.0, 0.1), strict=True):
        runs = ((1, seconds), (MAX_BATCH, seconds))
        await harness.healthy(one.worker, model=one.model, warm_up=runs)
    idle = await harness.broker.contenders(SLOTS)
    assert [(one.model, one.slack, one.waits) for one in idle] == [("m", math.inf, False), ("other", math.inf, False)]
    await admit(harness, ask(model="other", timeout=9.0, queue_timeout=9.0))
    assert [one.waits for one in await harness.broker.contenders(SLOTS)] == [False, True]
    assert await order() == ["other", "m"]
    await admit(harness, ask(timeout=9.0, queue_timeout=9.0), ask(timeout=7.0, queue_timeout=7.0))
    await harness.advance(1.0)
    found = await harness.broker.contenders(SLOTS)
    assert [one.slack for one in found] == pytest.approx([6.0, 8.0], abs=0.01), "whoever came first"
    assert [one.seconds for one in found] == pytest.approx([1.0, 0.1], rel=0.01)
    assert await order() == ["m", "other"], "6 run times are less than 80"
    await harness.answer(await harness.claim(SLOTS[0].worker))
    assert await order() == ["other", "m"], "what has left is not due any more"
