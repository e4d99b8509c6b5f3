"""The admin port in each role and during a broker outage, and the operators' rollouts and drains."""

import asyncio
from collections.abc import Sequence
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.app.process_figures import FigureSource
from headway.core.capacity import STALE_AFTER
from headway.doors.readiness import AGE, ANSWER_WITHIN
from headway.errors import TITLE
from headway.model import LedgerRecord, ProcessInfo, Role, WorkerInfo, WorkerStatus
from tests.core.test_rollout import PLAN
from tests.core.test_versions import worker
from tests.http.away import Away
from tests.http.test_admin import Port, played
from tests.scenes import Played
from tests.services.stand import Stand

LATER = AGE + 0.1
"""After this many seconds, no cached readiness is used."""

ID = "0189f7a4-1111-7222-8333-444455556666"
APART = (Role.GATEWAY, Role.WORKER, Role.CONTROLLER)


@pytest.fixture
def stand() -> Played:
    return Played(lambda test: played(lambda stand, port: test(stand)))


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
async def test_every_role_tells_what_it_is(stand: Stand, role: Role) -> None:
    port = Port(stand, role)
    health = (await port.get("/internal/health")).json
    assert (health["role"], health["id"], health["status"]) == (role.value, stand.gateway.name, "ok")
    assert [worker["worker_id"] for worker in (await port.get("/internal/workers")).json["workers"]] == ["gpu-0"]
    assert (await port.get("/metrics")).status == 200
    for path in ("/livez", "/readyz", "/healthz"):
        assert (await port.get(path)).json == {"status": "ok"}
    stand.membership.leaving = True
    ready = await port.get("/readyz")
    assert (ready.status, ready.json) == (503, {"status": "draining"})
    assert (await port.get("/internal/health")).json["status"] == "draining"
    assert (await port.get("/livez")).status == 200


async def test_whoever_probes_costs_the_broker_two_looks_a_second(stand: Stand) -> None:
    async def workers() -> Sequence[WorkerInfo]:
        await asyncio.sleep(0.1)
        return await stand.broker.workers()

    asked = mock.AsyncMock(side_effect=workers)
    port = Port(stand, Role.GATEWAY, broker=mock.Mock(workers=asked))
    at_once = await asyncio.gather(*(port.get(path) for path in ("/readyz", "/healthz", "/readyz?verbose") * 100))
    assert {answer.status for answer in at_once} == {200}
    assert asked.await_count == 1, "all wait for the same answer"
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() < begun + 10.0:
        assert (await port.get("/readyz")).status == 200
        await asyncio.sleep(0.01)
    assert asked.await_count <= 1 + 10 / AGE
    asked.reset_mock()
    stand.membership.leaving = True
    assert (await port.get("/readyz")).json["status"] == "draining", "at once"
    assert asked.await_count == 1


async def test_each_role_is_ready_by_the_workers_that_it_needs(stand: Stand) -> None:
    """A gateway needs any worker in the fleet, a worker needs its own, and a controller needs none."""
    ports, [backend] = [Port(stand, role) for role in APART], stand.backends

    async def ready(elsewhere: WorkerStatus) -> list[tuple[int, str]]:
        await asyncio.sleep(LATER)
        await stand.broker.heartbeat(WorkerInfo(worker_id="elsewhere/gpu-0", model="m", status=elsewhere))
        answers = [await port.get("/readyz?verbose") for port in ports]
        return [(answer.status, answer.json["checks"].get("workers", "")) for answer in answers]

    own = 200, "1 of 1 healthy"
    gateway, worker, controller = await ready(WorkerStatus.OFFLINE)
    assert (gateway, worker, controller[0]) == (own, own, 200), "one that has left is not missed"
    gateway, worker, controller = await ready(WorkerStatus.DEGRADED)
    assert (gateway, worker, controller[0]) == ((200, "1 of 2 healthy"), own, 200)
    backend.refuse_start = 1000
    backend.dead.set()
    await asyncio.sleep(0.1)
    gateway, worker, controller = await ready(WorkerStatus.OFFLINE)
    assert (gateway[0], worker, controller[0]) == (503, (503, "0 of 1 healthy"), 200)
    assert (await ports[0].get("/internal/health")).json["status"] == "unavailable"
    gateway, worker, controller = await ready(WorkerStatus.HEALTHY)
    assert (gateway, worker, controller[0]) == ((200, "1 of 2 healthy"), (503, "0 of 1 healthy"), 200)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CONTROLLER])
async def test_what_only_a_gateway_can_do_is_told_elsewhere(stand: Stand, role: Role) -> None:
    port = Port(stand, role)
    for method, path in (("GET", "/internal/requests/req_x"), ("POST", "/internal/dlq/req_x/replay")):
        refused = await port.ask(method, path)
        assert (refused.status, refused.json["error"]) == (404, "NOT_FOUND")
        assert refused.json["detail"].startswith(f"a {role.value} ")
        assert "gateway" in refused.json["detail"]


