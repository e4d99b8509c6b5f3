"""Changes of the server's clock: nothing is held up, and nothing is remembered wrongly for long."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from headway import errors
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.function_library import RULE_AGE
from headway.core.departure import Rule
from headway.model import Cause, EntryState, Lease, NoWork, ProcessInfo, QueueName, Role
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, Fixed, ask, drained, failed, ids, slot, story
from tests.redis.stand import Stand

HOUR = 3600.0
PACED = Fixed(Rule(size=MAX_BATCH, headway=0.1, pace=0.1, tolerance=0.05))


async def worked(harness: Stand, batches: int, each: int = 3) -> list[float]:
    """A slot serves as a paced policy says; the waits of what it served."""
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
@story
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


@story
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


@story
async def test_a_retry_is_paid_for_although_the_clock_was_put_back(harness: Stand) -> None:
    for id in ("a", "b"):
        await harness.broker.enqueue([ask(id=id)])
        await harness.broker.release(await harness.claim(), failed(Cause.CRASHED))
        assert await harness.broker.state("t", id) is EntryState.QUEUED
        harness.clock_error -= HOUR


@story
async def test_slots_that_are_gone_do_not_count_although_the_clock_was_put_back(harness: Stand) -> None:
    await harness.healthy("gone", "here")
    harness.clock_error -= HOUR
    for _ in range(4):
        await harness.healthy("here")
        await harness.reaping(1.0)
    assert (await harness.broker.loads())[QueueName("m")].slots == 1


@story
async def test_failed_batches_run_again_although_the_clock_was_put_back(harness: Stand) -> None:
    """The retry budget fills with time."""
    for _ in range(3):
        await harness.broker.enqueue([ask(id="a")])
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
        await harness.answer(await harness.claim())
        _, cursor = await harness.broker.replies("g", 0)
        waiting = asyncio.create_task(harness.broker.replies("g", cursor))
        await harness.advance(1.0)
        waiting.cancel()
        harness.clock_error -= HOUR


@story
async def test_a_slot_that_listens_is_woken_whatever_the_clock_says(harness: Stand) -> None:
    patient = Fixed(Rule(size=MAX_BATCH, window=0.5, rate=1e6))
    wait = await harness.broker.claim(slot(), patient)
    assert wait == NoWork(None)
    listening = asyncio.create_task(harness.broker.wait_for_work(slot(), None))
    await harness.settle()
    harness.clock_error -= HOUR
    await harness.peer().enqueue([ask()])
    await asyncio.wait_for(listening, 2.0)
    assert isinstance(await harness.broker.claim(slot(), patient), Lease)


@story
async def test_what_waits_when_the_clock_is_put_forward_is_told_that_it_is_late(harness: Stand) -> None:
    await harness.broker.enqueue([ask(id="a")])
    harness.clock_error += HOUR
    await harness.broker.withdraw([("t", "unknown", 0)], "g")
    await harness.reaping(0.1)
    failure = (await drained(harness))["a"].failure
    assert failure is not None
    assert failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
    await harness.broker.enqueue([ask(id="b")])
    assert ids((await harness.claim()).entries) == ["b"]
    assert await harness.broker.claim(slot(), AT_ONCE) == NoWork(None)


@story
async def test_who_is_gone_is_not_believed_to_be_there_although_the_clock_was_put_back(harness: Stand) -> None:
    for id in ("gone", "here"):
        await harness.fleet.heartbeat(ProcessInfo(id=id, role=Role.GATEWAY, host="h", pid=1))
        await harness.healthy(id)
    assert await harness.fleet.acquire_leadership("gone", 3.0) == 0.0
    assert await harness.fleet.acquire_leadership("here", 3.0) > 0.0
    harness.clock_error -= HOUR
    await harness.fleet.heartbeat(ProcessInfo(id="here", role=Role.GATEWAY, host="h", pid=1))
    await harness.healthy("here")
    assert [member.id for member in await harness.fleet.members()] == ["here"]
    assert [worker.worker_id for worker in await harness.broker.workers()] == ["here"]
    await harness.advance(4.0)
    assert await harness.fleet.acquire_leadership("here", 3.0) == 0.0


@story
async def test_no_rule_is_from_a_later_instant_than_that_of_its_claim(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at: list[float] = []
    claim = RedisConnection.claim

    async def noted(link: RedisConnection, *arguments: Any) -> Any:
        [name] = [place for place, one in enumerate(arguments) if isinstance(one, str) and "\0" in one]
        made_at.append(struct.unpack_from("<d", arguments[name + 4])[0])
        return await claim(link, *arguments)

    monkeypatch.setattr(RedisConnection, "claim", noted)
    await harness.advance(50.0)
    await harness.broker.enqueue([ask()])
    await harness.claim()
    first, second = made_at
    assert first == 0.0, "no load is known yet"
    assert harness.now() - RULE_AGE <= second <= harness.now()
