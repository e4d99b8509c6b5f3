"""The ordinary routes of the public port: health, the contract, its page, and every refusal of a route.

The native routes are listed here only so that a wrong method on them is told apart from a wrong path: their
requests are answered by the hot lane and never get this far.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headway import errors
from headway.errors import RequestError
from headway.gateway import Gateway
from headway.http import openapi
from headway.http.readiness import SERVING, readiness
from headway.http.shapes import SHAPES, problem, problem_body, problem_header
from headway.model import WorkerStatus
from headway.ports import Broker


def build(gateway: Gateway, broker: Broker) -> ASGIApp:
    """The application behind the public port.

    Arguments:
        gateway: whose settings are published, and which is draining or not.
        broker: whose workers decide on readiness.
    """
    on = _Routes(gateway, broker)
    return Starlette(
        routes=[
            Route("/livez", on.live),
            Route("/readyz", on.ready),
            Route("/healthz", on.ready),
            Route("/openapi.json", on.contract),
            Route("/docs", on.page),
            *(Route(shape.path, _never, methods=["POST"]) for shape in SHAPES),
        ],
        exception_handlers={RequestError: _refused, HTTPException: _no_route, Exception: _broken},
    )


class _Routes:
    def __init__(self, gateway: Gateway, broker: Broker) -> None:
        self._gateway = gateway
        self._broker = broker
        self._contract = msgspec.json.encode(openapi.document(gateway.settings))
        self._page, self._policy = _read_page()

    async def live(self, request: Request) -> Response:
        return _health(request, 200, "ok", {"process": "ok"})

    async def ready(self, request: Request) -> Response:
        workers = await self._broker.workers()
        status = readiness(self._gateway.draining, workers)
        healthy = sum(worker.status is WorkerStatus.HEALTHY for worker in workers)
        checks = {"workers": f"{healthy} of {len(workers)} healthy", "draining": self._gateway.draining}
        return _health(request, 200 if status in SERVING else 503, status, checks)

    async def contract(self, request: Request) -> Response:
        return Response(self._contract, media_type="application/json")

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": self._policy})


async def _never(request: Request) -> Response:
    raise HTTPException(404)


def _health(request: Request, code: int, status: str, checks: dict[str, Any]) -> Response:
    content: dict[str, Any] = {"status": status}
    if "verbose" in request.query_params:
        content["checks"] = checks
    headers = {"cache-control": "no-store"}
    if code == errors.STATUS[errors.NO_WORKERS]:
        headers["retry-after"] = "1"
    return Response(msgspec.json.encode(content), code, headers, "application/json")


def _read_page() -> tuple[str, str]:
    """The page of the contract, and the policy under which a browser runs nothing but what is in it."""
    page = resources.files("headway.http").joinpath("docs.html").read_text(encoding="utf-8")
    sources = {
        tag: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("style", "script")
    }
    return page, (
        f"default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src {sources['style']}; script-src {sources['script']}"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _problem(request: Request, code: str, message: str, retry_after: float | None = None) -> Response:
    document = problem(code, message, request.state.request_id, retry_after)
    return Response(problem_body(document), errors.STATUS[code], problem_header(code, retry_after))


async def _refused(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, RequestError):
        return await _broken(request, exc)
    return _problem(request, exc.code, exc.message, exc.retry_after)


async def _no_route(request: Request, exc: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    allowed = getattr(exc, "headers", None) or {}
    if "Allow" not in allowed:
        return _problem(request, errors.NOT_FOUND, f"nothing is served at {request.url.path}; /docs lists what is")
    methods = sorted({*allowed["Allow"].split(", "), "OPTIONS"})
    allow = {"allow": ", ".join(methods)}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=allow)
    message = f"{request.method} is not served at {request.url.path}, only {allow['allow']}"
    response = _problem(request, errors.METHOD_NOT_ALLOWED, message)
    response.headers.update(allow)
    return response


async def _broken(request: Request, exc: Exception) -> Response:
    return _problem(request, errors.INTERNAL, "an unexpected fault of the server; its log says more")
