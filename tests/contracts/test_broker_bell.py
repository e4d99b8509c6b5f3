"""Waiting costs nothing and misses nothing: the bell that wakes idle slots."""

from __future__ import annotations

import asyncio
import random

from headway.core.departure import Policy, Rule
from headway.model import Lease, NoWork, WorkerInfo, WorkerStatus
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, WHEN_FULL, Fixed, Harness, ask, drained, failed, slot, story


async def idle(harness: Harness, *workers: str, policy: Policy = AT_ONCE) -> list[asyncio.Task[None]]:
    """Slots that have claimed in vain and listen now."""
    listeners = []
    for worker in workers:
        wait = await harness.broker.claim(slot(worker), policy)
        assert isinstance(wait, NoWork)
        listeners.append(asyncio.create_task(harness.broker.wait_for_work(slot(worker), wait.until)))
        await harness.settle()
    assert not any(listener.done() for listener in listeners)
    return listeners


async def awake(harness: Harness, listeners: list[asyncio.Task[None]]) -> list[int]:
    await harness.settle()
    return [place for place, listener in enumerate(listeners) if listener.done()]


async def close(listeners: list[asyncio.Task[None]]) -> None:
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)


@story
async def test_the_enqueue_that_makes_a_batch_ready_rings(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", policy=WHEN_FULL)
    for _ in range(MAX_BATCH - 1):
        await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == []
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [0]


@story
async def test_of_several_idle_slots_one_is_woken(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1", "gpu-2")
    await harness.peer().enqueue([ask()])
    assert len(await awake(harness, listeners)) == 1
    await harness.broker.enqueue([ask()])  # The one that is on its way takes this one along.
    assert len(await awake(harness, listeners)) == 1
    await close(listeners)


@story
async def test_what_the_woken_slot_leaves_wakes_the_next(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1", "gpu-2")
    await harness.broker.enqueue([ask() for _ in range(2 * MAX_BATCH)])
    [first] = await awake(harness, listeners)
    await harness.claim(f"gpu-{first}")
    assert len(await awake(harness, listeners)) == 2
    await close(listeners)


@story
async def test_a_slot_that_listens_when_something_is_ready_returns_at_once(harness: Harness) -> None:
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)
    await harness.broker.enqueue([ask()])
    await asyncio.wait_for(harness.broker.wait_for_work(slot(), None), 1.0)


@story
async def test_a_held_batch_wakes_its_slot_when_it_may_leave(harness: Harness) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    await harness.broker.enqueue([ask()])
    listeners = await idle(harness, "gpu-0", policy=patient)
    await harness.advance(0.4)
    assert await awake(harness, listeners) == []
    await harness.advance(0.1 + harness.grain)
    assert await awake(harness, listeners) == [0]
    assert isinstance(await harness.broker.claim(slot(), patient), Lease)


@story
async def test_an_urgent_entry_brings_the_departure_forward(harness: Harness) -> None:
    await harness.broker.enqueue([ask(queue_timeout=5.0)])
    listeners = await idle(harness, "gpu-0", policy=WHEN_FULL)
    await harness.broker.enqueue([ask(id="urgent", queue_timeout=0.5)])
    await harness.advance(0.5)
    assert await awake(harness, listeners) == [0]
    assert await drained(harness) == {}


@story
async def test_a_wake_up_is_passed_on_when_its_slot_goes_away(harness: Harness) -> None:
    """The first is woken, and cancelled before it could claim."""
    listeners = await idle(harness, "gpu-0", "gpu-1")
    await harness.broker.enqueue([ask()])
    listeners[0].cancel()
    await harness.settle()
    assert listeners[1].done()


@story
async def test_a_slot_that_claims_in_vain_leaves_the_bell_set_for_the_others(harness: Harness) -> None:
    """The first is woken, finds that the batch is held after all, and does not come back."""
    listeners = await idle(harness, "gpu-0", "gpu-1")
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [0]
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    assert isinstance(await harness.broker.claim(slot("gpu-0"), patient), NoWork)
    await harness.advance(0.5 + harness.grain)
    assert await awake(harness, listeners) == [0, 1]


@story
async def test_a_slot_that_stopped_listening_is_not_woken(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1")
    await close(listeners[:1])
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [0, 1]
    assert listeners[0].cancelled()


@story
async def test_a_retry_rings_when_it_may_run(harness: Harness) -> None:
    await harness.broker.enqueue([ask()])
    lease = await harness.claim("gpu-0")
    listeners = await idle(harness, "gpu-1")
    await harness.broker.release(lease, failed())
    await harness.advance(0.2)
    assert await awake(harness, listeners) == [0]


@story
async def test_work_given_back_rings(harness: Harness) -> None:
    await harness.broker.enqueue([ask()])
    lease = await harness.claim("gpu-0")
    listeners = await idle(harness, "gpu-1")
    await harness.broker.release(lease)
    assert await awake(harness, listeners) == [0]


@story
async def test_a_lost_lease_rings(harness: Harness) -> None:
    """Without any other event on a quiet system, the remaining slots must hear of the lost lease."""
    await harness.broker.enqueue([ask()])
    await harness.claim("gpu-0")
    listeners = await idle(harness, "gpu-1")
    await harness.reaping(harness.lease_seconds + 1.0)
    assert await awake(harness, listeners) == [0]


@story
async def test_a_slot_that_was_woken_and_never_came_does_not_keep_the_others_asleep(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1")
    await harness.broker.enqueue([ask()])
    [_] = await awake(harness, listeners)
    await harness.reaping(2.0)
    assert await awake(harness, listeners) == [0, 1]


@story
async def test_a_fleet_of_listeners_lets_nothing_lie(harness: Harness) -> None:
    """Slots that do nothing but claim, run and listen answer everything in time, whatever comes when."""
    rng, asked = random.Random(11), list[str]()
    window = 0.05
    policy = Fixed(Rule(size=MAX_BATCH, window=window, rate=1e6))
    most = 0.0

    async def serve(worker: str) -> None:
        nonlocal most
        while True:
            claimed = await harness.broker.claim(slot(worker), policy)
            if isinstance(claimed, NoWork):
                await harness.broker.wait_for_work(slot(worker), claimed.until)
                continue
            await harness.advance(0.01)
            if rng.random() < 0.1:
                await harness.broker.release(claimed, failed() if rng.random() < 0.5 else None)
                continue
            await harness.answer(claimed)

    slots = [asyncio.create_task(serve(f"gpu-{number}")) for number in range(5)]
    for _ in range(300):
        await harness.advance(rng.expovariate(40.0))
        entries = [ask() for _ in range(rng.choice((1, 1, 1, 3, 12)))]
        await harness.broker.enqueue(entries)
        asked += [entry.id for entry in entries]
    await harness.advance(2.0)
    await close(slots)
    replies = await drained(harness)
    assert set(replies) == set(asked)
    calm = [reply.queued for reply in replies.values() if reply.attempts == 1]
    assert max(calm) <= window + 0.2
    assert sorted(calm)[len(calm) // 2] <= window + harness.grain


class Scaled:
    """Slots of a fleet whose number an autoscaler changes: whoever leaves ends its batch, and gives back what it gets after that."""

    def __init__(self, harness: Harness, policy: Policy) -> None:
        self.serving: dict[str, asyncio.Task[None]] = {}
        self._harness, self._policy = harness, policy
        self.leaving: set[str] = set()
        self._resting: dict[str, asyncio.Future[None]] = {}

    def grow(self) -> None:
        """One more, under the first name that is free: the same device has the same name again."""
        worker = next(name for number in range(99) if (name := f"gpu-{number}") not in self.serving)
        self.serving[worker] = asyncio.create_task(self._serve(worker))

    async def shrink(self, worker: str) -> None:
        """Have a slot leave, wherever it is; returns when it has left."""
        self.leaving.add(worker)
        if worker in self._resting:
            self._resting[worker].cancel()
        await self.serving[worker]
        await self._tell(worker, WorkerStatus.OFFLINE)
        self.leaving.discard(worker)
        del self.serving[worker]

    async def _tell(self, worker: str, status: WorkerStatus) -> None:
        await self._harness.broker.heartbeat(WorkerInfo(worker_id=worker, model="m", status=status))

    async def _serve(self, worker: str) -> None:
        broker = self._harness.broker
        await self._tell(worker, WorkerStatus.HEALTHY)
        while worker not in self.leaving:
            claimed = await broker.claim(slot(worker), self._policy)
            if isinstance(claimed, NoWork):
                resting = self._resting[worker] = asyncio.ensure_future(
                    broker.wait_for_work(slot(worker), claimed.until)
                )
                if worker in self.leaving:
                    resting.cancel()
                await asyncio.gather(resting, return_exceptions=True)
                del self._resting[worker]
            elif worker in self.leaving:
                await broker.release(claimed)
            else:
                await self._harness.advance(0.01)
                await self._harness.answer(claimed)


@story
async def test_a_fleet_that_an_autoscaler_changes_lets_nothing_lie(harness: Harness) -> None:
    rng, asked = random.Random(5), list[str]()
    window, going = 0.05, set[asyncio.Task[None]]()
    fleet = Scaled(harness, Fixed(Rule(size=MAX_BATCH, window=window, rate=1e6)))
    reaping = asyncio.create_task(harness.reaping(60.0))
    for _ in range(70):
        await harness.advance(rng.expovariate(8.0))  # Seldom, as whatever comes next would wake who sleeps.
        entries = [ask() for _ in range(rng.choice((1, 1, 1, 3, 12)))]
        await harness.broker.enqueue(entries)
        asked += [entry.id for entry in entries]
        staying = [worker for worker in fleet.serving if worker not in fleet.leaving]
        if len(staying) < 3 or (len(staying) < 5 and rng.random() < 0.5):
            fleet.grow()
        else:  # It may just have been woken.
            going.add(asyncio.create_task(fleet.shrink(rng.choice(staying))))
    await harness.advance(1.0)
    await asyncio.gather(*going)
    await close([reaping, *fleet.serving.values()])
    replies = await drained(harness)
    assert set(replies) == set(asked)
    assert len(going) > 20
    assert all(reply.attempts == 1 and reply.queued <= window + 0.2 for reply in replies.values())
