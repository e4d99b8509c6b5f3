"""Each role as a separate service: how it starts, serves and shuts down."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest
from structlog.testing import capture_logs

from headway.app.lifecycle import CONNECT_WITHIN, Service
from headway.app.process_figures import describe_process
from headway.config import Settings
from headway.errors import BatchTimeout, BrokerUnavailable, SettingError, TargetError, WorkerCrashed
from headway.fleet.membership import Membership
from headway.model import Drain, EndKind, ProcessInfo, Role, WorkerInfo, WorkerStatus
from headway.runtime.race import end
from tests.services.fake_backend import FakeBackend
from tests.services.roles import Fleets, asking
from tests.services.stand import Stand
from tests.virtual_time import Clock


async def ended(*services: Service) -> None:
    """Shut services down gracefully."""
    for service in services:
        await service.drain()
        await service.stop()


class FakeLink:
    """A connection to a broker that is first reachable at attempt number `answers`."""

    def __init__(self, told: list[str], answers: float = 1) -> None:
        self.attempts = 0
        self._told = told
        self._answers = answers

    async def open(self) -> None:
        self.attempts += 1
        if self.attempts < self._answers:
            raise BrokerUnavailable("connection refused.")
        self._told.append("link opens")

    async def close(self) -> None:
        self._told.append("link closes")


async def test_a_gateway_going_down_answers_what_it_holds_before_it_leaves(fleets: Fleets) -> None:
    entrance, gateway = fleets.gateway()
    worker = fleets.worker("host", FakeBackend())
    await worker.start()
    await entrance.start()
    fleets.told.clear()
    asked = [asking(gateway, f"text {n}") for n in range(20)]
    await asyncio.sleep(0.05)
    draining = asyncio.ensure_future(entrance.drain())
    await asyncio.sleep(0.05)
    assert gateway.name in await fleets.members()
    assert fleets.told == ["public drains"]
    replies = await asyncio.gather(*asked)
    await draining
    assert [reply.output for reply in replies] == [f"TEXT {n}" for n in range(20)]
    assert await fleets.members() == ["host"]
    assert fleets.told == ["public drains", "admin drains"]


async def test_a_gateway_serves_on_for_the_lame_duck_period_before_its_port_closes(fleets: Fleets) -> None:
    fleets.settings = dataclasses.replace(fleets.settings, lame_duck_ms=3000)
    entrance, gateway = fleets.gateway()
    worker = fleets.worker("host", FakeBackend())
    await worker.start()
    await entrance.start()
    fleets.told.clear()
    draining = asyncio.ensure_future(entrance.drain())
    await asyncio.sleep(2.9)
    assert fleets.told == ["public retires"]
    assert (await asking(gateway, "late")).output == "LATE"
    await asyncio.sleep(0.2)
    assert fleets.told[1] == "public drains"
    await draining


async def test_a_process_without_clients_does_not_wait_for_balancers(fleets: Fleets) -> None:
    fleets.settings = dataclasses.replace(fleets.settings, lame_duck_ms=600_000)
    worker = fleets.worker("host", FakeBackend())
    await worker.start()
    before = fleets.clock()
    await worker.drain()
    assert fleets.clock() - before < 1


async def test_a_worker_going_down_finishes_its_batch_and_claims_no_more(fleets: Fleets) -> None:
    backends = [FakeBackend(1.0), FakeBackend(1.0)]
    entrance, gateway = fleets.gateway()
    leaver = fleets.worker("leaver", *backends)
    await leaver.start()
    await entrance.start()
    asked = [asking(gateway, f"text {n}") for n in range(20)]
    await asyncio.sleep(0.5)
    running = sum(len(backend.batches[-1]) for backend in backends)
    assert 0 < running < 20
    draining = asyncio.ensure_future(leaver.drain())
    await asyncio.sleep(0.01)
    heir = fleets.worker("heir", FakeBackend(0.1))
    await heir.start()
    await draining
    await leaver.stop()
    replies = await asyncio.gather(*asked)
    assert {reply.output for reply in replies} == {f"TEXT {n}" for n in range(20)}
    assert sum(len(batch) for backend in backends for batch in backend.batches) == running
    assert {reply.attempts for reply in replies} == {1}
    assert await fleets.worker_statuses() == {
        "leaver/gpu-0": WorkerStatus.OFFLINE,
        "leaver/gpu-1": WorkerStatus.OFFLINE,
        "heir/gpu-0": WorkerStatus.HEALTHY,
    }
    assert backends[0].stops >= 1


async def test_who_ends_at_once_gives_back_its_batch_and_its_lead_and_leaves_the_fleet(fleets: Fleets) -> None:
    """This is what happens after a second signal."""
    entrance, gateway = fleets.gateway()
    leaver = fleets.worker("leaver", FakeBackend(3.0))
    leading, _ = fleets.controller("one")
    following, two = fleets.controller("two")
    for service in (leaver, entrance, leading, following):
        await service.start()
    asked = asking(gateway, "text")
    await asyncio.sleep(0.5)
    heir = fleets.worker("heir", FakeBackend(0.1))
    await heir.start()
    begun = fleets.clock()
    for service in (leaver, leading):
        await service.stop()
    assert await fleets.members() == sorted((gateway.name, "heir", "two"))
    assert (await asked).output == "TEXT"
    assert fleets.clock() - begun < 1.0
    await asyncio.sleep(1.5)
    assert two.leads


async def test_a_slot_goes_offline_as_soon_as_its_own_batch_is_done(fleets: Fleets) -> None:
    entrance, gateway = fleets.gateway()
    worker = fleets.worker("host", FakeBackend(0.1), FakeBackend(3.0))
    await worker.start()
    await entrance.start()
    asked = [asking(gateway, f"text {n}") for n in range(16)]
    await asyncio.sleep(0.05)
    draining = asyncio.ensure_future(worker.drain())
    await asyncio.sleep(1.5)
    statuses = await fleets.worker_statuses()
    assert statuses == {"host/gpu-0": WorkerStatus.OFFLINE, "host/gpu-1": WorkerStatus.HEALTHY}
    await draining
    assert set((await fleets.worker_statuses()).values()) == {WorkerStatus.OFFLINE}
    await end(*asked)


async def test_the_link_is_opened_first_and_closed_last(fleets: Fleets) -> None:
    service, _ = fleets.gateway(FakeLink(fleets.told))
    await service.start()
    assert fleets.told == ["public binds", "admin binds", "admin opens", "link opens", "public opens"]
    fleets.told.clear()
    await ended(service)
    assert fleets.told == ["public drains", "admin drains", "public closes", "admin closes", "link closes"]


async def test_a_broker_that_is_late_is_waited_for(fleets: Fleets) -> None:
    connection = FakeLink(fleets.told, answers=10)
    service = fleets.worker("host", FakeBackend(), connection=connection)
    with capture_logs() as logs:
        await service.start()
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["the broker does not answer yet"]
    assert connection.attempts == 10


async def test_a_broker_that_does_not_come_is_given_up(fleets: Fleets) -> None:
    backend = FakeBackend()
    service = fleets.worker("host", backend, connection=FakeLink(fleets.told, answers=1e9))
    begun = fleets.clock()
    with pytest.raises(
        BrokerUnavailable, match=r"^connection refused; given up after 30 s\. Start the broker, or name"
    ):
        await service.start()
    assert fleets.clock() - begun == pytest.approx(CONNECT_WITHIN, abs=1.0)
    assert backend.starts == 0
    assert fleets.told == ["admin binds", "admin opens", "admin closes", "link closes"]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (("host", "host"), r"^name = 'host': is in use: by process 1 on here\. Give each"),
        (("host-1", "host-2"), r"is in use: a worker host/gpu-0 already exists\."),
    ],
)
async def test_processes_and_their_slots_have_names_of_their_own(
    ids: tuple[str, str], told: str, fleets: Fleets
) -> None:
    """In two `serve` processes, slots are named after the gateway of their process."""
    first = fleets.worker("host", FakeBackend(), pid=1, id=ids[0])
    await first.start()
    backend = FakeBackend()
    second = fleets.worker("host", backend, FakeBackend(), pid=2, id=ids[1])
    with pytest.raises(SettingError, match=told):
        await second.start()
    assert backend.starts == 0
    assert await fleets.worker_statuses() == {"host/gpu-0": WorkerStatus.HEALTHY}
    assert await fleets.members() == [ids[0]]
    await ended(first)
    await fleets.worker("host", FakeBackend(), pid=3, id=ids[0]).start()


async def test_a_slot_on_which_nothing_is_loaded_keeps_its_name_for_nobody(fleets: Fleets) -> None:
    left = WorkerInfo(worker_id="host/gpu-0", model="m", status=WorkerStatus.COLD)
    await fleets.broker.heartbeat(left)
    anew = fleets.worker("host", FakeBackend())
    await anew.start()
    assert await fleets.worker_statuses() == {"host/gpu-0": WorkerStatus.HEALTHY}


async def test_the_name_of_a_process_that_was_killed_is_free_in_a_while(fleets: Fleets) -> None:
    await fleets.fleet.heartbeat(ProcessInfo(id="host", role=Role.WORKER, host="here", pid=7))
    heir = fleets.worker("host", FakeBackend(), pid=8)
    begun = fleets.clock()
    await heir.start()
    assert fleets.clock() - begun == pytest.approx(10.5, abs=1.0)


async def test_a_stop_waits_once_for_slots_and_for_itself(monkeypatch: pytest.MonkeyPatch, fleets: Fleets) -> None:
    service = fleets.worker("host", FakeBackend())
    await service.start()
    await asyncio.sleep(0.1)
    told: list[str] = []

    async def silent(*said: object) -> None:
        told.append(str(said[0].status) if isinstance(said[0], WorkerInfo) else str(said[0]))
        await asyncio.sleep(1.0)
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(fleets.broker, "heartbeat", silent)
    monkeypatch.setattr(fleets.fleet, "leave", silent)
    begun = fleets.clock()
    await service.drain()
    await service.stop()
    assert told.count("host") == 1
    assert fleets.clock() - begun == pytest.approx(2.0), "one call for the slot, and one for the process"


async def test_a_setting_that_differs_between_processes_is_told_by_the_later(fleets: Fleets) -> None:
    async def told(id: str, **shared: str) -> list[tuple[str, str, str, str]]:
        member = ProcessInfo(id=id, role=Role.WORKER, host="here", pid=1, shared=shared)
        with capture_logs() as logs:
            await Membership(fleets.fleet, lambda: member, fleets.clock, fleets.broker).enter()
        assert all(line["log_level"] == "warning" for line in logs)
        return [(line["setting"], line["here"], line["there"], line["process"]) for line in logs]

    assert await told("of an earlier version") == []
    assert await told("first", shards="16", tiers="a,b") == []
    assert await told("second", shards="16", tiers="a,b") == []
    assert await told("odd", shards="1", tiers="a,b") == [("shards", "1", "16", "first")]
    assert await told("last", shards="16", tiers="a") == [("tiers", "a", "a,b", "first"), ("shards", "16", "1", "odd")]


async def test_a_cache_at_the_workers_alone_is_told_by_whoever_comes_later(fleets: Fleets) -> None:
    async def told(id: str, role: Role, **settings: Any) -> list[tuple[str, str, str]]:
        member = describe_process(Settings(**settings), role, id, None, None, 0, {}, 1.0)
        with capture_logs() as logs:
            await Membership(fleets.fleet, lambda: member, fleets.clock, fleets.broker).enter()
        return [(line["setting"], line["here"], line["there"]) for line in logs]

    assert await told("gateway", Role.GATEWAY, collapse=True) == []
    assert await told("controller", Role.CONTROLLER, cache=True) == []
    assert await told("without", Role.WORKER) == []
    assert await told("other", Role.WORKER, model="other", cache=True) == []
    assert await told("with", Role.WORKER, cache=True, collapse=True) == [("cache of model default", "on", "off")]
    assert await told("late", Role.GATEWAY, collapse=True) == [("cache of model default", "off", "on")]


async def test_a_taken_port_is_found_before_anything_loads(fleets: Fleets) -> None:
    backend = FakeBackend()
    service = fleets.worker("host", backend)

    async def taken() -> None:
        raise SettingError("admin_port", 9000, "is taken by another program", "Stop it.")

    service._others[0].bind = taken  # type: ignore[method-assign]
    with pytest.raises(SettingError, match="taken by another"):
        await service.start()
    assert backend.starts == 0
    assert fleets.told == ["admin closes"]


async def endings(fleets: Fleets) -> dict[str, tuple[EndKind, str]]:
    return {one.id: (one.ending, one.reason) for one in await fleets.fleet.departed()}


async def test_a_process_that_says_goodbye_says_why_and_whether_it_was_drained(fleets: Fleets) -> None:
    told, drained = fleets.worker("told", FakeBackend()), fleets.worker("drained", FakeBackend(), FakeBackend())
    for service in (told, drained):
        await service.start()
    await fleets.fleet.drain([Drain(name=f"drained/gpu-{n}", process="drained", host="here") for n in range(2)])
    await asyncio.sleep(1.1)
    for service in (told, drained):
        service.ends("told to by SIGTERM")
        await service.drain()
        await service.stop()
    assert await endings(fleets) == {
        "told": (EndKind.STOPPED, "told to by SIGTERM"),
        "drained": (EndKind.DRAINED, "told to by SIGTERM"),
    }
    assert not await fleets.fleet.drains()


async def test_a_process_that_does_not_start_says_why(fleets: Fleets) -> None:
    broken = FakeBackend()
    broken.refuse_start, broken.refusal = 9, TargetError("no module named torch")
    worker = fleets.worker("broken", broken)
    with contextlib.suppress(TargetError):
        await worker.start()
    assert await endings(fleets) == {"broken": (EndKind.STOPPED, "did not start: no module named torch")}


async def test_a_worker_whose_process_is_killed_is_told_with_the_reason(clock: Clock) -> None:
    fates = [BatchTimeout("worker gpu-0: its batch took longer than 3 s; it was killed", "late")]
    slow = FakeBackend(script=lambda entries: fates.pop() if fates else None)
    crash = FakeBackend(script=lambda entries: WorkerCrashed("worker gpu-1 died of SIGKILL", "died"))
    async with Stand(clock, slow, crash, slots=1) as stand:
        await stand.asking("a")
        await asyncio.sleep(1.1)
        [gone] = await stand.fleet.departed()
        assert (gone.id, gone.ending) == ("gpu-0", EndKind.KILLED)
        assert gone.reason == "worker gpu-0: its batch took longer than 3 s; it was killed"
