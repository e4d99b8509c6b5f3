"""Waiting costs nothing and misses nothing: the bell that wakes idle slots, and brokers at rest."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from headway.core.departure import Policy, Rule
from headway.core.health import HEARTBEAT_EVERY, REST_EVERY
from headway.core.slot_factors import FACTORS, USUAL
from headway.fleet.pace import reap_on
from headway.model import Cause, Lease, NoWork, QueueName, WorkerStatus
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, EXAMPLES, MAX_BATCH, WHEN_FULL, Fixed, Harness, ask, drained, failed, slot
from tests.contracts.dedup_keys import poll, task

pytestmark = pytest.mark.parametrize("harness", ("near", *EXAMPLES), indirect=True)


async def idle(harness: Harness, *workers: str, policy: Policy = AT_ONCE) -> list[asyncio.Task[None]]:
    """Slots that found nothing to claim and are listening now."""
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


async def test_the_enqueue_that_makes_a_batch_ready_rings(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", policy=WHEN_FULL)
    for _ in range(MAX_BATCH - 1):
        await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == []
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [0]


async def test_of_several_idle_slots_one_is_woken_and_the_next_when_it_leaves_some(harness: Harness) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1", "gpu-2")
    await harness.peer().enqueue([ask()])
    assert len(await awake(harness, listeners)) == 1
    await harness.broker.enqueue([ask() for _ in range(2 * MAX_BATCH)])
    [first] = await awake(harness, listeners)  # It is waking up, and takes as many of these as it can.
    await harness.claim(f"gpu-{first}")
    assert len(await awake(harness, listeners)) == 2
    await close(listeners)


async def test_an_urgent_entry_brings_the_departure_forward(harness: Harness) -> None:
    await harness.broker.enqueue([ask(queue_timeout=5.0)])
    listeners = await idle(harness, "gpu-0", policy=WHEN_FULL)
    await harness.broker.enqueue([ask(id="urgent", queue_timeout=0.5)])
    await harness.advance(0.5)
    assert await awake(harness, listeners) == [0]
    assert await drained(harness) == {}


@pytest.mark.parametrize("before", [False, True])
async def test_a_slot_that_goes_away_leaves_its_wake_up_to_the_next(harness: Harness, before: bool) -> None:
    listeners = await idle(harness, "gpu-0", "gpu-1")
    if before:
        await close(listeners[:1])
    await harness.broker.enqueue([ask()])
    listeners[0].cancel()
    assert await awake(harness, listeners) == [0, 1]


@pytest.mark.parametrize("how", ["given back", "failed", "lost"])
async def test_work_that_comes_back_wakes_an_idle_slot(harness: Harness, how: str) -> None:
    await harness.broker.enqueue([ask()])
    lease = await harness.claim("gpu-0")
    listeners = await idle(harness, "gpu-1")
    if how == "lost":
        await harness.reaping(harness.lease_seconds + 1.0)
    else:
        await harness.broker.release(lease, failed() if how == "failed" else None)
        await harness.advance(0.2 if how == "failed" else 0.0)
    assert await awake(harness, listeners) == [0]


async def test_a_slot_that_claims_in_vain_leaves_the_bell_set_for_the_others(harness: Harness) -> None:
    """The first slot is woken, finds that the batch isn't ready yet, and doesn't come back."""
    listeners = await idle(harness, "gpu-0", "gpu-1")
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [0]
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    assert isinstance(await harness.broker.claim(slot("gpu-0"), patient), NoWork)
    await harness.advance(0.5 + harness.grain)
    assert await awake(harness, listeners) == [0, 1]


class Scaled:
    """Slots of a fleet that an autoscaler resizes. A slot that leaves ends its batch, and gives back anything that it
    gets afterwards. Some batches fail, and some are given back."""

    def __init__(self, harness: Harness, policy: Policy, rng: random.Random) -> None:
        self.serving: dict[str, asyncio.Task[None]] = {}
        self._harness, self._policy, self._rng = harness, policy, rng
        self.leaving: set[str] = set()
        self._resting: dict[str, asyncio.Future[None]] = {}

    def grow(self) -> None:
        worker = next(name for number in range(99) if (name := f"gpu-{number}") not in self.serving)
        self.serving[worker] = asyncio.create_task(self._serve(worker))

    async def shrink(self, worker: str) -> None:
        """Make a slot leave, whatever it is doing. Returns when it has left."""
        self.leaving.add(worker)
        if worker in self._resting:
            self._resting[worker].cancel()
        await self.serving[worker]
        await self._tell(worker, WorkerStatus.OFFLINE)
        self.leaving.discard(worker)
        del self.serving[worker]

    async def _tell(self, worker: str, status: WorkerStatus) -> None:
        await self._harness.healthy(worker, status=status)

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
            elif self._rng.random() < 0.1:
                await self._harness.advance(0.01)
                await broker.release(claimed, failed() if self._rng.random() < 0.5 else None)
            else:
                await self._harness.advance(0.01)
                await self._harness.answer(claimed)


async def test_a_fleet_that_an_autoscaler_changes_lets_nothing_lie(harness: Harness) -> None:
    rng, asked = random.Random(5), list[str]()
    window, going = 0.05, set[asyncio.Task[None]]()
    fleet = Scaled(harness, Fixed(Rule(size=MAX_BATCH, window=window, rate=1e6)), rng)
    reaping = asyncio.create_task(harness.reaping(60.0))
    for _ in range(70):
        await harness.advance(rng.expovariate(8.0))  # Rarely, as every arrival wakes a sleeping slot.
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
    calm = [reply.queued for reply in replies.values() if reply.attempts == 1]
    assert max(calm) <= window + 0.2
    assert sorted(calm)[len(calm) // 2] <= window + harness.grain


async def test_the_load_tells_the_pace_of_each_slot_and_the_fastest_idle_one_is_woken(harness: Harness) -> None:
    tells_apart = Fixed(Rule(size=1, headway=10.0, team=2.0, speed=1.5))
    paces = {"gpu-0": 0.2, "gpu-1": 0.1, "gpu-2": 0.1}
    for number in range(12):
        await harness.healthy(*paces)
        if number == 0:
            assert (await harness.broker.loads())[QueueName("m")].paces == ()
        for worker, seconds in paces.items():
            await harness.broker.enqueue([ask() for _ in range(MAX_BATCH)])
            lease = await harness.broker.claim(slot(worker), tells_apart)
            assert isinstance(lease, Lease)
            await harness.advance(seconds)
            await harness.answer(lease)
    load = (await harness.peer().loads())[QueueName("m")]
    known = [position for position, count in enumerate(load.paces) for _ in range(count)]
    assert len(known) == 3
    assert known[0] == known[1] < known[2]
    assert known[0] <= USUAL
    assert FACTORS[known[2]] / FACTORS[known[0]] > 1.6
    listeners = await idle(harness, "gpu-0", "gpu-1", policy=tells_apart)
    await harness.broker.enqueue([ask()])
    assert await awake(harness, listeners) == [1]
    await close(listeners)


LATE = 0.06
"""Seconds by which an expiry may be reported late, including the grain of a reap."""


@contextlib.asynccontextmanager
async def resting(harness: Harness) -> AsyncIterator[Broker]:
    """Two reaping processes whose queues have come to rest. Yields the second, which isn't the one reaping."""
    reapers = [asyncio.ensure_future(reap_on(broker)) for broker in (harness.broker, harness.peer())]
    await harness.broker.enqueue([ask(id="first")])
    await harness.answer(await harness.claim())
    assert set(await drained(harness)) == {"first"}
    await harness.advance(4.0)
    try:
        yield harness.peer()
    finally:
        for reaper in reapers:
            reaper.cancel()
        await asyncio.gather(*reapers, return_exceptions=True)


