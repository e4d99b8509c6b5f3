"""Queues of versions and models that nobody runs any more: whoever comes finds what waits and what is kept."""

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
from tests.contracts.brokers import AT_ONCE, LIMITS, MAX_BATCH, ask, output, slot
from tests.contracts.dedup_keys import admit, task
from tests.redis.stand import Stand

FORGOTTEN = 130.0
"""Seconds after which the registry has forgotten a worker that is gone."""
LONG = 10_000.0
HOUR = 3600.0


def slot_of(version: str, *, helps: str = "") -> Slot:
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


async def test_queues_are_reaped_while_a_server_is_away(harness: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await beat(harness.broker, "1")  # type: ignore[arg-type]
    await harness.advance(FORGOTTEN)
    broker = await harness.another(shards=2)
    there, away = broker._queues[QueueName("m")]
    monkeypatch.setattr(away, "siblings", AsyncMock(side_effect=BrokerUnavailable("it is away")))
    await broker.reap()
    assert "m@1" in map(str, broker.queue_names)
    assert {*broker._reaping._due_at} >= {away, there}


GONE = "gone"
LOOKED = 12
"""Seconds within which a process has told the server that something is known in a queue of a model."""


@pytest.mark.parametrize("comes_back", [False, True])
async def test_what_waits_outlives_a_full_restart_and_ends_in_time(harness: Stand, comes_back: bool) -> None:
    before = await harness.another()
    before.know({GONE: LIMITS})
    await before.heartbeat(WorkerInfo(worker_id="gpu", model=GONE, status=WorkerStatus.HEALTHY))
    kept = ask("a", model=GONE, dedup_keys=(task("t"),), id="t", timeout=300.0, queue_timeout=300.0)
    assert await before.enqueue([kept, ask("b", model=GONE, id="b", timeout=300.0, queue_timeout=300.0)]) == [None] * 2
    for _ in range(LOOKED):
        await harness.advance(1.0)
        await before.workers()
        await before.reap()
    await before.close()
    await harness.advance(FORGOTTEN)

    after = await harness.another()
    after.know({}, others=True)
    await pass_time(harness, after, 100.0)
    if comes_back:
        again = await harness.another()
        again.know({GONE: LIMITS})
        lease = await again.claim(slot("gpu", GONE), AT_ONCE)
        assert isinstance(lease, Lease)
        assert {one.id for one in lease.entries} == {"t", "b"}
        return
    await pass_time(harness, after, 100.0)
    found = await after.outcome("t", "t")
    assert isinstance(found, Reply)
    replies, _ = await after.replies("g", 0)
    assert {reply.id for reply in replies} >= {"b"}
    for reply in (found, *replies):
        assert reply.failure is not None
        assert reply.failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
