"""Promises of every broker: each batch ends once, and reports on entries, workers, loads and the epoch are right."""

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from headway import errors
from headway.core.locality import FairOrder
from headway.model import Completion, EntryState, ItemResult, QueueName, Slot, WeightLine, WorkerInfo, WorkerStatus
from tests.contracts.brokers import LIMITS, MAX_BATCH, MODELS, Harness, ask, beat, drained, ids, output, slot
from tests.contracts.dedup_keys import admit, run_alone


async def test_an_admitted_entry_is_claimed_run_and_answered(harness: Harness) -> None:
    entry = ask("hello")
    assert list(await harness.broker.enqueue([entry])) == [None]
    await harness.advance(0.5)
    claimed_at = harness.now()
    lease = await harness.claim("gpu-7")
    assert (list(lease.entries), lease.slot) == ([entry], slot("gpu-7"))
    assert lease.expires_at - lease.granted_at == pytest.approx(harness.lease_seconds)
    await harness.advance(0.25)
    assert await harness.broker.complete(lease, [ItemResult(output("hello"))]) == Completion(answered=1, departed=0)
    [reply] = (await drained(harness)).values()
    assert (reply.id, reply.tenant, reply.output, reply.failure) == (entry.id, entry.tenant, output("hello"), None)
    assert reply.attempts == 1
    assert reply.queued == pytest.approx(0.5, abs=harness.grain)
    assert reply.ran is not None
    assert (reply.ran.worker, reply.ran.size) == ("gpu-7", 1)
    assert reply.ran.seconds == pytest.approx(0.25, abs=harness.grain)
    assert reply.ran.claimed_at == pytest.approx(claimed_at, abs=harness.grain)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_wrong_number_of_items_is_an_error_and_loses_nothing(harness: Harness, count: int) -> None:
    await harness.broker.enqueue([ask(), ask()])
    lease = await harness.claim()
    with pytest.raises(ValueError, match=f"{count} items"):
        await harness.broker.complete(lease, [ItemResult("x")] * count)
    assert await drained(harness) == {}
    await harness.answer(lease)
    assert len(await drained(harness)) == 2


async def test_a_second_reader_does_not_leave_the_first_waiting(harness: Harness) -> None:
    first = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    second.cancel()
    await harness.broker.enqueue([ask(id="a")])
    await harness.answer(await harness.claim())
    await harness.settle()
    assert first.done()
    assert ids((await first)[0]) == ["a"]


async def test_a_model_that_comes_later_is_served_to_whoever_waits_already(harness: Harness) -> None:
    reading = asyncio.ensure_future(harness.broker.replies("g", 0))
    await harness.settle()
    refusal, admitted = await harness.broker.enqueue([ask("early", model="late"), ask("x", gateway="other")])
    assert refusal is not None
    assert (refusal.code, admitted) == (errors.NO_WORKERS, None)
    harness.broker.know({"late": LIMITS, "m": LIMITS})
    assert [one.input for one in (await harness.claim()).entries] == ["x"], (
        "a model that is named again keeps its queue"
    )
    await harness.healthy("late-0", model="late")
    entry = ask("later", model="late")
    await admit(harness, entry)
    lease = await harness.claim("late-0", "late")
    await harness.answer(lease)
    await harness.settle()
    assert reading.done(), "a gateway that waited before the model came gets its replies"
    replies, _ = await reading
    assert [(reply.id, reply.output) for reply in replies] == [(entry.id, output("later"))]
    assert {one.model for one in await harness.broker.depths()} == {"m", "other", "late"}
    assert set(map(str, await harness.broker.loads())) == {"m", "other", "late"}


async def test_an_entry_is_found_by_its_id_alone_whatever_its_tenant_and_model(harness: Harness) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await harness.claim()
    assert await harness.broker.state("other tenant", "a") is None
    await admit(harness, *(ask(id=f"{n}", tenant=f"tenant {n}", model=MODELS[n % 2]) for n in range(12)))
    expected = {"a": EntryState.PROCESSING, "0": EntryState.QUEUED, "7": EntryState.QUEUED, "11": EntryState.QUEUED}
    for id, state in {**expected, "b": None, "*": None, "1?": None}.items():
        assert await harness.peer().state(None, id) is state


async def test_the_registry_goes_by_the_last_heartbeat(harness: Harness) -> None:
    figures: dict[str, Any] = {
        "utilisation": 0.5,
        "in_flight": 1,
        "restarts": 2,
        "pid": 77,
        "weight": WeightLine(2.0, 0.25),
    }
    told = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, last_heartbeat=-1.0, **figures)
    await harness.broker.heartbeat(told)
    await beat(harness.broker, "gpu-1", status=WorkerStatus.STARTING)
    first = {one.worker_id: one for one in await harness.peer().workers()}
    assert first["gpu-0"].last_heartbeat == pytest.approx(harness.now(), abs=harness.grain)
    assert replace(first["gpu-0"], last_heartbeat=-1.0) == told
    seen = []
    for seconds in (1.4, 0.2, 8.3, 0.2):
        await harness.advance(seconds)
        seen.append({one.worker_id: one.status.value for one in await harness.broker.workers()})
    assert [one["gpu-0"] for one in seen] == ["healthy", "degraded", "degraded", "offline"]
    assert [one["gpu-1"] for one in seen] == ["starting", "starting", "starting", "offline"]
    await harness.healthy("gpu-0")
    assert {one.worker_id: one.status.value for one in await harness.broker.workers()}["gpu-0"] == "healthy"


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
    await beat(harness.broker, "gpu-1", status=WorkerStatus.COLD)
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