async def _heard(broker: Broker, gateway: str, wanted: str) -> None:
    cursor = 0
    while True:
        replies, cursor = await broker.replies(gateway, cursor)
        if any(reply.id == wanted for reply in replies):
            return


async def test_a_queue_at_rest_is_reaped_once_a_second(harness: Harness) -> None:
    async with resting(harness):
        pass
    await harness.advance(5.0)
    await harness.broker.reap(REST_EVERY)
    assert await harness.broker.reap(REST_EVERY) >= 0.9


async def test_what_comes_to_a_queue_at_rest_expires_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        for number, wait in enumerate((0.02, 0.3, 0.07, 0.5)):
            begun = harness.now()
            await other.enqueue([ask(id=f"a{number}", gateway=f"g{number}", queue_timeout=wait)])
            await _heard(other, f"g{number}", f"a{number}")
            assert wait - 1e-6 <= harness.now() - begun <= wait + LATE


async def test_what_comes_to_or_out_of_a_batch_that_runs_expires_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        await other.enqueue([ask(id="job", dedup_keys=(task("job"),), timeout=6.0)])
        lease = await harness.claim()
        for _ in range(3):
            await harness.advance(1.0)
            assert await harness.broker.extend(lease)
        begun = harness.now()
        await other.enqueue([poll("s", "job", gateway="g2", timeout=0.3)])
        await _heard(other, "g2", "s")
        assert 0.3 - 1e-6 <= harness.now() - begun <= 0.3 + LATE
        await harness.advance(2.0)
        await other.release(lease, failed(Cause.CRASHED))
        await _heard(other, "g", "job")
        assert 3.0 - 1e-6 <= harness.now() - begun <= 3.0 + LATE


