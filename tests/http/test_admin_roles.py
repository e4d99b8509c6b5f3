"""The admin port of each role, and while the broker is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.app.process_figures import FigureSource
from headway.doors.readiness import AGE, ANSWER_WITHIN
from headway.errors import TITLE, BrokerUnavailable
from headway.model import LedgerRecord, ProcessInfo, Role, WorkerInfo, WorkerStatus
from headway.ports import Broker
from tests.http.away import Away
from tests.http.test_admin import Port, Touchy, on_admin, played
from tests.services.stand import Stand

LATER = AGE + 0.1
"""Seconds after which nobody is told of what was before."""

ID = "0189f7a4-1111-7222-8333-444455556666"
APART = (Role.GATEWAY, Role.WORKER, Role.CONTROLLER)


class Unreachable:
    """A broker, keeper of letters and fleet that does not answer: at once, or never."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any) -> Any:
            if self._hangs:
                await asyncio.Event().wait()
            raise BrokerUnavailable("the broker at redis://there does not answer: connection refused")

        return call


def other(status: WorkerStatus, name: str = "elsewhere/gpu-0") -> WorkerInfo:
    return WorkerInfo(worker_id=name, model="m", status=status)


@on_admin()
async def test_the_fleet_is_shown(stand: Stand, port: Port) -> None:
    await stand.fleet.heartbeat(ProcessInfo(id="host", role=Role.WORKER, host="far", pid=7, version="2"))
    asked = [stand.asking(f"text {n}") for n in range(20)]
    await asyncio.sleep(1.5)
    await asyncio.gather(*asked)
    shown = (await port.get("/internal/fleet")).json
    assert shown["id"] == stand.gateway.name
    worker, own = sorted(shown["members"], key=lambda member: str(member["host"]))
    assert worker["age_seconds"] == pytest.approx(1.5, abs=0.01)
    assert own["age_seconds"] < 1.0
    assert {**worker, "age_seconds": 0} == {
        "id": "host", "role": "worker", "host": "far", "pid": 7, "admin": "", "version": "2",
        "pending": 0, "requests_per_second": 0.0, "leads": False, "age_seconds": 0,
    }  # fmt: skip
    assert (own["role"], own["leads"]) == ("serve", True)
    [capacity] = shown["capacities"]
    assert (capacity["model"], capacity["healthy"], capacity["degraded"]) == ("m", 1, 0)
    assert capacity["items_per_second"] == pytest.approx(80.0, rel=0.1)
    assert capacity["estimated"] is True
    assert capacity["usable_per_second"] == pytest.approx(0.7 * capacity["items_per_second"], abs=0.01)
    assert 0.0 <= capacity["age_seconds"] < 1.0


@pytest.mark.parametrize("role", APART)
@on_admin()
async def test_every_role_tells_what_it_is(stand: Stand, _: Port, role: Role) -> None:
    port = Port(stand, role)
    health = (await port.get("/internal/health")).json
    assert (health["role"], health["id"], health["status"]) == (role.value, stand.gateway.name, "ok")
    assert [worker["worker_id"] for worker in (await port.get("/internal/workers")).json["workers"]] == ["gpu-0"]
    assert (await port.get("/metrics")).status == 200
    for path in ("/livez", "/readyz", "/healthz"):
        assert (await port.get(path)).json == {"status": "ok"}
    stand.membership.leaving = True
    assert (await port.get("/readyz")).json == {"status": "draining"}
    assert (await port.get("/livez")).status == 200


