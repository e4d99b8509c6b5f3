"""Ordinary routes of the public port: health, tasks, models, bulk jobs, the OpenAPI document and its page.

The fast path answers inference requests. Their routes are listed here only to answer 405 to other methods.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from headway.doors.entrance import Entrance
from headway.doors.readiness import CachedReadiness, Readiness
from headway.gateway.gateway import Gateway
from headway.gateway.served_model import ServedModel
from headway.http import openapi, tasks
from headway.http.inference import routes as inference_routes
from headway.http.openapi import TEXTS, Example, Kinds, example_of
from headway.http.probes import probe_routes
from headway.http.problem import encode_openai_error
from headway.http.routing import JSON, Authentication, NoRoute, Request, Route, RouteAnswer, Router, as_json, refusal
from headway.model import Principal
from headway.oip.rest import models as oip_models
from headway.oip.rest.models import ShownModels
from headway.runtime.request_id import new_id

if TYPE_CHECKING:
    from headway.bulk.jobs import BulkJobs


_ADMIN = "the admin port (--admin-port, 9000 by default)"
_HINTS = {
    ("/health",): f"; /healthz is, and /internal/health at {_ADMIN}",
    ("/metrics", "/dashboard", "/internal/"): f"; ask {_ADMIN}",
    ("/",): "; /docs lists what is",
}


def build(entrance: Entrance, ready: Readiness, bulk: BulkJobs | None = None) -> Router:
    """Build the routes of the public port. `bulk` is None if bulk jobs are disabled."""
    gateway, known = entrance.gateway, Authentication(entrance)
    bulk_routes: list[Route] = []
    if bulk is not None:
        from headway.http.openai.bulk import routes

        bulk_routes = routes(bulk, known, new_id)
    contract, models, readiness = _Contract(gateway), _Models(gateway), CachedReadiness(ready)
    return Router(
        [
            *probe_routes(readiness, for_clients=True),
            *tasks.routes(gateway, known),
            Route("/v1/models", known(models.list_all)),
            Route("/v1/models/{id:path}", known(models.get)),
            *bulk_routes,
            Route("/openapi.json", contract.document),
            Route("/docs", contract.page),
            *(Route(path, _never, ("POST",)) for path in inference_routes.ROUTES),
            *oip_models.routes(ShownModels(gateway, entrance.anonymous, readiness.serving), known),
        ],
        _HINTS,
    )


class _Models:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._since = int(time())

    async def list_all(self, request: Request) -> RouteAnswer:
        data = [self._described(model) for model in self._names(request.principal)]
        return as_json({"object": "list", "data": data})

    async def get(self, request: Request) -> RouteAnswer:
        id, names = request.params["id"], self._names(request.principal)
        if not id:
            raise NoRoute
        if id in names:
            return as_json(self._described(id))
        return refusal(request.id, self._gateway.served.absence(id, request.principal.models), encode_openai_error)

    def _names(self, principal: Principal) -> list[str]:
        return self._gateway.served.visible(principal.models)

    def _described(self, model: str) -> dict[str, Any]:
        content = {"id": model, "object": "model", "created": self._since, "owned_by": "headway"}
        return {**content, "status": "failed"} if model in self._gateway.served.failed else content


class _Contract:
    """Routes for the OpenAPI document and its page. The document is cached until its models change."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._facts: tuple[tuple[Kinds, ...], Example] | None = None
        self._document = b""
        self._page, self._policy = _read_page()

    async def document(self, request: Request) -> RouteAnswer:
        served, settings = self._gateway.served, self._gateway.settings
        public = not (settings.keys or settings.jwt)  # Hide the models' names and inputs from strangers.
        by_model = {model: _kinds(served[model], public) for model in served.models}
        model = served.default or next(iter(by_model), "")
        shown = "" if served.default else model if public else "NAME"
        example = example_of(by_model.get(model, TEXTS), served.example(model) if public else None, shown)
        kinds = tuple(dict.fromkeys(by_model.values()))
        if (kinds, example) != self._facts:
            document = openapi.document(settings, *kinds, example=example)
            self._facts, self._document = (kinds, example), msgspec.json.encode(document)
        return RouteAnswer(self._document, media_type=JSON)

    async def page(self, request: Request) -> RouteAnswer:
        return RouteAnswer(self._page, 200, {"content-security-policy": self._policy}, "text/html; charset=utf-8")


def _kinds(model: ServedModel, public: bool) -> Kinds:
    if not public:
        return Kinds(model.takes, model.gives)
    return Kinds(model.takes, model.gives, model.inputs, model.outputs, model.per_call)


async def _never(request: Request) -> RouteAnswer:
    raise NoRoute


def _read_page() -> tuple[bytes, str]:
    """Return the document's page, and a Content-Security-Policy that allows only its own scripts and styles."""
    page = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    sources = {
        tag: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("style", "script")
    }
    return page.encode(), (
        f"default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src {sources['style']}; script-src {sources['script']}"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
