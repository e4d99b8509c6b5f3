"""The admin port: health, workers, the fleet, dead letters, metrics. For operators, never for clients.

Everything but `/livez`, `/readyz` and `/healthz` asks for the service token when one is configured; while it is being
rotated there are two. A client's key is good nowhere here, and is told so. Without a token the port listens on loopback
only, and answers only to names of loopback: a web page that has its own name resolve to 127.0.0.1 (DNS rebinding) is
turned away. What changes something is then not done for a page of another site (cross-site request forgery) either: a
browser says where a page is from, in `Sec-Fetch-Site` or `Origin`, and pages cannot keep it from that.

While the broker is away every route still answers: with 503, or with what this process knows by itself. While the
process starts, those answer that need nothing which is not there yet; the others say 503.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import __version__, errors
from headway.admin import dead_letters, request_status
from headway.admin.process import ProcessView
from headway.admin.rendering import as_json, instant, tier_name
from headway.config import is_loopback
from headway.errors import BrokerUnavailable
from headway.http import readiness
from headway.http.error_responses import handlers, refusal
from headway.http.readiness import Glance, Readiness, soon
from headway.identity.api_keys.credential import LIVE
from headway.model import Capacity, ProcessInfo, TierDepth, WeightLine, WorkerInfo, WorkerStatus
from headway.telemetry import metrics

_OPEN = ("/livez", "/readyz", "/healthz")
_EARLY = (*_OPEN, "/metrics", "/internal/health", "/internal/workers")
"""Routes that answer while the process starts."""
_IS_ADMIN = "; this is the admin port: ask the public one, whose port is --port, 8000 unless set"
_SAFE = ("GET", "HEAD", "OPTIONS")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


def build(process: ProcessView, ready: Readiness) -> ASGIApp:
    """Build the admin application.

    Arguments:
        process: view of the process.
        ready: whether the process should get traffic.
    """
    on = _Routes(process, ready)
    app = Starlette(
        routes=[
            *readiness.routes(Glance(ready)),
            Route("/metrics", on.metrics),
            Route("/internal/health", on.health),
            Route("/internal/workers", on.workers),
            Route("/internal/fleet", on.fleet),
            *request_status.routes(process),
            *dead_letters.routes(process),
        ],
        exception_handlers=handlers(_IS_ADMIN, "/v1/"),
    )
    # A redirect would be built from the Host header, which anybody can write.
    app.router.redirect_slashes = False
    return _Guard(app, process.settings.admin_token, process.starting)


class _Guard:
    """Check of a request's token; without a token, of the loopback name that it came by. A client's key never passes."""

    def __init__(self, app: ASGIApp, tokens: str, starting: Callable[[], bool]) -> None:
        self._app = app
        self._starting = starting
        self._tokens = [token.encode() for token in tokens.split(",") if token]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            refused = self._refusal(Headers(scope=scope), scope["state"]["request_id"], scope["method"])
            if refused is None and self._starting() and scope["path"] not in _EARLY:
                message = "this process is starting; ask again when /readyz says 200"
                refused = refusal(scope["state"]["request_id"], errors.NO_WORKERS, message)
            if refused is not None:
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, id: str, method: str) -> Response | None:
        scheme, _, text = headers.get("authorization", "").partition(" ")
        credential = text.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if credential.startswith(LIVE):
            message = "this is a client's key, which is good on the public port only: send the service token"
            return refusal(id, errors.FORBIDDEN, message)
        if self._tokens:
            if any([hmac.compare_digest(credential, token) for token in self._tokens]):  # noqa: C419 - all are compared
                return None
            return refusal(id, errors.UNAUTHENTICATED, "this route needs the service token: Authorization: Bearer …")
        host = headers.get("host", "")
        if not is_loopback(_host(host)):
            message = (
                "without a service token this port answers to 127.0.0.1 and localhost only; set HEADWAY_ADMIN_TOKEN"
            )
            return refusal(id, errors.FORBIDDEN, message)
        if method not in _SAFE and _foreign(headers, host):
            message = "without a service token nothing is changed for a page of another site; set HEADWAY_ADMIN_TOKEN"
            return refusal(id, errors.FORBIDDEN, message)
        return None


def _host(header: str) -> str:
    """Host in a Host header, without its port; empty when that is no host."""
    found = _AUTHORITY.fullmatch(header)
    return found[1].strip("[]") if found is not None else ""


def _foreign(headers: Headers, host: str) -> bool:
    """Whether a browser asks for a page from elsewhere than `host`. Other clients send nothing that says so."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")


