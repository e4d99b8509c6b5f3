"""A pool of workers grows and shrinks under load without losing requests."""

import asyncio
import random

import pytest

from headway.errors import TargetError
from headway.model import Drain, WorkerInfo, WorkerStatus
from headway.runtime.race import end
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets, asking
from tests.services.stand import Stand
from tests.virtual_time import Clock


def backends(count: int, seconds: float = 1.0) -> list[FakeBackend]:
    return [FakeBackend(seconds) for _ in range(count)]


def busy(stand: Stand) -> list[bool]:
    return [backend.busy for backend in stand.backends]


async def test_a_slot_that_leaves_finishes_its_batch_and_begins_no_other(clock: Clock) -> None:
    async with Stand(clock, *backends(2), max_batch=1, queue_timeout_ms=2500) as stand:
        asked = [stand.asking(f"text {number}") for number in range(4)]
        await asyncio.sleep(0.1)
        assert busy(stand) == [True, True]
        await stand.pool.resize(1)
        assert not busy(stand)[1]
        assert stand.backends[1].stops == 1
        assert len(stand.pool.batchers) == 1
        assert [reply.output for reply in await asyncio.gather(*asked)] == [f"TEXT {n}" for n in range(4)]
        assert len(stand.backends[1].batches) == 1
        statuses = [worker.status for worker in (await workers(stand)).values()]
        assert statuses == [WorkerStatus.HEALTHY, WorkerStatus.OFFLINE]


async def test_a_pool_is_only_as_large_as_it_can_be(clock: Clock) -> None:
    stand = Stand(clock, *backends(2), slots=1)
    with pytest.raises(ValueError, match="not serving yet"):
        await stand.pool.resize(2)
    async with stand:
        for size in (-1, 3):
            with pytest.raises(ValueError, match="must lie between 0 and 2"):
                await stand.pool.resize(size)


async def test_a_pool_that_drains_grows_no_more(clock: Clock) -> None:
    async with Stand(clock, *backends(2), slots=1) as stand:
        asked = stand.asking("last")
        await asyncio.sleep(0.1)
        draining = asyncio.ensure_future(stand.pool.wind_down())
        await asyncio.sleep(0.1)
        await stand.pool.resize(2)
        await draining
        assert (await asked).output == "LAST"
        assert stand.backends[1].starts == 0


async def test_a_drain_waits_for_the_slots_that_leave(clock: Clock) -> None:
    async with Stand(clock, *backends(2), max_batch=1) as stand:
        asked = [stand.asking(text) for text in ("a", "b")]
        await asyncio.sleep(0.1)
        shrinking = asyncio.ensure_future(stand.pool.resize(1))
        await asyncio.sleep(0.1)
        shrinking.cancel()
        await stand.pool.wind_down()
        assert [reply.output for reply in await asyncio.gather(*asked)] == ["A", "B"]
        assert [backend.stops for backend in stand.backends] == [1, 1]


async def test_a_pool_whose_first_backend_fails_does_not_start(clock: Clock) -> None:
    stand = Stand(clock, *backends(2))
    stand.backends[0].refuse_start = 1
    stand.backends[1].start_seconds = 5.0
    with pytest.raises(TargetError):
        await stand.pool.start()
    assert stand.backends[1].starts == 0


@pytest.mark.parametrize("seed", range(2))
async def test_a_pool_that_changes_all_the_time_loses_nothing(seed: int, clock: Clock) -> None:
    dice = random.Random(seed)
    async with Stand(clock, *backends(4, 0.05), max_batch=4) as stand:
        asked = []

        async def change() -> None:
            while True:
                await asyncio.sleep(dice.uniform(0.0, 0.3))
                await stand.pool.resize(dice.randint(0, 4))

        changing = asyncio.ensure_future(change())
        for number in range(200):
            asked.append(stand.asking(f"text {number}", timeout=30.0))
            await asyncio.sleep(dice.expovariate(60.0))
        await end(changing)
        await stand.pool.resize(4)
        replies = await asyncio.gather(*asked)
        ran = [text for backend in stand.backends for batch in backend.batches for text in batch]
        refused = [reply for reply in replies if reply.failure is not None]
        assert sorted(ran) == sorted({*ran})
        assert len(ran) == len(replies) - len(refused)
        assert {reply.attempts for reply in replies if reply.failure is None} == {1}
        assert len(refused) < len(replies) // 2


async def test_a_supervisor_forgets_a_loop_that_has_ended(clock: Clock) -> None:
    supervisor = Supervisor()
    await supervisor.start("short", lambda: asyncio.sleep(1.0))
    assert not supervisor._tasks
    await supervisor.stop()


HEARD = 1.1
"""Seconds within which a process has heard of a drain."""


async def drain(stand: Stand, name: str) -> None:
    await stand.fleet.drain([Drain(name=name, process=stand.gateway.name, host="here")])


async def workers(stand: Stand) -> dict[str, WorkerInfo]:
    return {worker.worker_id: worker for worker in await stand.broker.workers()}


