"""The admin port: health, workers, the fleet, dead letters, metrics. For operators, never for clients.

`guard.py` decides who may use the port. While the broker is unreachable, every route still responds, either with 503 or with
what this process itself knows. While the process is starting, most routes return 503."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.admin import dashboard, dead_letters, drains, request_status, rollouts, snapshot
from headway.admin.dashboard.hub import EventStream, Hub
from headway.admin.dashboard.sign_in import SignIn
from headway.admin.guard import Guard, ServiceTokens, Sessions, Tries
from headway.admin.process import ProcessView
from headway.admin.snapshot import SnapshotSource
from headway.doors.readiness import SERVING, CachedReadiness, Readiness, within_answer_time
from headway.errors import BrokerUnavailable, NotFound
from headway.http.probes import probe_routes
from headway.http.routing import Request, Route, RouteAnswer, Router, as_json
from headway.model import TierDepth, WorkerInfo, WorkerStatus
from headway.telemetry import metrics
from headway.version import __version__

_HINTS = {
    ("/health",): "; /healthz and /internal/health are",
    ("/v1/", "/v2", "/api/", "/docs", "/openapi.json"): "; this is the admin port: use the public one, which is "
    "--port (8000 by default)",
}


def build(process: ProcessView, ready: Readiness, snapshots: SnapshotSource) -> Guard:
    """Build the admin routes behind their guard."""
    on, settings = _Routes(process, ready, snapshots), process.settings
    tokens, sessions = ServiceTokens(settings.admin_token), Sessions(process.clock)
    sign_in = SignIn(tokens, sessions, Tries(process.clock), secure=settings.scheme == "https")
    router = Router(
        [
            *probe_routes(CachedReadiness(ready), for_clients=False, troubles=process.troubles),
            Route("/metrics", on.metrics),
            Route("/internal/health", on.health),
            Route("/internal/workers", on.workers),
            Route("/internal/fleet", on.fleet),
            Route("/internal/scaling", on.scaling),
            Route("/internal/snapshot", on.snapshot),
            *request_status.routes(process),
            *dead_letters.routes(process),
            *rollouts.routes(process),
            *drains.routes(process),
            *sign_in.routes(),
            Route("/internal/events", EventStream(Hub(process, snapshots), sessions.valid).answer),
            *dashboard.routes(),
        ],
        _HINTS,
    )
    return Guard(
        router, tokens, filter(None, settings.admin_names.split(",")), sessions, Tries(process.clock), process.starting
    )


class _Routes:
    def __init__(self, process: ProcessView, ready: Readiness, snapshots: SnapshotSource) -> None:
        self._process, self._ready, self._snapshots = process, ready, snapshots

    async def metrics(self, request: Request) -> RouteAnswer:
        state = await self._process.state()
        exemplars = metrics.asks_for_exemplars(request.headers.get("accept", ""))
        kind = metrics.OPENMETRICS_TYPE if exemplars else metrics.CONTENT_TYPE
        return RouteAnswer(await metrics.exposition(state, exemplars=exemplars), media_type=kind)

    async def health(self, request: Request) -> RouteAnswer:
        process = self._process
        broker = process.broker
        answers = asyncio.gather(broker.workers(), broker.depths(), broker.bulk_queues(), process.letters.count())
        try:
            workers, depths, bulk, dead = await within_answer_time(answers)
        except BrokerUnavailable as exc:
            status = await self._ready.alone()
            code = 200 if status in SERVING else 503
            return as_json({"status": status, "message": str(exc), **self._own()}, code)
        status = await self._ready.judge(workers)
        if status == "ok" and process.troubles():
            status = "degraded"
        return as_json({"status": status, **_load(workers, depths, process.settings.tier_names), **self._own(),
                        "bulk": snapshot.bulk_lines(bulk), "dead_letters": dead})  # fmt: skip

    def _own(self) -> dict[str, Any]:
        process = self._process
        gateway = process.gateway
        return {
            "role": process.role.value,
            "id": process.id,
            "requests_per_second": round(gateway.requests_per_second, 2) if gateway is not None else 0.0,
            "pending": gateway.pending if gateway is not None else 0,
            "expected_workers": process.expected,
            "policy": process.settings.policy,
            "broker": process.settings.broker_shown,
            "version": __version__,
            **process.troubles(),
        }

    async def workers(self, request: Request) -> RouteAnswer:
        process = self._process
        listed, now = await within_answer_time(asyncio.gather(process.broker.workers(), process.now()))
        return as_json({"workers": snapshot.worker_lines(listed, now)})

    async def fleet(self, request: Request) -> RouteAnswer:
        process = self._process
        answers = asyncio.gather(process.fleet.members(), process.fleet.capacities(), process.now())
        members, capacities, now = await within_answer_time(answers)
        return as_json({
            "id": process.id,
            "members": snapshot.member_lines(members, now),
            "capacities": [snapshot.capacity_line(capacity, now) for capacity in capacities],
        })  # fmt: skip

    async def scaling(self, request: Request) -> RouteAnswer:
        """Return the scaling of all models and, on the top level, that of the requested model or of the only one."""
        capacities = await within_answer_time(self._process.fleet.capacities())
        lines = {known.model: snapshot.scaling_line(known.scaling) for known in capacities if known.scaling is not None}
        model = request.param("model")
        if model is None:
            model = next(iter(lines)) if len(lines) == 1 else ""
        if model and model not in lines:
            raise NotFound(f"the number of workers is not known for model {model!r}")
        own = msgspec.structs.asdict(lines[model]) if model else {}
        return as_json({"model": model, **own, "models": lines})

    async def snapshot(self, request: Request) -> RouteAnswer:
        return as_json(await self._snapshots.latest())


def _load(workers: Sequence[WorkerInfo], depths: Sequence[TierDepth], tiers: Sequence[str]) -> dict[str, Any]:
    statuses = Counter(worker.status for worker in workers)
    up = [worker.utilisation for worker in workers if worker.status is WorkerStatus.HEALTHY]
    return {
        "gpu_utilization": round(sum(up) / len(up), 4) if up else 0.0,
        "queue_depth": sum(depth.depth for depth in depths),
        "queue_oldest_seconds": round(max((depth.oldest_seconds for depth in depths), default=0.0), 4),
        "workers": {status.value: statuses[status] for status in WorkerStatus},
        "queues": snapshot.queue_lines(depths, tiers),
    }
