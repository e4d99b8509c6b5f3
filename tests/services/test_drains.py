"""An operator drains workers while requests flow: none fails, and nothing is claimed until he ends that."""

from __future__ import annotations

import asyncio

from headway.core.health import HEARTBEAT_EVERY
from headway.model import Drain, WorkerInfo, WorkerStatus
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets, asking
from tests.services.stand import Stand
from tests.virtual_time import Clock

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
        assert one.reason == "by an operator; its batch still runs"
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


async def test_a_drain_is_an_event_on_the_board(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(), FakeBackend()) as stand:
        await drain(stand, "gpu-1")
        await asyncio.sleep(3.0)
        _, news = await stand.board.history()
        changes = [one for notice in news.notices for one in notice.changes if one.worker == "gpu-1"]
        assert [(one.status, one.cause) for one in changes][-1] == ("drained", "by an operator")


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


async def test_a_process_that_is_drained_ends_in_order(clock: Clock) -> None:
    async with Stand(clock, FakeBackend()) as stand:
        await drain(stand, "gpu-0")
        await asyncio.sleep(HEARD)
        begun = clock()
        await stand.pool.wind_down()
        assert clock() - begun <= HEARTBEAT_EVERY
        assert (await workers(stand))["gpu-0"].status is WorkerStatus.OFFLINE


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