FAILURE = LedgerRecord(
    id=ID, user="ada", tenant="acme", tier="free", model="m", status="failed", created_at=1.0, completed_at=2.0,
    latency_ms=1000.0, error="RATE_LIMITED",
)  # fmt: skip


@pytest.mark.parametrize("broker", ["there", "refuses", "hangs"])
async def test_the_ledger_tells_how_a_request_failed_with_or_without_the_broker(stand: Stand, broker: str) -> None:
    how, tenant = ({}, "") if broker == "there" else ({"broker": Away(stand, broker == "hangs")}, "?tenant=acme")
    port = Port(stand, Role.CONTROLLER, ledger=mock.AsyncMock(find=mock.AsyncMock(return_value=[FAILURE])), **how)
    shown = (await port.get(f"/internal/requests/{ID}{tenant}")).json
    assert (shown["status"], shown["tenant"]) == ("failed", "acme")
    assert shown["error"] == {"error": "RATE_LIMITED", "message": TITLE["RATE_LIMITED"]}


async def test_a_ledger_that_hangs_is_not_waited_for(stand: Stand) -> None:
    port = Port(stand, Role.CONTROLLER, ledger=Away(stand, hangs=True))
    async with asyncio.timeout(2 * ANSWER_WITHIN):
        refused = await port.get(f"/internal/requests/{ID}")
    assert refused.status == 503
    assert "did not respond within 800 ms" in refused.json["detail"]
    assert (refused.headers["retry-after"], refused.headers["x-headway-dropped-reason"]) == ("1", "ledger")


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("role", APART)
async def test_without_the_broker_every_route_answers(stand: Stand, role: Role, hangs: bool) -> None:
    port = Port(stand, role, broker=Away(stand, hangs))
    loop = asyncio.get_running_loop()
    reason = "did not answer within 800 ms" if hangs else "connection refused"
    assert (await port.get("/livez")).status == 200
    ready = await port.get("/readyz?verbose")
    assert (ready.status, ready.json["status"]) == (503, "unavailable")
    assert ready.json["checks"]["broker"] == "out of reach", "the same at the public port"
    health = await port.get("/internal/health")
    assert (health.status, health.json["status"], health.json["role"]) == (503, "unavailable", role.value)
    assert reason in health.json["message"]
    for path in ("/internal/workers", "/internal/fleet", "/internal/snapshot", "/internal/dlq", "/internal/dlq/req_x"):
        begun = loop.time()
        answer = await port.get(path)
        assert loop.time() - begun <= ANSWER_WITHIN + 0.01
        assert (answer.status, answer.json["error"]) == (503, "SERVICE_OVERLOADED"), path
        assert reason in answer.json["detail"]
        assert (answer.headers["retry-after"], answer.headers["x-headway-dropped-reason"]) == ("1", "broker")
    scrape = await port.get("/metrics")
    assert (scrape.status, scrape.headers["content-type"].split("; ")[:2]) == (200, ["text/plain", "version=0.0.4"])
    families = {family.name: family for family in text_string_to_metric_families(scrape.body.decode())}
    assert [sample.value for sample in families["headway_broker_up"].samples] == [0]
    stand.membership.leaving = True
    assert (await port.get("/readyz")).json["status"] == "draining"


async def test_while_the_broker_is_away_the_fleet_is_told_as_it_was(stand: Stand) -> None:
    broker = Away(stand)
    broker.back.set()
    port = Port(stand, broker=broker)
    await asyncio.sleep(1.5)  # Until the controller has published the capacities.
    fresh = (await port.get("/internal/snapshot")).json
    broker.back.clear()
    await asyncio.sleep(7.0)
    stale = (await port.get("/internal/snapshot")).json
    assert [(told["age_seconds"], told["away"]) for told in (fresh, stale)] == [(0.0, ""), (7.0, "connection refused")]
    assert stale["workers"] == fresh["workers"]
    assert stale["now"] == pytest.approx(fresh["now"] + 7.0)
    for lines in ("members", "capacities"):
        then, now = ([one["age_seconds"] for one in told[lines]] for told in (fresh, stale))
        assert then and now == pytest.approx([age + 7.0 for age in then])
    checks = (await port.get("/readyz?verbose")).json["checks"]
    assert checks["workers"] == "unknown; 1 of 1 healthy 7 s ago", "nobody has asked for health before"


