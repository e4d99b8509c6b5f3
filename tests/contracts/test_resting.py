"""Behaviour of every broker that rests: who reaps is asked seldom, and nothing that is due is late for that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headway.core.health import REST_EVERY
from headway.fleet.reaper import reap_on
from headway.model import Cause, Lease, NoWork, QueueName, WorkerInfo, WorkerStatus
from headway.ports import Broker
from tests.contracts.brokers import AT_ONCE, Harness, ask, drained, failed, slot, story
from tests.contracts.dedup_keys import poll, task

LATE = 0.06
"""Seconds by which an expiry may be told late, with the grain of a reap."""


@contextlib.asynccontextmanager
async def resting(harness: Harness) -> AsyncIterator[Broker]:
    """Two processes that reap, whose queues have come to rest. Yields the second, which is not the one that reaps."""
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


@story
async def test_a_queue_at_rest_is_reaped_once_a_second(harness: Harness) -> None:
    async with resting(harness):
        pass
    await harness.advance(5.0)
    await harness.broker.reap(REST_EVERY)
    assert await harness.broker.reap(REST_EVERY) >= 0.9


@story
async def test_what_comes_to_a_queue_at_rest_expires_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        for number, wait in enumerate((0.02, 0.3, 0.07, 0.5)):
            begun = harness.now()
            await other.enqueue([ask(id=f"a{number}", gateway=f"g{number}", queue_timeout=wait)])
            await _heard(other, f"g{number}", f"a{number}")
            assert wait - 1e-6 <= harness.now() - begun <= wait + LATE


@story
async def test_a_follower_that_comes_to_a_batch_that_runs_expires_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        await other.enqueue([ask(id="job", dedup_keys=(task("job"),))])
        lease = await harness.claim()
        for _ in range(3):
            await harness.advance(1.0)
            assert await harness.broker.extend(lease)
        begun = harness.now()
        await other.enqueue([poll("s", "job", gateway="g2", timeout=0.3)])
        await _heard(other, "g2", "s")
        assert 0.3 - 1e-6 <= harness.now() - begun <= 0.3 + LATE


@story
async def test_what_a_batch_that_failed_leaves_expires_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        await other.enqueue([ask(id="a", timeout=2.3, queue_timeout=2.0)])
        lease = await harness.claim()
        begun = harness.now()
        await harness.advance(2.0)
        await other.release(lease, failed(Cause.CRASHED))
        await _heard(other, "g", "a")
        assert 2.3 - 1e-6 <= harness.now() - begun <= 2.3 + LATE


@story
async def test_a_lease_that_is_lost_while_the_queue_rests_runs_again_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        await other.enqueue([ask(id="a")])
        await harness.claim("gpu-0")
        await harness.advance(harness.lease_seconds - 0.1)
        assert isinstance(await other.claim(slot("gpu-1"), AT_ONCE), NoWork)
        await harness.advance(0.1 + LATE)
        again = await other.claim(slot("gpu-1"), AT_ONCE)
        while isinstance(again, NoWork) and again.until is not None:  # It rests for a moment after a failure.
            await harness.advance(max(again.until - harness.now(), 0.001))
            again = await other.claim(slot("gpu-1"), AT_ONCE)
        assert isinstance(again, Lease) and again.attempt == 2
        await harness.answer(again)


@story
async def test_a_slot_that_falls_silent_counts_no_more_on_time(harness: Harness) -> None:
    async with resting(harness) as other:
        info = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY)
        await other.heartbeat(info)
        await harness.advance(1.4)
        assert (await other.loads())[QueueName("m")].slots == 1
        await harness.advance(0.1 + LATE)
        assert (await other.loads())[QueueName("m")].slots == 0


@story
async def test_a_slot_that_rests_is_given_as_long_beyond_the_heartbeat_that_fails_to_come(harness: Harness) -> None:
    async with resting(harness) as other:
        info = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, every=REST_EVERY)
        await other.heartbeat(info)
        await harness.advance(1.9)
        assert (await other.loads())[QueueName("m")].slots == 1
        assert [worker.status for worker in await other.workers()] == [WorkerStatus.HEALTHY]
        await harness.advance(0.1 + LATE)
        assert (await other.loads())[QueueName("m")].slots == 0
        assert [worker.status for worker in await other.workers()] == [WorkerStatus.DEGRADED]


@pytest.mark.parametrize("after", [0.3, 1.7])
@story
async def test_a_woken_slot_that_does_not_come_keeps_others_asleep_for_a_moment_only(
    harness: Harness, after: float
) -> None:
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
