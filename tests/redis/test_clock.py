"""Changes of the server's clock: nothing gets stuck, and wrong times are soon forgotten."""

import asyncio

import pytest

from headway import errors
from headway.brokers.redis.steps import PUT_BACK, WINDOW, ServerClock
from headway.core.departure import Rule
from headway.model import Cause, EntryState, Lease, NoWork, QueueName
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Fixed, ask, attend, drained, failed, failure_of, ids, slot
from tests.redis.stand import Stand

HOUR = 3600.0
PACED = Fixed(Rule(size=MAX_BATCH, headway=0.1, pace=0.1, tolerance=0.05))


async def worked(harness: Stand, batches: int, each: int = 3) -> list[float]:
    """Have a slot serve batches by a paced policy. Returns the waits of what it served."""
    waits = []
    for _ in range(batches):
        entries = [ask() for _ in range(each)]
        assert await harness.broker.enqueue(entries) == [None] * each
        while not isinstance(claimed := await harness.broker.claim(slot(), PACED), Lease):
            await asyncio.wait_for(harness.broker.wait_for_work(slot(), claimed.until), 5.0)
        await harness.advance(0.05)
        await harness.answer(claimed)
        replies = await drained(harness)
        waits += [replies[entry.id].queued for entry in entries]
    return waits


@pytest.mark.parametrize("step", [-HOUR, -2.0, HOUR])
async def test_departures_and_rates_go_on_as_before(harness: Stand, step: float) -> None:
    await harness.healthy("gpu-0")
    assert max(await worked(harness, 10)) <= 0.15
    before = (await harness.broker.loads())[QueueName("m")]
    harness.clock_error += step
    await harness.healthy("gpu-0")
    assert max(await worked(harness, 10)) <= 0.15
    after = (await harness.broker.loads())[QueueName("m")]
    assert after.slots == 1
    assert after.departures == before.departures + 10
    assert after.rate <= 2.0 * before.rate
    assert after.alpha == pytest.approx(0.05, rel=0.2)


async def test_a_lost_lease_is_taken_back_although_the_clock_was_put_back(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    await harness.claim()
    await harness.peer().reap()
    harness.clock_error -= HOUR
    await harness.broker.enqueue([ask(id="b")])
    alive = await harness.claim("gpu-1")
    assert ids(alive.entries) == ["b"]
    await harness.advance(harness.lease_seconds - 0.5)
    assert await harness.broker.extend(alive)
    await harness.reaping(1.0)
    assert await harness.broker.state("t", "a") is EntryState.QUEUED
    assert await harness.broker.state("t", "b") is EntryState.PROCESSING
    await harness.answer(alive)
    await harness.advance(0.2)
    await harness.answer(await harness.claim("gpu-1"))
    assert set(await drained(harness)) == {"a", "b"}


async def test_failed_batches_run_again_although_the_clock_was_put_back(harness: Stand) -> None:
    """The retry budget refills over time."""
    for cause in (Cause.RAISED, Cause.CRASHED, Cause.RAISED):
        await harness.broker.enqueue([ask(id="a")])
        await harness.broker.release(await harness.claim(), failed(cause))
        assert await harness.broker.state("t", "a") is EntryState.QUEUED
        await harness.advance(1.0)
        await harness.answer(await harness.claim())
        await harness.acknowledged()
        harness.clock_error -= HOUR


async def test_a_slot_that_listens_is_woken_whatever_the_clock_says(harness: Stand) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    assert await harness.broker.claim(slot(), patient) == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    harness.clock_error -= HOUR
    await harness.peer().enqueue([ask()])
    await asyncio.wait_for(listening, 2.0)
    assert isinstance(await harness.broker.claim(slot(), patient), Lease)


async def test_what_waits_when_the_clock_is_put_forward_is_told_that_it_is_late(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    harness.clock_error += HOUR
    await harness.broker.withdraw([("t", "unknown", 0)], "g")
    await harness.reaping(0.1)
    assert failure_of((await drained(harness))["a"]).code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
    await harness.broker.enqueue([ask(id="b")])
    assert ids((await harness.claim()).entries) == ["b"]
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)


async def test_who_is_gone_is_not_believed_to_be_there_although_the_clock_was_put_back(harness: Stand) -> None:
    for id in ("gone", "here"):
        await attend(harness.fleet, id)
        await harness.healthy(id)
    assert await harness.fleet.acquire_leadership("gone", 3.0) == 0.0
    assert await harness.fleet.acquire_leadership("here", 3.0) > 0.0
    harness.clock_error -= HOUR
    await attend(harness.fleet, "here")
    await harness.healthy("here")
    assert [member.id for member in await harness.fleet.members()] == ["here"]
    assert [worker.worker_id for worker in await harness.broker.workers()] == ["here"]
    for _ in range(4):
        await harness.healthy("here")
        await harness.reaping(1.0)
    assert (await harness.broker.loads())[QueueName("m")].slots == 1
    assert await harness.fleet.acquire_leadership("here", 3.0) == 0.0


class ServerAhead:
    """This process's clock and an estimate of the server's, which is ahead. The loop's iteration began earlier."""

    def __init__(self, *answers: float) -> None:
        self.here, self.ahead, self.turn_began = 10.0, 1000.0, 0.0
        self.estimate = ServerClock(lambda: self.here - self.turn_began, lambda: self.here)
        for seconds in answers:
            self.answer(seconds)

    def answer(self, seconds: float = 0.0) -> None:
        self.estimate.learn(self.here + self.ahead - seconds)

    @property
    def behind(self) -> float:
        until = self.estimate.after(0.0)
        assert until is not None
        return self.here + self.ahead - until


def test_an_answer_that_took_long_to_arrive_does_not_spoil_the_estimate() -> None:
    clock = ServerAhead()
    assert clock.estimate.after(1.0) is None
    assert clock.estimate.now() == clock.here, "nothing is known before the first answer"
    for seconds in (0.2, 0.01, 0.9, 0.3):
        clock.answer(seconds)
        clock.here += 1.0
    assert clock.behind == pytest.approx(0.01)
    assert clock.estimate.after(1.0) == pytest.approx(clock.here + clock.ahead + 0.99)
    clock.here += WINDOW + 1.0
    clock.answer(0.9)
    assert clock.behind == pytest.approx(0.01)


def test_an_answer_that_is_read_when_a_turn_of_the_loop_has_lasted_long_does_not_put_the_server_ahead() -> None:
    clock = ServerAhead()
    clock.turn_began = 0.5
    clock.answer(0.6)
    clock.turn_began = 0.0
    assert clock.behind == pytest.approx(0.6)


def test_what_was_good_two_windows_ago_is_forgotten_as_clocks_drift() -> None:
    clock = ServerAhead(0.0)
    clock.ahead -= 0.1
    for _ in range(2):
        clock.here += WINDOW + 1.0
        clock.answer()
    assert clock.behind == pytest.approx(0.0)


@pytest.mark.parametrize("seconds", [-3600.0, -PUT_BACK - 0.1, 0.5, 3600.0])
def test_a_clock_that_is_put_to_another_instant_is_believed_at_the_next_answer(seconds: float) -> None:
    clock = ServerAhead(0.01)
    clock.ahead += seconds
    clock.answer(0.02)
    assert clock.behind == pytest.approx(0.02)
