"""Probes of a port: `/livez`, `/readyz` and `/healthz`."""

from collections.abc import Callable, Mapping
from typing import Any

from headway.doors.readiness import AT_ZERO, SERVING, CachedReadiness
from headway.http.routing import Request, Route, RouteAnswer, as_json

_AWAITED = "none; a worker is on its way"
_WORKERS = {"ok": "healthy", "degraded": "fewer are healthy than expected", "unavailable": "none is healthy"}
"""Message about the workers for each readiness status."""


def probe_routes(
    readiness: CachedReadiness, *, for_clients: bool, troubles: Callable[[], Mapping[str, str]] = dict
) -> list[Route]:
    """Return the routes `/livez`, `/readyz` and `/healthz`, each with `?verbose`. Clients, who may be anyone, get no numbers or
    names. Operators get the number of workers, why models failed to load, and `troubles`: the stores that don't answer."""

    async def live(request: Request) -> RouteAnswer:
        return _answer(request, 200, "ok", {"process": "ok"})

    async def ready(request: Request) -> RouteAnswer:
        status, checks = await readiness.take()
        checks = _for_clients(status, checks) if for_clients else {**checks, **troubles()}
        return _answer(request, 200 if status in SERVING else 503, status, checks)

    return [Route("/livez", live), Route("/readyz", ready), Route("/healthz", ready)]


def _for_clients(status: str, checks: dict[str, Any]) -> dict[str, Any]:
    public: dict[str, Any] = {name: checks[name] for name in ("starting", "draining", "broker") if name in checks}
    if "workers" in checks:
        known = "unknown" if "broker" in checks else _WORKERS.get(status, "unknown")
        awaited = _AWAITED if checks["workers"].startswith("none; ") else known
        public["workers"] = AT_ZERO if checks["workers"] == AT_ZERO else awaited
    if "failed" in checks:
        public["failed"] = "some models did not load"
    return public


def _answer(request: Request, code: int, status: str, checks: dict[str, Any]) -> RouteAnswer:
    content: dict[str, Any] = {"status": status}
    if "verbose" in request.query:
        content["checks"] = checks
    headers = {"cache-control": "no-store"}
    if code != 200:
        headers["retry-after"] = "1"
    return as_json(content, code, headers)
