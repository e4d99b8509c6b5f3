"""Status of a request by its id: `/internal/requests/{id}`.

The answer comes from the first source that knows the request:
1. the gateway, which knows its pending requests and those that it answered recently;
2. the broker, which knows the state of other gateways' requests;
3. the ledger, which has all finished requests and, if configured, unfinished ones.
If several tenants have a request with this id, the newest is shown. `?tenant=` selects one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from headway.admin.process import ProcessView, id_in, instant, tier_name
from headway.doors.fields import ID_PREFIX
from headway.doors.readiness import ANSWER_WITHIN, within_answer_time
from headway.errors import INTERNAL, SHOWN, TITLE, BrokerUnavailable, NotFound, SettingError, StoreUnavailable
from headway.http.problem import escaped
from headway.http.routing import Request, Route, RouteAnswer, as_json
from headway.model import EntryState, LedgerRecord, RequestStatus
from headway.ports import Ledger

LOST_AFTER = 60.0  # Seconds after its deadline until an unfinished request counts as lost.
_OPTIONAL = (  # Fields that are null if unknown.
    "tenant", "user", "tier", "model", "created_at", "completed_at", "batch_size", "worker", "model_version", "batch_id", "part_of",
    "failed_part",
)  # fmt: skip


def routes(process: ProcessView) -> list[Route]:
    """Return the route for the status of a request."""
    return [Route("/internal/requests/{id}", _Requests(process).request)]


class _Requests:
    def __init__(self, process: ProcessView) -> None:
        self._process = process

    async def request(self, request: Request) -> RouteAnswer:
        process, id = self._process, id_in(request)
        tenant = request.param("tenant")
        if process.gateway is not None and (known := await process.gateway.status(id, tenant)) is not None:
            return _answer(id, _of_gateway(known, process.settings.tier_names))
        if (state := await self._state(tenant, id)) is not None:
            return _answer(id, {"status": state.value, "latency_ms": None, "error": None, "tenant": tenant})
        if process.ledger is not None:
            for record in await _recorded(process.ledger, id):
                if tenant in (None, record.tenant):
                    return _answer(id, _of_record(record))
        raise NotFound(self._unknown(id, tenant))

    async def _state(self, tenant: str | None, id: str) -> EntryState | None:
        with contextlib.suppress(BrokerUnavailable):
            return await within_answer_time(self._process.broker.state(tenant, id))
        return None

    def _unknown(self, id: str, tenant: str | None) -> str:
        process = self._process
        if process.gateway is None and process.ledger is None:
            message = f"a {process.role.value} does not remember requests and has no ledger, and {ID_PREFIX}{id} is neither waiting nor running"
            return f"{message}; ask the admin port of its gateway"
        of = "" if tenant is None else " of this tenant"
        held = "is pending or was answered recently" if process.gateway is not None else ""
        recorded = "is recorded" if process.ledger is not None else ""
        return f"no request {ID_PREFIX}{id}{of} {', and none '.join(filter(None, (held, recorded)))}"


async def _recorded(ledger: Ledger, id: str) -> Sequence[LedgerRecord]:
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            return await ledger.find(id)
    except TimeoutError:
        reason = f"it did not respond within {ANSWER_WITHIN * 1000:.0f} ms"
    except (StoreUnavailable, SettingError) as exc:
        reason = str(exc)
    raise StoreUnavailable(f"the request is not known here, and the ledger cannot be read now: {reason}")


def _answer(id: str, known: dict[str, Any]) -> RouteAnswer:
    return as_json({"request_id": ID_PREFIX + id, **dict.fromkeys(_OPTIONAL), **known})


def _of_gateway(known: RequestStatus, tiers: Sequence[str]) -> dict[str, Any]:
    failure, ran, completed_at = known.failure, known.ran, time.time() - (known.since or 0.0)
    return {
        "status": known.state.value,
        "latency_ms": round(known.seconds * 1000, 3),
        "error": None
        if failure is None
        else {"error": SHOWN.get(failure.code, failure.code), "message": escaped(failure.message)},
        "tenant": known.tenant,
        "user": known.user,
        "tier": tier_name(known.tier, tiers),
        "model": escaped(known.model),
        "created_at": instant(completed_at - known.seconds),
        "completed_at": None if known.since is None else instant(completed_at),
        "batch_size": None if ran is None else ran.size,
        "worker": None if ran is None else ran.worker,
        "model_version": escaped((ran.version if ran is not None else "") or known.version) or None,
        "batch_id": None if ran is None else ran.batch_id,
        "failed_part": _shown(known.failed_part),
        "part_of": _shown(known.part_of),
    }


def _shown(id: str) -> str | None:
    return ID_PREFIX + id if id else None


def _of_record(record: LedgerRecord) -> dict[str, Any]:
    """Describe a request in the ledger. It counts as lost if it is unfinished LOST_AFTER seconds after its deadline."""
    known = {
        "tenant": record.tenant,
        "user": record.user,
        "tier": record.tier,
        "model": record.model,
        "created_at": instant(record.created_at),
        "model_version": record.version or None,
        "part_of": _shown(record.part_of),
    }
    if record.status == EntryState.QUEUED.value:
        lost = time.time() > record.completed_at + LOST_AFTER
        message = "its gateway stopped, or could not reach the ledger, before it recorded the outcome"
        status = (EntryState.FAILED if lost else EntryState.QUEUED).value
        error = {"error": INTERNAL, "message": message} if lost else None
        return {**known, "status": status, "latency_ms": None, "error": error}
    code = record.error
    return {
        **known,
        "status": record.status,
        "latency_ms": round(record.latency_ms, 3),
        "error": {"error": code, "message": TITLE.get(code, code)} if code else None,
        "completed_at": instant(record.completed_at),
        "batch_size": record.batch_size or None,
        "worker": record.worker or None,
        "batch_id": record.batch_id or None,
    }
