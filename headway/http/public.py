"""Ordinary routes of the public port: health, tasks, the contract, and its page.

The inference routes are listed here only so that a wrong method on them is told apart from a wrong path: their requests
are answered on the fast path and never get this far.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.doors.entrance import Entrance
from headway.doors.readiness import CachedReadiness, Readiness
from headway.errors import SERVICE_OVERLOADED, FolderUnavailable, StoreUnavailable
from headway.gateway.gateway import Gateway
from headway.gateway.served_model import ServedModel
from headway.http import openapi, probes, tasks
from headway.http.inference import routes as inference_routes
from headway.http.openai import models
from headway.http.openapi import TEXTS, Example, Kinds, example_of
from headway.http.requests import JSON, Handler, Request, RouteAnswer, refuse
from headway.http.routing import Authentication, NoRoute, Route, Router
from headway.model import Failure
from headway.oip.rest import models as oip_models
from headway.oip.rest.models import ShownModels
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id

if TYPE_CHECKING:
    from headway.bulk.jobs import BulkJobs


log = get_logger(__name__)

_ADMIN = "the admin port, --admin-port, 9000 unless set"
_HINTS = {
    ("/health",): f"; /healthz is, and /internal/health at {_ADMIN}",
    ("/metrics", "/dashboard", "/internal/"): f"; ask {_ADMIN}",
    ("/",): "; /docs lists what is",
}


def build(entrance: Entrance, ready: Readiness, bulk: BulkJobs | None = None) -> Router:
    """Build the routes of the public port.

    Arguments:
        entrance: entrance to the gateway whose settings are published, and whose tasks are served.
        ready: whether this process should get traffic.
        bulk: bulk jobs; None where there are none.
    """
    gateway, known = entrance.gateway, Authentication(entrance)
    on, glance = _Routes(gateway), CachedReadiness(ready)
    return Router(
        [
            *probes.routes(glance, for_clients=True),
            *tasks.routes(gateway, known),
            *models.routes(gateway, known),
            *(() if bulk is None else _bulk_routes(bulk, known)),
            Route("/openapi.json", on.contract),
            Route("/docs", on.page),
            *(Route(path, _never, ("POST",)) for path in inference_routes.ROUTES),
            *oip_models.routes(ShownModels(gateway, entrance.anonymous, glance.serving), known),
        ],
        _HINTS,
    )


def _bulk_routes(bulk: BulkJobs, known: Authentication) -> Iterable[Route]:
    from headway.http.openai import batches, files

    for route in (*files.routes(bulk, known, new_id), *batches.routes(bulk, known, new_id)):
        yield Route(route.path, _without_address(route.handler), [*route.methods])


def _without_address(handler: Handler) -> Handler:
    """Handler whose clients do not read where the database or the folder of bulk jobs is; the log has that."""

    async def answer(request: Request) -> RouteAnswer:
        try:
            return await handler(request)
        except StoreUnavailable as exc:
            log.warning("bulk jobs are out of reach", error=str(exc), request_id=request.id)
            part = "folder" if isinstance(exc, FolderUnavailable) else "database"
            message = f"bulk jobs are not available just now, as their {part} is out of reach; try again"
            return refuse(request, Failure(SERVICE_OVERLOADED, message, 1.0, "ledger"))

    return answer


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._told: tuple[tuple[Kinds, ...], Example] | None = None
        self._contract = b""
        self._page, self._policy = _read_page()

    async def contract(self, request: Request) -> RouteAnswer:
        served, settings = self._gateway.served, self._gateway.settings
        public = not (settings.keys or settings.jwt)  # Else strangers read of no name and no input of a model.
        told = {model: _kinds(served[model], public) for model in served.models}
        asked = served.default or next(iter(told), "")
        named = "" if served.default else asked if public else "NAME"
        example = example_of(told.get(asked, TEXTS), served.example(asked) if public else None, named)
        kinds = tuple(dict.fromkeys(told.values()))
        if (kinds, example) != self._told:
            self._told, self._contract = (kinds, example), self._written(kinds, example)
        return RouteAnswer(self._contract, media_type=JSON)

    def _written(self, kinds: Iterable[Kinds], example: Example) -> bytes:
        return msgspec.json.encode(openapi.document(self._gateway.settings, *kinds, example=example))

    async def page(self, request: Request) -> RouteAnswer:
        return RouteAnswer(self._page, 200, {"content-security-policy": self._policy}, "text/html; charset=utf-8")


def _kinds(model: ServedModel, public: bool) -> Kinds:
    if not public:
        return Kinds(model.takes, model.gives)
    return Kinds(model.takes, model.gives, model.inputs, model.outputs, model.per_call)


async def _never(request: Request) -> RouteAnswer:
    raise NoRoute


def _read_page() -> tuple[bytes, str]:
    """Read the page of the contract, and the policy under which a browser runs nothing but what is in it."""
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