class Counted:
    """A broker that counts how often it is asked for its workers, and takes a while for it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.asked = 0

    async def workers(self) -> Sequence[WorkerInfo]:
        self.asked += 1
        await asyncio.sleep(0.1)
        return await self._broker.workers()


@on_admin()
async def test_whoever_probes_costs_the_broker_two_looks_a_second(stand: Stand, _: Port) -> None:
    broker = Counted(stand.broker)
    port = Port(stand, Role.GATEWAY, broker=broker)
    at_once = await asyncio.gather(*(port.get(path) for path in ("/readyz", "/healthz", "/readyz?verbose") * 100))
    assert {answer.status for answer in at_once} == {200}
    assert broker.asked == 1, "all wait for the same answer"
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() < begun + 10.0:
        assert (await port.get("/readyz")).status == 200
        await asyncio.sleep(0.01)
    asked = broker.asked
    assert asked <= 1 + 10 / AGE
    stand.membership.leaving = True
    assert (await port.get("/readyz")).json["status"] == "draining", "at once"
    assert broker.asked == asked + 1


def test_a_gateway_is_ready_when_it_knows_of_a_healthy_worker_anywhere() -> None:
    backend = Touchy()

    async def scene(stand: Stand, _: Port) -> None:
        port = Port(stand, Role.GATEWAY)
        backend.refuse_start = 1000
        backend.dead.set()
        await asyncio.sleep(0.1)
        assert (await port.get("/readyz")).status == 503
        await asyncio.sleep(LATER)
        await stand.broker.heartbeat(other(WorkerStatus.HEALTHY))
        ready = await port.get("/readyz?verbose")
        assert (ready.status, ready.json["status"]) == (200, "degraded")
        assert ready.json["checks"]["workers"] == "1 of 2 healthy"

    played(scene, backend=backend)


@on_admin()
async def test_a_worker_elsewhere_that_has_left_is_not_missed(stand: Stand, _: Port) -> None:
    await stand.broker.heartbeat(other(WorkerStatus.OFFLINE))
    assert (await Port(stand, Role.GATEWAY).get("/readyz?verbose")).json["status"] == "ok"
    await stand.broker.heartbeat(other(WorkerStatus.DEGRADED))
    assert (await Port(stand, Role.GATEWAY).get("/readyz?verbose")).json["status"] == "degraded"


def test_a_worker_is_ready_by_its_own_slots() -> None:
    backend = Touchy()

    async def scene(stand: Stand, _: Port) -> None:
        port = Port(stand, Role.WORKER)
        await stand.broker.heartbeat(other(WorkerStatus.OFFLINE))
        assert (await port.get("/readyz?verbose")).json["checks"]["workers"] == "1 of 1 healthy"
        await stand.broker.heartbeat(other(WorkerStatus.HEALTHY))
        backend.refuse_start = 1000
        backend.dead.set()
        await asyncio.sleep(LATER)
        ready = await port.get("/readyz?verbose")
        assert (ready.status, ready.json["checks"]["workers"]) == (503, "0 of 1 healthy")

    played(scene, backend=backend)


def test_a_controller_is_ready_without_any_worker() -> None:
    backend = Touchy()

    async def scene(stand: Stand, _: Port) -> None:
        backend.refuse_start = 1000
        backend.dead.set()
        await asyncio.sleep(0.1)
        assert (await Port(stand, Role.CONTROLLER).get("/readyz")).json == {"status": "ok"}

    played(scene, backend=backend)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CONTROLLER])
@on_admin()
async def test_what_only_a_gateway_can_do_is_told_elsewhere(stand: Stand, _: Port, role: Role) -> None:
    port = Port(stand, role)
    for method, path in (("GET", "/internal/requests/req_x"), ("POST", "/internal/dlq/req_x/replay")):
        refused = await port.ask(method, path)
        assert (refused.status, refused.json["error"]) == (404, "NOT_FOUND")
        assert refused.json["detail"].startswith(f"a {role.value} ")
        assert "gateway" in refused.json["detail"]


class Recorded:
    """A ledger that holds one failure, or one that never answers."""

    FAILURE = LedgerRecord(
        id=ID, user="ada", tenant="acme", tier="free", model="m", status="failed", created_at=1.0, completed_at=2.0,
        latency_ms=1000.0, error="RATE_LIMITED",
    )  # fmt: skip

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        if self._hangs:
            await asyncio.Event().wait()
        return [self.FAILURE] if id == ID else []


@on_admin()
async def test_the_ledger_tells_how_a_request_failed(stand: Stand, _: Port) -> None:
    shown = (await Port(stand, Role.CONTROLLER, ledger=Recorded(hangs=False)).get(f"/internal/requests/{ID}")).json
    assert (shown["status"], shown["tenant"]) == ("failed", "acme")
    assert shown["error"] == {"error": "RATE_LIMITED", "message": TITLE["RATE_LIMITED"]}


@pytest.mark.parametrize("hangs", [False, True])
@on_admin()
async def test_the_ledger_is_asked_for_a_tenants_request_although_the_broker_is_away(
    stand: Stand, _: Port, hangs: bool
) -> None:
    port = Port(stand, Role.CONTROLLER, broker=Unreachable(hangs), ledger=Recorded(hangs=False))
    shown = await port.get(f"/internal/requests/{ID}?tenant=acme")
    assert (shown.status, shown.json["status"]) == (200, "failed")


@on_admin()
async def test_a_ledger_that_hangs_is_not_waited_for(stand: Stand, _: Port) -> None:
    port = Port(stand, Role.CONTROLLER, ledger=Recorded(hangs=True))
    async with asyncio.timeout(2 * ANSWER_WITHIN):
        refused = await port.get(f"/internal/requests/{ID}")
    assert refused.status == 503
    assert "did not answer within 800 ms" in refused.json["detail"]
    assert (refused.headers["retry-after"], refused.headers["x-headway-dropped-reason"]) == ("1", "ledger")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("role", APART)
@on_admin()
async def test_without_the_broker_every_route_answers(stand: Stand, _: Port, role: Role, hangs: bool) -> None:
    port = Port(stand, role, broker=Unreachable(hangs))
    loop = asyncio.get_running_loop()
    reason = "did not answer within 800 ms" if hangs else "connection refused"
    assert (await port.get("/livez")).status == 200
    ready = await port.get("/readyz?verbose")
    assert (ready.status, ready.json["status"]) == (503, "unavailable")
    assert ready.json["checks"]["broker"] == "out of reach", "the same at the public port"
    health = await port.get("/internal/health")
    assert (health.status, health.json["status"], health.json["role"]) == (503, "unavailable", role.value)
    assert reason in health.json["message"]
    for path in (
        "/internal/workers",
        "/internal/fleet",
        "/internal/snapshot",
        "/internal/dlq",
        "/internal/dlq/req_x",
    ):
        begun = loop.time()
        answer = await port.get(path)
        assert loop.time() - begun <= ANSWER_WITHIN + 0.01
        assert (answer.status, answer.json["error"]) == (503, "SERVICE_OVERLOADED"), path
        assert reason in answer.json["detail"]
        assert (answer.headers["retry-after"], answer.headers["x-headway-dropped-reason"]) == ("1", "broker")
    scrape = await port.get("/metrics")
    assert scrape.status == 200
    families = {family.name: family for family in text_string_to_metric_families(scrape.body.decode())}
    assert [sample.value for sample in families["headway_broker_up"].samples] == [0]
    stand.membership.leaving = True
    assert (await port.get("/readyz")).json["status"] == "draining"


@on_admin()
async def test_while_the_broker_is_away_the_fleet_is_told_as_it_was(stand: Stand, _: Port) -> None:
    broker = Away(stand)
    broker.back.set()
    port = Port(stand, broker=broker)
    await asyncio.sleep(1.5)  # Until the controller has told the capacities.
    fresh = (await port.get("/internal/snapshot")).json
    assert (fresh["age_seconds"], fresh["away"]) == (0.0, "")
    broker.back.clear()
    await asyncio.sleep(7.0)
    stale = await port.get("/internal/snapshot")
    assert (stale.status, stale.json["age_seconds"], stale.json["away"]) == (200, 7.0, "connection refused")
    assert stale.json["workers"] == fresh["workers"]
    assert stale.json["now"] == pytest.approx(fresh["now"] + 7.0)
    for lines in ("members", "capacities"):
        then, now = ([one["age_seconds"] for one in told[lines]] for told in (fresh, stale.json))
        assert then and now == pytest.approx([age + 7.0 for age in then])
    checks = (await port.get("/readyz?verbose")).json["checks"]
    assert checks["workers"] == "unknown; 1 of 1 healthy 7 s ago", "nobody has asked for health before"
    assert (await port.get("/internal/health")).json["message"] == "connection refused"


def test_a_gateway_with_a_fallback_is_ready_without_the_broker() -> None:
    backend = Touchy()

    async def scene(stand: Stand, _: Port) -> None:
        port = Port(stand, Role.GATEWAY, broker=Unreachable(hangs=False), direct=stand.broker)
        for path in ("/readyz", "/internal/health"):
            answer = await port.get(path)
            assert (answer.status, answer.json["status"]) == (200, "degraded")
        backend.refuse_start = 1000
        backend.dead.set()
        await asyncio.sleep(LATER)
        for path in ("/readyz", "/internal/health"):
            answer = await port.get(path)
            assert (answer.status, answer.json["status"]) == (503, "unavailable")

    played(scene, backend=backend)


@on_admin()
async def test_stores_that_are_away_are_told_of_with_what_that_means_also_where_nobody_asks(
    stand: Stand, port: Port
) -> None:
    figures = FigureSource(settings=stand.settings, models=list, leaving=lambda: False)
    asked = Port(stand, troubles=figures.troubles)
    figures.counters.store.keys_age = 1.0
    assert (await asked.get("/internal/health")).json["status"] == "ok"
    figures.counters.store.keys_age = 33.0
    shown = (await asked.get("/internal/health")).json
    assert (shown["status"], shown["keys"]) == ("degraded", "as of 33 s ago, as their store does not answer")
    assert not {"ledger", "bulk_folder"} & shown.keys()
    ready = await asked.get("/readyz?verbose")
    assert (ready.status, ready.json["status"]) == (200, "ok"), "requests are answered"
    assert ready.json["checks"]["keys"] == shown["keys"]


@on_admin()
async def test_a_leader_that_was_killed_leads_no_more_once_another_does(stand: Stand, port: Port) -> None:
    await stand.fleet.heartbeat(ProcessInfo(id="killed", role=Role.CONTROLLER, host="far", pid=7, leads=True))
    await asyncio.sleep(4.0)
    for path in ("/internal/fleet", "/internal/snapshot"):
        members = (await port.get(path)).json["members"]
        assert len(members) == 2
        assert [one["id"] for one in members if one["leads"]] == [stand.gateway.name]
