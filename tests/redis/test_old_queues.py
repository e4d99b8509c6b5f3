"""Queues of versions and models that nobody runs any more: processes forget them once they are empty."""

import asyncio
import itertools
from unittest.mock import AsyncMock

import pytest

from headway import errors
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.dead_letters import RedisDeadLetters
from headway.core.dedup import follower
from headway.errors import BrokerUnavailable
from headway.model import DeadLetter, EntryState, ItemResult, ModelReport, QueueName, Reply, Slot
from tests.contracts.brokers import LIMITS, MAX_BATCH, answered, ask, beat, granted, outcome_of, output
from tests.contracts.dedup_keys import task
from tests.redis.stand import Stand

HOUR = 3600.0
PAST = HOUR + 300.0
"""Seconds after which an empty, unused queue is forgotten."""
STEP = 300.0
"""Seconds between two looks of these tests' processes."""
FORGOTTEN = 130.0
"""Seconds after which the registry forgets a lost worker."""


def slot_of(version: str, model: str = "m", *, helps: str = "") -> Slot:
    return Slot("gpu", model, MAX_BATCH, 0, ModelReport(helps or version), version, helps=bool(helps))


async def pass_time(harness: Stand, seconds: float, *brokers: RedisBroker, step: float = STEP) -> None:
    for _ in range(round(seconds / step)):
        await harness.advance(step)
        for broker in brokers:
            await broker.workers()
            await broker.reap()


async def host(harness: Stand, version: str, model: str = "m") -> RedisBroker:
    made = await harness.another()
    made.know({model: LIMITS})
    await beat(made, "gpu", model=model, runs=ModelReport(version), version=version)
    return made


async def serve(harness: Stand, gateway: RedisBroker, version: str, model: str = "m", keep: float = 600.0) -> str:
    worker = await host(harness, version, model)
    await gateway.workers()
    gateway.know({model: LIMITS})
    await gateway.workers()
    id = f"task {next(_numbers)}"
    await run(gateway, worker, version, model, id=id, dedup_keys=(task(id, keep=keep),))
    await worker.close()
    return id


async def run(gateway: RedisBroker, worker: RedisBroker, version: str, model: str = "m", **how: object) -> None:
    assert await gateway.enqueue([ask(model=model, version=version, **how)]) == [None]  # type: ignore[arg-type]
    await answered(worker, slot_of(version, model))


_numbers = itertools.count()


def names(broker: RedisBroker) -> list[str]:
    return sorted(map(str, broker.queue_names))


def reads() -> int:
    running = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return sum(name in {"Mailbox._read_on", "Wakeups._read_on"} for name in running)


async def read_on(gateway: RedisBroker, found: list[Reply]) -> None:
    cursor = 0
    while True:
        replies, cursor = await gateway.replies("g", cursor)
        found += replies


async def test_versions_that_come_and_go_leave_nothing_in_a_process(harness: Stand) -> None:
    gateway, found = await harness.another(), list[Reply]()
    reading = asyncio.ensure_future(read_on(gateway, found))
    await pass_time(harness, 2 * STEP, gateway)
    models, before = names(gateway), reads()
    for version in ("1", "2", "3"):
        await serve(harness, gateway, version)
        await pass_time(harness, STEP, gateway)
    assert {"m@1", "m@2", "m@3"} <= {*names(gateway)}
    assert reads() > before
    await pass_time(harness, PAST, gateway)
    late = await harness.another()
    late.know({}, others=True)
    await pass_time(harness, STEP, late)
    assert names(gateway) == names(late) == models
    assert {str(queue.name) for queue in gateway._reaping._due_at} == {*models}
    assert reads() == before
    assert len(found) == 3
    reading.cancel()


async def test_a_processs_own_models_and_the_version_of_its_slot_are_never_forgotten(harness: Stand) -> None:
    worker = await host(harness, "7")
    await pass_time(harness, PAST, worker)
    worker.know({"m": LIMITS})
    await pass_time(harness, PAST, worker)
    assert names(worker) == ["m", "m@7", "other"]