class _Routes:
    def __init__(self, process: ProcessView, ready: Readiness) -> None:
        self._process = process
        self._ready = ready

    async def metrics(self, request: Request) -> Response:
        process = self._process
        counters, tiers = process.counters, process.settings.tier_names
        try:
            state = await soon(metrics.collect(counters, tiers, process.broker, process.letters, process.fleet))
        except BrokerUnavailable:
            state = metrics.State(counters, tiers, (), (), None, broker_up=False)
        return Response(await metrics.exposition(state), media_type=metrics.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        process = self._process
        asked = asyncio.gather(process.broker.workers(), process.broker.depths(), process.letters.count())
        try:
            workers, depths, dead = await soon(asked)
        except BrokerUnavailable as exc:
            status = await self._ready.alone()
            code = 200 if status in readiness.SERVING else 503
            return as_json({"status": status, "message": str(exc), **self._own()}, code)
        status, _ = self._ready.judge(workers)
        return as_json({"status": status, **_load(workers, depths, process.settings.tier_names), **self._own(),
                        "dead_letters": dead})  # fmt: skip

    def _own(self) -> dict[str, Any]:
        """State of this process, as it knows it by itself."""
        process = self._process
        gateway = process.gateway
        return {
            "role": process.role.value,
            "id": process.id,
            "requests_per_second": round(gateway.requests_per_second, 2) if gateway is not None else 0.0,
            "pending": gateway.pending if gateway is not None else 0,
            "policy": process.settings.policy,
            "broker": process.settings.broker_shown,
            "version": __version__,
        }

    async def workers(self, request: Request) -> Response:
        process = self._process
        listed, now = await soon(asyncio.gather(process.broker.workers(), process.now()))
        wall = time.time()
        return as_json({
            "workers": [
                {
                    "worker_id": worker.worker_id,
                    "model": worker.model,
                    "status": worker.status.value,
                    "utilisation": round(worker.utilisation, 4),
                    "in_flight": worker.in_flight,
                    "last_heartbeat": instant(wall - _age(worker.last_heartbeat, now)),
                    "restarts": worker.restarts,
                    "takes": worker.takes,
                    "gives": worker.gives,
                    "weight": _line(worker.weight),
                    "pid": worker.pid,
                    "memory": round(worker.memory, 4),
                    "reason": worker.reason,
                    "items_per_second": round(worker.items_per_second, 2),
                    "estimated": worker.estimated,
                    "version": worker.runs.version,
                    "target": worker.runs.target,
                    "gpu": worker.gpu,
                    "share": round(worker.share, 4),
                }
                for worker in listed
            ]
        })  # fmt: skip

    async def fleet(self, request: Request) -> Response:
        process = self._process
        asked = asyncio.gather(process.fleet.members(), process.fleet.capacities(), process.now())
        members, capacities, now = await soon(asked)
        return as_json({
            "id": process.id,
            "members": [_member(member, now) for member in members],
            "capacities": [_capacity(capacity, now) for capacity in capacities],
        })  # fmt: skip


def _load(workers: Sequence[WorkerInfo], depths: Sequence[TierDepth], tiers: Sequence[str]) -> dict[str, Any]:
    census = Counter(worker.status for worker in workers)
    up = [worker.utilisation for worker in workers if worker.status is WorkerStatus.HEALTHY]
    return {
        "gpu_utilization": round(sum(up) / len(up), 4) if up else 0.0,
        "queue_depth": sum(depth.depth for depth in depths),
        "queue_oldest_seconds": round(max((depth.oldest_seconds for depth in depths), default=0.0), 4),
        "workers": {status.value: census[status] for status in WorkerStatus},
        "queues": [
            {
                "model": depth.model,
                "version": depth.version,
                "tier": tier_name(depth.tier, tiers),
                "depth": depth.depth,
                "oldest_seconds": round(depth.oldest_seconds, 4),
            }
            for depth in depths
        ],
    }


def _line(line: WeightLine | None) -> dict[str, float] | None:
    return None if line is None else {"fixed": round(line.fixed, 4), "by_octet": round(line.by_octet, 6)}


def _member(member: ProcessInfo, now: float) -> dict[str, Any]:
    return {
        "id": member.id,
        "role": member.role.value,
        "host": member.host,
        "pid": member.pid,
        "admin": member.admin,
        "version": member.version,
        "pending": member.pending,
        "requests_per_second": round(member.requests_per_second, 2),
        "leads": member.leads,
        "age_seconds": round(_age(member.last_seen, now), 3),
    }


def _capacity(capacity: Capacity, now: float) -> dict[str, Any]:
    return {
        "model": capacity.model,
        "healthy": capacity.healthy,
        "degraded": capacity.degraded,
        "items_per_second": round(capacity.items_per_second, 2),
        "usable_per_second": round(capacity.usable_per_second, 2),
        "estimated": capacity.estimated,
        "scarce": capacity.scarce,
        "age_seconds": round(_age(capacity.measured_at, now), 3),
    }


def _age(instant: float, now: float) -> float:
    """Seconds since an instant. The servers of several shards may differ by a little."""
    return max(now - instant, 0.0)