async def test_a_drained_worker_finishes_its_batch_claims_no_other_and_no_request_fails(clock: Clock) -> None:
    first, second = FakeBackend(1.2), FakeBackend(1.2)
    async with Stand(clock, first, second, max_batch=1, queue_timeout_ms=4000) as stand:
        asked = [stand.asking(f"text {number}") for number in range(4)]
        await asyncio.sleep(0.05)
        assert first.busy and second.busy
        await drain(stand, "gpu-1")
        await asyncio.sleep(HEARD)
        assert second.busy
        one = (await workers(stand))["gpu-1"]
        assert (one.status, one.in_flight) == (WorkerStatus.DRAINED, 1)
        assert one.reason == "by an operator; its batch is still running"
        [capacity] = await stand.fleet.capacities()
        assert (capacity.healthy, capacity.drained) == (1, 1)
        assert [reply.output for reply in await asyncio.gather(*asked)] == [f"TEXT {n}" for n in range(4)]
        assert (len(first.batches), len(second.batches)) == (3, 1)
        one = (await workers(stand))["gpu-1"]
        assert (one.status, one.in_flight, one.reason) == (WorkerStatus.DRAINED, 0, "by an operator")
        await stand.fleet.undrain(["gpu-1"])
        await asyncio.sleep(HEARD)
        assert (await workers(stand))["gpu-1"].status is WorkerStatus.HEALTHY
        await asyncio.gather(*(stand.asking(f"more {number}") for number in range(2)))
        assert len(second.batches) == 2
        _, news = await stand.board.history()
        changes = [one for notice in news.notices for one in notice.changes if one.worker == "gpu-1"]
        [cause] = [one.cause for one in changes if one.status == "drained"]
        assert (
            cause.split(";")[0] == "by an operator"
        )  # Whether its batch was still running depends on when the leader looked.


async def test_a_batch_claimed_as_the_drain_comes_is_given_back_uncharged(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(), FakeBackend()) as stand:
        batcher, claim = stand.pool.batchers[0], stand.pool.batchers[0].claims.claim

        async def slow() -> object:
            claimed = await claim()
            await asyncio.sleep(0.5)
            return claimed

        batcher.claims.claim = slow  # type: ignore[method-assign, assignment]
        asked = [stand.asking(f"text {number}") for number in range(2)]
        await asyncio.sleep(0.1)
        await batcher.hold(True)
        assert [reply.output for reply in await asyncio.gather(*asked)] == ["TEXT 0", "TEXT 1"]
        assert not stand.backends[0].batches


async def test_a_drained_worker_whose_process_ends_starts_none_until_it_is_undrained(clock: Clock) -> None:
    backend = FakeBackend()
    async with Stand(clock, backend, FakeBackend()) as stand:
        await drain(stand, stand.gateway.name)
        await asyncio.sleep(HEARD)
        assert {one.status for one in (await workers(stand)).values()} == {WorkerStatus.DRAINED}
        backend.dead.set()
        await asyncio.sleep(5.0)
        assert (backend.starts, backend.stops) == (1, 1)
        assert (await workers(stand))["gpu-0"].status is WorkerStatus.DRAINED
        await stand.fleet.undrain([stand.gateway.name])
        await asyncio.sleep(HEARD)
        assert backend.starts == 2
        assert (await stand.asking("a")).output == "A"


async def test_a_start_that_goes_on_is_no_reason_to_begin_it_anew(clock: Clock) -> None:
    late = FakeBackend()
    late.start_seconds = 5.0
    async with Stand(clock, FakeBackend(), late, slots=1) as stand:
        await stand.pool.resize(2)
        await asyncio.sleep(1.0)
        await drain(stand, "gpu-1")
        await asyncio.sleep(HEARD)
        assert (await workers(stand))["gpu-1"].reason.startswith("by an operator; has been loading for")
        await stand.fleet.undrain(["gpu-1"])
        await asyncio.sleep(HEARD)
        await drain(stand, "gpu-1")
        await asyncio.sleep(3.0)
        assert (late.starts, late.stops) == (1, 0)
        assert (await workers(stand))["gpu-1"].status is WorkerStatus.DRAINED


async def test_a_restart_ends_the_drain_of_a_process_whatever_becomes_of_the_controller(fleets: Fleets) -> None:
    entrance, gateway = fleets.gateway()
    controller, _ = fleets.controller("control")
    for service in (fleets.worker("stays", FakeBackend()), worker := fleets.worker("host", FakeBackend()), entrance):
        await service.start()
    await controller.start()
    await fleets.fleet.drain([Drain(name="host", process="host", host="here")])
    await asyncio.sleep(HEARD)
    await controller.drain()
    await controller.stop()
    again, _ = fleets.controller("control-2")
    await again.start()
    await asyncio.sleep(30.0)
    assert (await fleets.worker_statuses())["host/gpu-0"] is WorkerStatus.DRAINED
    assert (await asking(gateway, "a")).output == "A"
    await worker.drain()
    await worker.stop()
    await fleets.worker("host", FakeBackend(), pid=2).start()
    await asyncio.sleep(HEARD)
    assert (await fleets.worker_statuses())["host/gpu-0"] is WorkerStatus.HEALTHY
    assert not await fleets.fleet.drains()
