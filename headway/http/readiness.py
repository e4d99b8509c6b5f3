"""Whether this process lives, and whether it should get traffic: the routes every port has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.gateway import Gateway
from headway.model import WorkerInfo, WorkerStatus
from headway.ports import Broker

SERVING = frozenset(("ok", "degraded"))
"""The words that mean ready."""


def readiness(draining: bool, workers: Sequence[WorkerInfo]) -> str:
    """`ok`: every worker is healthy. `degraded`: some are. `unavailable`: none is. `draining`: shutting down."""
    healthy = _healthy(workers)
    if draining:
        return "draining"
    if not healthy:
        return "unavailable"
    return "ok" if healthy == len(workers) else "degraded"


def routes(gateway: Gateway, broker: Broker) -> list[Route]:
    """`/livez`, `/readyz` and `/healthz`, each with `?verbose`.

    Arguments:
        gateway: which is draining or not.
        broker: whose workers decide on readiness.
    """

    async def live(request: Request) -> Response:
        return _answer(request, 200, "ok", {"process": "ok"})

    async def ready(request: Request) -> Response:
        workers = await broker.workers()
        status = readiness(gateway.draining, workers)
        checks = {"workers": f"{_healthy(workers)} of {len(workers)} healthy", "draining": gateway.draining}
        return _answer(request, 200 if status in SERVING else 503, status, checks)

    return [Route("/livez", live), Route("/readyz", ready), Route("/healthz", ready)]


def _healthy(workers: Sequence[WorkerInfo]) -> int:
    return sum(worker.status is WorkerStatus.HEALTHY for worker in workers)


def _answer(request: Request, code: int, status: str, checks: dict[str, Any]) -> Response:
    content: dict[str, Any] = {"status": status}
    if "verbose" in request.query_params:
        content["checks"] = checks
    headers = {"cache-control": "no-store"}
    if code != 200:
        headers["retry-after"] = "1"
    return Response(msgspec.json.encode(content), code, headers, "application/json")
