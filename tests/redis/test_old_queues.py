"""Queues of versions that nobody runs any more: what waits and what is kept in one is found by whoever comes."""

from __future__ import annotations

from unittest.mock import AsyncMock

import pytest

from headway import errors
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.errors import BrokerUnavailable
from headway.model import (
    DeadLetter,
    EntryState,
    ItemResult,
    Lease,
    ModelReport,
    QueueName,
    Reply,
    Slot,
    WorkerInfo,
    WorkerStatus,
)
from tests.contracts.brokers import AT_ONCE, MAX_BATCH, ask, output, story
from tests.contracts.dedup_keys import admit, task
from tests.redis.stand import Stand

FORGOTTEN = 130.0
"""Seconds after which the registry has forgotten a worker that is gone."""
LONG = 10_000.0
HOUR = 3600.0


def slot_of(version: str, *, helps: str = "") -> Slot:
    """A slot of a version, or one of another version that helps out."""
    return Slot("gpu", "m", MAX_BATCH, 0, ModelReport(helps or version), version, helps=bool(helps))


async def beat(broker: RedisBroker, version: str) -> None:
    worker = WorkerInfo(
        worker_id="gpu", model="m", status=WorkerStatus.HEALTHY, runs=ModelReport(version), version=version
    )
    await broker.heartbeat(worker)
    await broker.workers()


async def pass_time(harness: Stand, broker: RedisBroker, seconds: float, version: str = "") -> None:
    """Time with the housekeeping of one process, whose worker runs a version."""
    for _ in range(10):
        await harness.advance(seconds / 10)
        await broker.workers()
        await broker.reap()
        if version:
            await beat(broker, version)


async def restarted(harness: Stand, version: str) -> RedisBroker:
    """The one process there is after all others have gone, and the registry has forgotten them."""
    await harness.advance(FORGOTTEN)
    broker = await harness.another()
    await beat(broker, version)
    await broker.reap()
    return broker


@story
async def test_what_waits_for_a_version_of_before_a_restart_is_found_and_run(harness: Stand) -> None:
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    waiting = ask("a", version="1", dedup_keys=(task("t"),), id="t", timeout=LONG, queue_timeout=LONG)
    await admit(harness, waiting)
    broker = await restarted(harness, "2")
    assert ("1", 1) in {(one.version, one.depth) for one in await broker.depths()}
    assert await broker.outcome("t", "t") is EntryState.QUEUED
    lease = await broker.claim(slot_of("1", helps="2"), AT_ONCE)
    assert isinstance(lease, Lease)
    await broker.complete(lease, [ItemResult(output(entry.input)) for entry in lease.entries])
    found = await broker.outcome("t", "t")
    assert isinstance(found, Reply)
    assert found.output == output("a")


@story
async def test_what_nobody_runs_after_a_restart_ends_in_its_time(harness: Stand) -> None:
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    waiting = ask("a", version="1", pinned=True, dedup_keys=(task("t"),), id="t", timeout=200.0, queue_timeout=200.0)
    await admit(harness, waiting)
    broker = await restarted(harness, "")
    await pass_time(harness, broker, 100.0)
    found = await broker.outcome("t", "t")
    assert isinstance(found, Reply)
    assert found.failure is not None
    assert found.failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)


@story
async def test_outcomes_and_dead_letters_of_before_a_restart_are_found(harness: Stand) -> None:
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    await admit(harness, ask("good", version="1", dedup_keys=(task("good", keep=HOUR),), id="good", timeout=60.0))
    lease = await harness.broker.claim(slot_of("1"), AT_ONCE)
    assert isinstance(lease, Lease)
    await harness.answer(lease)
    bad = ask("bad", version="1", id="bad")
    await harness.dead.add(DeadLetter(entry=bad, error="no", cause="raised", attempts=3, worker="gpu", died_at=1.0))
    broker = await restarted(harness, "2")
    found = await broker.outcome("t", "good")
    assert isinstance(found, Reply)
    assert found.output == output("good")
    letters = RedisDeadLetters(broker._connection, broker.queue_names)
    assert [letter.entry.id for letter in await letters.list()] == ["bad"]
    await pass_time(harness, broker, 3 * HOUR, "2")
    late = await restarted(harness, "3")
    assert "m@1" in map(str, late.queue_names), "it is known for as long as there is a dead letter"
    letters = RedisDeadLetters(late._connection, late.queue_names)
    assert [letter.entry.id for letter in await letters.list()] == ["bad"]
    await letters.remove("bad")
    assert "m@1" not in map(str, (await restarted(harness, "3")).queue_names)


@story
async def test_a_queue_without_anything_is_not_found_an_hour_after_its_last_use(harness: Stand) -> None:
    """However long others are there that know it, and reap it: versions that come and go do not add up."""
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    await admit(harness, ask("a", version="1"))
    lease = await harness.broker.claim(slot_of("1"), AT_ONCE)
    assert isinstance(lease, Lease)
    await harness.answer(lease)
    broker = await restarted(harness, "2")
    assert "m@1" in map(str, broker.queue_names)
    await pass_time(harness, broker, HOUR / 2, "2")
    assert "m@1" in map(str, broker.queue_names)
    await pass_time(harness, broker, HOUR / 2, "2")
    assert (
        sorted(map(str, broker.queue_names))
        == sorted(map(str, (await restarted(harness, "2")).queue_names))
        == ["m", "m@2", "other"]
    )


@story
async def test_of_servers_that_answer_queues_are_found_and_reaped_while_another_does_not(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    await harness.advance(FORGOTTEN)
    broker = await harness.another(shards=2)
    there, away = broker._queues[QueueName("m")]
    monkeypatch.setattr(away, "siblings", AsyncMock(side_effect=BrokerUnavailable("it is away")))
    await broker.reap()
    assert "m@1" in map(str, broker.queue_names)
    assert {*broker._reaping._due_at} >= {away, there}
