"""Whether a gateway should get traffic while its broker is unreachable."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headway.doors.readiness import CachedReadiness, Readiness
from headway.gateway.fleet_watchers import WorkersWatcher
from headway.model import WorkerInfo, WorkerStatus
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.fleet import Fleet
from tests.services.site import memory_broker
from tests.services.troubled import Connection
from tests.virtual_time import Clock


def readiness(fleet: Fleet, *, leaving: bool = False) -> Readiness:
    direct = fleet.direct.broker if fleet.direct is not None else None
    gateway = fleet.gateway
    return Readiness(
        Connection(fleet.server), lambda: leaving, direct=direct, holding=lambda: gateway.holding, clock=fleet.clock
    )


@pytest.mark.parametrize("mode", ["refuse", "stall"])
async def test_a_gateway_is_ready_as_long_as_it_would_hold_a_request(mode: str, fleet: Fleet, clock: Clock) -> None:
    ready, patience = readiness(fleet), fleet.settings.broker_timeout_ms / 1000
    assert (await ready.look())[0] == "ok"
    await fleet.server.become(mode)
    fleet.ask("held", timeout=30.0)
    begun = clock()
    while fleet.gateway.holding:
        word, checks = await ready.look()
        if fleet.gateway.holding:
            assert (word, checks["broker"]) == ("degraded", "out of reach")
            assert checks["workers"] == f"unknown; 1 of 1 healthy {clock() - begun:.0f} s ago"
            assert await ready.alone() == "degraded"
        await asyncio.sleep(0.05)
    assert clock() - begun > patience - 0.01
    assert (await ready.look())[0] == await ready.alone() == "unavailable"
    await fleet.server.become("fine")
    await asyncio.sleep(1.0)
    assert (await ready.look())[0] == "ok"


@pytest.mark.parametrize(
    ("workers", "leaving", "before", "held"),
    [(1, False, "ok", "degraded"), (0, False, "unavailable", "unavailable"), (1, True, "draining", "draining")],
    ids=["with a worker", "without one", "on its way out"],
)
async def test_a_gateway_that_holds_requests_is_ready_with_workers_that_any_route_was_told_of(
    workers: int, leaving: bool, before: str, held: str, clock: Clock
) -> None:
    async with Fleet(clock, *(FakeBackend(0.1) for _ in range(workers))) as fleet:
        ready = readiness(fleet, leaving=leaving)
        assert await ready.judge(await fleet.server.inner.workers()) == before
        await fleet.server.become("refuse")
        assert fleet.gateway.holding
        assert (await ready.look())[0] == await ready.alone() == held


@pytest.mark.fleet(fallback=0.1)
async def test_what_has_not_heard_of_a_worker_says_that_it_knows_of_none(fleet: Fleet) -> None:
    ready = readiness(fleet)
    await fleet.server.become("refuse")
    await asyncio.sleep(1.0)  # The fallback is warm by now.
    _, checks = await ready.look()
    assert (checks["workers"], checks["fallback"]) == ("unknown", "1 of 1 healthy")


async def test_workers_that_came_after_the_last_look_are_told_of_with_the_age_of_what_is_known(fleet: Fleet) -> None:
    ready = readiness(fleet)
    ready.learn(())  # As on startup, before there are any workers.
    watcher = WorkersWatcher([ready], Connection(fleet.server), fleet.clock)
    supervisor = Supervisor()
    watcher.start(supervisor)
    await asyncio.sleep(200.0)
    await fleet.server.become("refuse")
    await asyncio.sleep(12.0)
    _, checks = await ready.look()
    assert checks["workers"] == "unknown; 1 of 1 healthy 12 s ago"
    await supervisor.stop()


@pytest.mark.parametrize("fallback", [False, True], ids=["alone", "with a fallback"])
async def test_a_gateway_is_ok_once_requests_go_to_the_broker(fallback: bool, clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(0.1), fallback=FakeBackend(0.1) if fallback else None) as fleet:
        ready = readiness(fleet)
        glance = CachedReadiness(ready)
        assert (await glance.take())[0] == "ok"
        await fleet.server.become("refuse")
        fleet.ask("held")
        await asyncio.sleep(1.2)
        assert not fleet.gateway.holding
        meanwhile = "degraded" if fallback else "unavailable"
        assert (await glance.take())[0] == meanwhile
        await fleet.server.become("fine")
        word, checks = await ready.look()
        assert (word, checks["workers"], checks["broker"]) == (
            meanwhile, "1 of 1 healthy", "answers, but is not used yet",
        )  # fmt: skip
        assert await ready.judge(await fleet.server.inner.workers()) == meanwhile
        while ready.passed_by:
            assert (await glance.take())[0] == meanwhile
            await asyncio.sleep(0.01)
        assert (await glance.take())[0] == "ok"


async def test_a_gateway_with_fewer_workers_than_expected_is_degraded_and_says_how_many(clock: Clock) -> None:
    broker = memory_broker(clock)
    ready = Readiness(broker, lambda: False, expected=2)
    nobody = {"workers": "none has come yet", "expected_workers": 2, "draining": False}
    assert await ready.look() == ("unavailable", nobody)
    for worker, word, count in (("a", "degraded", 1), ("b", "ok", 2)):
        await broker.heartbeat(WorkerInfo(worker_id=worker, model="m", status=WorkerStatus.HEALTHY))
        checks = {"workers": f"{count} of {count} healthy", "expected_workers": 2, "draining": False}
        assert await ready.look() == (word, checks)


async def test_a_gateway_whose_workers_are_all_short_of_memory_is_ready_as_they_work_on(clock: Clock) -> None:
    broker = memory_broker(clock)
    ready = Readiness(broker, lambda: False)
    resting = WorkerInfo(worker_id="a", model="m", status=WorkerStatus.DEGRADED, reason="rests")
    await broker.heartbeat(resting)
    assert (await ready.look())[0] == "unavailable"
    await broker.heartbeat(replace(resting, scarce=True))
    assert await ready.look() == ("degraded", {"workers": "0 of 1 healthy", "draining": False})
    await broker.heartbeat(replace(resting, status=WorkerStatus.OFFLINE, scarce=True))
    assert (await ready.look())[0] == "unavailable"


async def test_what_is_ready_has_told_of_the_workers_that_it_saw(clock: Clock) -> None:
    """While the versions are unknown, a request waits in a different queue than it would a moment later."""
    broker = memory_broker(clock)
    told: list[list[str]] = []

    class Learns:
        def learn(self, workers: Sequence[WorkerInfo]) -> None:
            told.append([one.worker_id for one in workers])

    ready = Readiness(broker, lambda: False, learners=[Learns()])
    assert (await ready.look())[0] == "unavailable"
    await broker.heartbeat(WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY))
    assert (await ready.look())[0] == "ok"
    assert told == [[], ["w"]]