async def test_what_is_kept_is_found_by_every_gateway_for_as_long_as_it_is_kept(harness: Stand) -> None:
    gateway = await harness.another()
    id = await serve(harness, gateway, "1", "learnt", keep=3 * HOUR)
    await pass_time(harness, 2 * HOUR, gateway)
    late = await harness.another()
    late.know({}, others=True)
    for broker in (gateway, late):
        assert (await outcome_of(broker, id)).output == output(f"input of {id}")
    await pass_time(harness, HOUR + PAST, gateway, late)
    assert names(gateway) == names(late) == ["m", "other"]


async def test_dead_letters_of_a_model_that_is_gone_are_found_by_a_gateway_that_starts_later(harness: Stand) -> None:
    gateway = await harness.another()
    await serve(harness, gateway, "1", "learnt")
    letters = RedisDeadLetters(gateway._connection, gateway.queue_names)
    bad = ask("bad", model="learnt", version="1", id="bad")
    await letters.add(DeadLetter(entry=bad, error="no", cause="raised", attempts=3, worker="gpu", died_at=1.0))
    await pass_time(harness, 2 * PAST, gateway)
    late, worker = await harness.another(), await harness.another()
    late.know({}, others=True)
    await pass_time(harness, 2 * STEP, late, worker)
    assert names(worker) == ["m", "other"]
    assert [one.entry.id for one in await RedisDeadLetters(late._connection, late.queue_names).list()] == ["bad"]
    await letters.remove("bad")
    await pass_time(harness, PAST, gateway)
    assert names(gateway) == ["m", "other"]


async def test_a_task_in_a_queue_that_others_reuse_is_found_at_once_after_it_was_forgotten(harness: Stand) -> None:
    first, second = await harness.another(), await harness.another()
    await serve(harness, first, "1")
    await pass_time(harness, PAST, first, second)
    assert "m@1" not in names(second)
    id = await serve(harness, first, "1", keep=HOUR)
    assert isinstance(await second.outcome("t", id), Reply)


async def test_a_task_is_followed_and_cancelled_from_gateways_that_have_not_heard_of_its_queue(harness: Stand) -> None:
    first, second, third = [await harness.another() for _ in range(3)]
    worker = await host(harness, "1")
    await first.workers()
    assert await first.enqueue([ask("a", version="1", id="t", dedup_keys=(task("t"),))]) == [None]
    assert await second.state("t", "t") is EntryState.QUEUED
    assert await third.enqueue([follower("sub", "t", "t", "h", 60.0, 1)]) == [None]
    lease = await granted(worker, slot_of("1"))
    await worker.complete(lease, [ItemResult(output("a"))])
    [reply] = (await third.replies("h", 0))[0]
    assert (reply.id, reply.output) == ("sub", output("a"))
    await (await harness.another()).cancel_task("t", "t")
    assert await first.outcome("t", "t") is None


async def test_a_gateway_gets_its_replies_out_of_a_queue_that_it_had_forgotten(harness: Stand) -> None:
    gateway, found = await harness.another(), list[Reply]()
    reading = asyncio.ensure_future(read_on(gateway, found))
    for count in (1, 2, 3):
        worker = await host(harness, "1")
        await gateway.workers()
        await run(gateway, worker, "1")
        await harness.settle()
        assert len(found) == count
        await worker.close()
        await pass_time(harness, PAST, gateway)
        assert "m@1" not in names(gateway)
    reading.cancel()