async def test_a_lease_that_is_lost_while_the_queue_rests_runs_again_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        await other.enqueue([ask(id="a")])
        await harness.claim("gpu-0")
        await harness.advance(harness.lease_seconds - 0.1)
        assert isinstance(await other.claim(slot("gpu-1"), AT_ONCE), NoWork)
        await harness.advance(0.1 + LATE)
        again = await other.claim(slot("gpu-1"), AT_ONCE)
        while isinstance(again, NoWork) and again.until is not None:  # It rests briefly after a failure.
            await harness.advance(max(again.until - harness.now(), 0.001))
            again = await other.claim(slot("gpu-1"), AT_ONCE)
        assert isinstance(again, Lease) and again.attempt == 2
        await harness.answer(again)


@pytest.mark.parametrize(("every", "grace"), [(HEARTBEAT_EVERY, 1.5), (REST_EVERY, 2.0)])
async def test_a_slot_that_falls_silent_counts_no_more_on_time(harness: Harness, every: float, grace: float) -> None:
    async with resting(harness) as other:
        await harness.healthy("gpu-0", every=every)
        for seconds, slots, status in ((grace - 0.1, 1, WorkerStatus.HEALTHY), (0.1 + LATE, 0, WorkerStatus.DEGRADED)):
            await harness.advance(seconds)
            assert (await other.loads())[QueueName("m")].slots == slots
            assert [worker.status for worker in await other.workers()] == [status]


@pytest.mark.parametrize("after", [0.3, 1.7])
async def test_a_woken_slot_that_stays_away_keeps_others_asleep_briefly(harness: Harness, after: float) -> None:
    async with resting(harness) as other:
        await harness.healthy("gpu-0", "gpu-1")
        for worker in ("gpu-0", "gpu-1"):
            assert isinstance(await other.claim(slot(worker), AT_ONCE), NoWork)
        waiting = [asyncio.ensure_future(other.wait_for_work(slot(f"gpu-{n}"), None)) for n in range(2)]
        await harness.advance(after)
        await harness.healthy("gpu-0", "gpu-1")
        begun = harness.now()
        await other.enqueue([ask(id="a")])
        await asyncio.gather(*waiting)
        assert harness.now() - begun <= 0.1 + LATE
        assert isinstance(await other.claim(slot("gpu-1"), AT_ONCE), Lease)
