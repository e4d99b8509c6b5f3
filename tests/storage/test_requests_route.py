"""`/internal/requests/{id}`: memory first, then the broker, then the ledger."""

import asyncio
import time

from headway.model import InferenceRequest, LedgerRecord, Principal, RequestOptions, Role
from headway.runtime.request_id import new_id
from tests.contracts.test_ledgers import record
from tests.http.test_admin import Port, Touchy, on_admin
from tests.services.stand import Stand
from tests.storage.fake_ledger import FakeLedger

ACME = Principal("alice", "acme", 0)
GLOBEX = Principal("gustav", "globex", 1)


def ledger_of(*records: LedgerRecord) -> FakeLedger:
    ledger = FakeLedger()
    ledger.batches.append(list(records))
    return ledger


async def ask(stand: Stand, id: str, who: Principal = ACME) -> None:
    await stand.gateway.ask(InferenceRequest(who, id, RequestOptions(4.0, 2), "m", "text", b""))


@on_admin()
async def test_of_several_tenants_with_one_id_the_newest_is_shown_unless_one_is_named(stand: Stand, port: Port) -> None:
    id = new_id()
    await ask(stand, id)
    asked = asyncio.ensure_future(ask(stand, id, GLOBEX))
    await asyncio.sleep(0.01)
    for done in (False, True):
        if done:
            await asked
        assert (await port.get(f"/internal/requests/{id}")).json["tenant"] == "globex"
        assert (await port.get(f"/internal/requests/{id}?tenant=globex")).json["user"] == "gustav"
        assert (await port.get(f"/internal/requests/{id}?tenant=acme")).json["user"] == "alice"
        assert (await port.get(f"/internal/requests/{id}?tenant=umbrella")).status == 404


@on_admin()
async def test_what_memory_does_not_know_is_in_the_ledger(stand: Stand, _: Port) -> None:
    id = new_id()
    failed = record(id, "globex", status="failed", error="SHED", batch_size=0, worker="")
    port = Port(stand, ledger=ledger_of(failed, record(id)))
    known = await port.get(f"/internal/requests/req_{id}")
    assert known.json == {
        "request_id": f"req_{id}",
        "status": "failed",
        "latency_ms": 250.0,
        "error": {"error": "SHED", "message": "Refused because of its tier at this load"},
        "tenant": "globex",
        "user": "alice",
        "tier": "paid",
        "model": "default",
        "model_version": "7",
        "created_at": "2026-09-21T14:13:20.000+00:00",
        "completed_at": "2026-09-21T14:13:20.250+00:00",
        "batch_size": None,
        "worker": None,
        "batch_id": failed.batch_id,
        "part_of": None,
        "failed_part": None,
    }
    known = await port.get(f"/internal/requests/{id}?tenant=acme")
    assert (known.json["tenant"], known.json["error"], known.json["batch_size"]) == ("acme", None, 32)
    unknown = await port.get(f"/internal/requests/{id}?tenant=umbrella")
    assert (unknown.status, unknown.json["error"]) == (404, "NOT_FOUND")
    assert "none is recorded" in unknown.json["detail"]


@on_admin()
async def test_the_broker_tells_where_a_request_of_another_gateway_stands_whether_its_tenant_is_named_or_not(
    stand: Stand, _: Port
) -> None:
    id = new_id()
    asked = asyncio.ensure_future(ask(stand, id))
    await asyncio.sleep(0.05)
    port = Port(stand, Role.CONTROLLER, ledger=ledger_of())
    for query in ("?tenant=acme", ""):
        assert (await port.get(f"/internal/requests/{id}{query}")).json["status"] == "processing"
    assert (await port.get(f"/internal/requests/{id}?tenant=globex")).status == 404
    await asked


@on_admin()
async def test_a_request_that_the_ledger_alone_knows_to_be_taken_in_is_queued_and_lost_when_its_time_is_long_over(
    stand: Stand, _: Port
) -> None:
    ledger, now = FakeLedger(), time.time()
    port = Port(stand, Role.CONTROLLER, ledger=ledger)
    waits, lost = (
        record(new_id(), status="queued", created_at=now - 1.0, completed_at=now + by) for by in (4.0, -3600.0)
    )
    ledger.batches.append([waits, lost])
    told = (await port.get(f"/internal/requests/{waits.id}")).json
    assert (told["status"], told["latency_ms"], told["completed_at"], told["error"]) == ("queued", None, None, None)
    assert (told["tenant"], told["model"], told["tier"]) == ("acme", "default", "paid")
    told = (await port.get(f"/internal/requests/{lost.id}")).json
    assert (told["status"], told["completed_at"]) == ("failed", None)
    assert "its gateway stopped" in told["error"]["message"]


@on_admin(backend=Touchy())
async def test_while_the_ledger_is_away_what_it_alone_would_know_is_503(stand: Stand, _: Port) -> None:
    id, ledger = new_id(), ledger_of()
    ledger.away = True
    port = Port(stand, ledger=ledger)
    lost = await port.get(f"/internal/requests/{id}")
    assert (lost.status, lost.json["error"], lost.headers["retry-after"]) == (503, "SERVICE_OVERLOADED", "1")
    assert "the ledger cannot be read now" in lost.json["detail"] and "the ledger is away" in lost.json["detail"]
    await ask(stand, id)
    assert (await port.get(f"/internal/requests/{id}")).json["status"] == "completed"