async def test_what_runs_for_hours_keeps_its_queue_known(harness: Stand) -> None:
    harness.lease_seconds = 900.0
    gateway = await harness.another()
    worker = await host(harness, "1")
    await gateway.workers()
    how = {"id": "t", "dedup_keys": (task("t"),), "timeout": 9 * HOUR, "queue_timeout": 9 * HOUR}
    assert await gateway.enqueue([ask("a", version="1", **how)]) == [None]  # type: ignore[arg-type]
    await worker.close()
    helper = await host(harness, "2")
    await pass_time(harness, STEP, gateway, helper)
    lease = await granted(helper, slot_of("1", helps="2"))
    for _ in range(round(3 * HOUR / (2 * STEP))):
        await pass_time(harness, 2 * STEP, gateway)
        assert await helper.extend(lease)
    late = await harness.another()
    for broker in (gateway, late):
        assert await broker.outcome("t", "t") is EntryState.PROCESSING
    await helper.complete(lease, [ItemResult(output("a"))])
    assert isinstance(await late.outcome("t", "t"), Reply)


async def test_a_queue_that_is_forgotten_is_no_loss(harness: Stand) -> None:
    gateway = await harness.another()
    await serve(harness, gateway, "1")
    harness.server.command("FLUSHDB")
    await pass_time(harness, 2 * STEP, gateway)
    lost = gateway.epoch
    assert lost != "0"
    await pass_time(harness, PAST, gateway)
    assert "m@1" not in names(gateway)
    assert gateway.epoch == lost


async def test_nothing_is_forgotten_and_all_is_reaped_while_servers_are_away(
    harness: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await harness.another(shards=2)
    await serve(harness, gateway, "1", keep=5 * HOUR)
    there, away = sorted(gateway._queues[QueueName("m")], key=lambda queue: queue._key)
    monkeypatch.setattr(away, "siblings", AsyncMock(side_effect=BrokerUnavailable("it is away")))
    await pass_time(harness, PAST, gateway)
    assert "m@1" in names(gateway)
    assert {*gateway._reaping._due_at} >= {there, away}


LOOKED = 12
"""Seconds within which a process reports to the server that a model's queue has something."""


async def test_what_waits_for_a_version_of_before_a_restart_is_found_and_run(harness: Stand) -> None:
    before = await host(harness, "1")
    await before.workers()
    waiting = ask("a", version="1", dedup_keys=(task("t"),), id="t", timeout=3 * HOUR, queue_timeout=3 * HOUR)
    assert await before.enqueue([waiting]) == [None]
    await before.close()
    await harness.advance(FORGOTTEN)
    after = await host(harness, "2")
    await after.workers()
    await after.reap()
    assert ("1", 1) in {(one.version, one.depth) for one in await after.depths()}
    assert await after.outcome("t", "t") is EntryState.QUEUED
    await answered(after, slot_of("1", helps="2"))
    assert (await outcome_of(after, "t")).output == output("a")


@pytest.mark.parametrize("comes_back", [False, True])
async def test_what_waits_outlives_a_full_restart_and_ends_in_time(harness: Stand, comes_back: bool) -> None:
    before = await harness.another()
    before.know({"gone": LIMITS})
    await beat(before, "gpu", model="gone")
    kept = ask("a", model="gone", dedup_keys=(task("t"),), id="t", timeout=300.0, queue_timeout=300.0)
    assert (
        await before.enqueue([kept, ask("b", model="gone", id="b", timeout=300.0, queue_timeout=300.0)]) == [None] * 2
    )
    await pass_time(harness, LOOKED, before, step=1.0)
    await before.close()
    await harness.advance(FORGOTTEN)

    after = await harness.another()
    after.know({}, others=True)
    await pass_time(harness, 100.0, after, step=10.0)
    if comes_back:
        again = await harness.another()
        again.know({"gone": LIMITS})
        lease = await granted(again, Slot("gpu", "gone", MAX_BATCH))
        assert {entry.id for entry in lease.entries} == {"t", "b"}
        return
    await pass_time(harness, 100.0, after, step=10.0)
    found = await outcome_of(after, "t")
    replies, _ = await after.replies("g", 0)
    assert {reply.id for reply in replies} >= {"b"}
    for reply in (found, *replies):
        assert reply.failure is not None and reply.failure.code in (errors.NO_WORKERS, errors.DEADLINE_EXCEEDED)