async def test_stores_that_are_away_are_told_also_where_nobody_asks(stand: Stand, port: Port) -> None:
    figures = FigureSource(settings=stand.settings, models=list, leaving=lambda: False)
    asked = Port(stand, troubles=figures.troubles)
    figures.counters.store.keys_age = 1.0
    assert (await asked.get("/internal/health")).json["status"] == "ok"
    figures.counters.store.keys_age = 33.0
    shown = (await asked.get("/internal/health")).json
    assert (shown["status"], shown["keys"]) == ("degraded", "as of 33 s ago, because their store does not answer")
    assert not {"ledger", "bulk_folder"} & shown.keys()
    ready = await asked.get("/readyz?verbose")
    assert (ready.status, ready.json["status"]) == (200, "ok"), "requests are answered"
    assert ready.json["checks"]["keys"] == shown["keys"]


async def test_a_leader_that_was_killed_leads_no_more_once_another_does(stand: Stand, port: Port) -> None:
    await stand.fleet.heartbeat(ProcessInfo(id="killed", role=Role.CONTROLLER, host="far", pid=7, leads=True))
    await asyncio.sleep(4.0)
    for path in ("/internal/fleet", "/internal/snapshot"):
        members = (await port.get(path)).json["members"]
        assert len(members) == 2
        assert [one["id"] for one in members if one["leads"]] == [stand.gateway.name]


START = "/internal/rollouts/start?model=m&version=4&steps=1,100&every=60"
DRAIN, UNDRAIN = "/internal/drains/start", "/internal/drains/end"


async def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(stand: Stand, port: Port) -> None:
    async def refused(target: str) -> tuple[int, str]:
        answer = await port.ask("POST", target)
        return answer.status, answer.json["message"]

    await asyncio.sleep(1.0)
    assert await refused("/internal/rollouts/start?model=m") == (400, "version is missing in the query")
    assert await refused(f"{START}&slower=x") == (400, "slower: 'x' is not a number")
    assert (await refused(START))[0] == 404
    assert await refused("/internal/rollouts/abort?model=m") == (404, "model 'm' has had no rollout")
    missing = 400, "the query lacks a name: that of a worker, a process or a host"
    assert await refused(DRAIN) == await refused(UNDRAIN) == missing
    unknown = "no worker, process or host 'gpu-1' is in the fleet; similar names are gpu-0"
    assert await refused(f"{DRAIN}?name=gpu-1") == (404, unknown)
    assert await refused(f"{UNDRAIN}?name=gpu-0") == (404, "nothing named 'gpu-0' is drained")
    for version in ("3", "4"):
        await stand.broker.heartbeat(worker(version, WorkerStatus.COLD))
    assert (await port.ask("POST", START)).json["beside"] == "3"
    assert [one["percent"] for one in (await port.get("/internal/rollouts")).json["rollouts"]] == [1.0]
    await stand.controller.stop()
    await asyncio.sleep(STALE_AFTER)
    none = "rollouts need a leading controller, and there is none; start `headway controller`"
    assert await refused(START) == (400, none)


async def test_an_order_that_loses_to_another_one_is_tried_again(
    stand: Stand, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("3", "4"):
        await stand.broker.heartbeat(worker(version, WorkerStatus.COLD))
    await stand.fleet.keep_rollout(PLAN)
    keep = mock.AsyncMock(wraps=stand.fleet.keep_rollout, side_effect=[False, False, mock.DEFAULT])
    monkeypatch.setattr(stand.fleet, "keep_rollout", keep)
    assert (await port.ask("POST", "/internal/rollouts/promote?model=m")).json["state"] == "promoted"
    keep.side_effect = [False] * 99
    assert (await port.ask("POST", "/internal/rollouts/abort?model=m")).status == 503


async def test_a_worker_is_drained_listed_and_undrained(stand: Stand, port: Port) -> None:
    bare = await port.ask("POST", f"{DRAIN}?name=gpu-0")
    assert bare.status == 400
    assert bare.json["message"].startswith("model m would have no healthy worker left")
    begun = await port.ask("POST", f"{DRAIN}?name=gpu-0&force=true")
    process = stand.gateway.name
    line = {"name": "gpu-0", "process": process, "host": "here", "workers": ["gpu-0"]}
    assert (begun.status, begun.json) == (200, {"drains": [line]})
    assert (await port.get("/internal/drains")).json == {"drains": [line]}
    await asyncio.sleep(1.6)
    [worker] = (await port.get("/internal/workers")).json["workers"]
    assert (worker["status"], worker["reason"]) == ("drained", "by an operator")
    [capacity] = (await port.get("/internal/fleet")).json["capacities"]
    assert (capacity["healthy"], capacity["drained"]) == (0, 1)
    verbose = await port.get("/readyz?verbose")
    assert (verbose.status, verbose.json["checks"]["workers"]) == (503, "0 of 1 healthy, 1 drained")
    assert (await port.ask("POST", f"{UNDRAIN}?name=here")).json == {"drains": [line]}
    await asyncio.sleep(1.6)
    assert (await port.get("/readyz")).status == 200
