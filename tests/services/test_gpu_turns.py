"""How batchers take turns on a shared GPU: one claims at a time, and those that don't respond are skipped."""

import asyncio
from collections.abc import Sequence

import pytest

from headway.brokers.redis.broker import RedisBroker
from headway.core.departure import Policy
from headway.core.locality import Contender
from headway.core.policies import build
from headway.errors import BrokerUnavailable
from headway.model import Lease, NoWork, Slot, WorkerInfo, WorkerStatus
from headway.worker.gpu_turns import TURN, GpuTurns, TurnedSource
from tests.virtual_time import Clock

POLICY = build("window", 0.0)


class Broker:
    """A broker whose `batches` says how many batches each model has."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}
        self.away = False
        self.asked: list[str] = []
        self.beats: list[WorkerInfo] = []
        self.slack: dict[str, float] = {}
        self.compared: list[set[str]] = []
        self.slow = False

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        self.asked.append(slot.model)
        if self.away:
            raise BrokerUnavailable("out of reach")
        if not self.batches.get(slot.model):
            return NoWork(None)
        self.batches[slot.model] -= 1
        return Lease(1, slot, (), "full", 0.0, 10.0, 1.0)

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        await asyncio.Event().wait()

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        self.compared.append({slot.model for slot in slots})
        if self.slow:
            await asyncio.Event().wait()
        return [Contender(slot.model, self.slack.get(slot.model, 9.0), 0.1) for slot in slots]

    async def release(self, lease: Lease, failure: object = None) -> bool:
        return True

    async def heartbeat(self, worker: WorkerInfo) -> None:
        self.beats.append(worker)


class Stand:
    def __init__(self, clock: Clock) -> None:
        self.broker = Broker()
        self.turns = GpuTurns("gpu-0", clock, self.broker.contenders, lambda model: 0.5)
        self.slots = {model: Slot(f"{model}/gpu-0", model, 8) for model in "abc"}
        self.sources = {model: TurnedSource(self.broker, self.turns, model) for model in "abc"}  # type: ignore[arg-type]

    async def claim(self, model: str) -> Lease | NoWork:
        return await self.sources[model].claim(self.slots[model], POLICY)

    def wait(self, model: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.sources[model].wait_for_work(self.slots[model], None))

    async def running(self, model: str) -> Lease:
        self.broker.batches[model] = 1
        lease = await self.claim(model)
        assert isinstance(lease, Lease)
        return lease

    async def contested(self, others: str) -> tuple[Lease, dict[str, asyncio.Task[None]]]:
        """Start a batch of `a`. The models in `others` have tried to claim, and are waiting."""
        lease = await self.running("a")
        for model in others:
            await self.claim(model)
        waits = {model: self.wait(model) for model in others}
        await asyncio.sleep(0)
        return lease, waits


@pytest.fixture
def stand(clock: Clock) -> Stand:
    return Stand(clock)


async def test_nobody_claims_while_a_batch_runs_and_who_waits_has_its_turn_then(stand: Stand) -> None:
    lease = await stand.running("a")
    assert await stand.claim("b") == NoWork(None)
    assert stand.broker.asked == ["a"], "the broker has not heard of it"
    waits = stand.wait("b")
    await asyncio.sleep(0.1)
    assert not waits.done()
    await stand.sources["a"].release(lease)
    await waits
    stand.broker.batches["b"] = 1
    assert await stand.claim("a") == NoWork(None), "it is the other's turn"
    assert isinstance(await stand.claim("b"), Lease)


@pytest.mark.parametrize("slow", [False, True])
async def test_the_most_urgent_is_asked_first_unless_the_broker_is_slow(slow: bool, stand: Stand) -> None:
    lease, waits = await stand.contested("bc")
    stand.broker.slack, stand.broker.slow = {"b": 2.0, "c": 1.0}, slow
    await stand.sources["a"].release(lease)
    first = "b" if slow else "c"
    await waits[first]
    assert stand.broker.compared == [{"a", "b", "c"}]
    assert isinstance(await stand.claim("a"), NoWork)
    stand.broker.batches[first] = 1
    assert isinstance(await stand.claim(first), Lease)


async def test_a_model_alone_has_the_next_turn_without_a_question_though_the_broker_was_away(stand: Stand) -> None:
    stand.broker.away = True
    with pytest.raises(BrokerUnavailable):
        await stand.claim("b")
    stand.broker.away = False
    lease = await stand.running("a")
    await stand.sources["a"].release(lease)
    await stand.running("a")
    assert stand.broker.compared == []


async def test_a_turn_without_a_batch_goes_to_the_next_and_then_anybody_may_look(stand: Stand) -> None:
    lease, waits = await stand.contested("bc")
    await stand.sources["a"].release(lease)
    for model in "bc":
        await waits[model]
        assert await stand.claim(model) == NoWork(None)
    assert stand.broker.asked == ["a", "b", "c"]
    assert await stand.claim("a") == NoWork(None)
    assert not stand.turns.busy


async def test_who_does_not_come_for_its_turn_is_passed_over(stand: Stand) -> None:
    lease, waits = await stand.contested("b")
    await stand.sources["a"].release(lease)
    await waits["b"]
    assert await stand.claim("a") == NoWork(None)
    again = stand.wait("a")
    await asyncio.sleep(TURN * 1.5)
    assert again.done()
    await stand.claim("a")
    assert stand.broker.asked == ["a", "a"]


async def test_a_wait_for_work_on_a_free_gpu_ends_when_another_takes_it(stand: Stand) -> None:
    assert await stand.claim("b") == NoWork(None)
    waits = stand.wait("b")
    await asyncio.sleep(0.1)
    await stand.running("a")
    await asyncio.wait_for(waits, 0.1)
    assert await stand.claim("b") == NoWork(None)


async def test_a_model_that_leaves_passes_its_turn_on(stand: Stand) -> None:
    lease, waits = await stand.contested("bc")
    await stand.sources["a"].release(lease)
    await waits["b"]
    stand.turns.leave("b")
    await waits["c"]
    await stand.running("c")


async def test_heartbeats_tell_the_gpu_and_a_model_that_has_made_room_is_cold(stand: Stand) -> None:
    gone = WorkerInfo(worker_id="a/gpu-0", model="a", status=WorkerStatus.OFFLINE)
    await stand.sources["a"].heartbeat(gone)
    stand.turns.evicted.add("a")
    await stand.sources["a"].heartbeat(gone)
    told = [(beat.status, beat.gpu, beat.share) for beat in stand.broker.beats]
    assert told == [(WorkerStatus.OFFLINE, "gpu-0", 0.5), (WorkerStatus.COLD, "gpu-0", 0.5)]


def test_a_batcher_on_a_shared_gpu_does_not_claim_along_with_its_outcome() -> None:
    turns = GpuTurns("gpu", lambda: 0.0, Broker().contenders, lambda model: 1.0)
    assert RedisBroker.remote and not TurnedSource(object.__new__(RedisBroker), turns, "m").remote, (
        "another may have the turn"
    )
