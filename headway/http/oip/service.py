"""Routes of the Open Inference Protocol but for inference: health, metadata, configuration, statistics, repository index.

What is said of a model is for principals that may ask it. Health and the server's metadata are for everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.errors import NOT_FOUND, NOT_IMPLEMENTED, BadRequest, PayloadTooLarge, RequestError
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.gateway import Gateway
from headway.http.authentication import Authentication
from headway.http.oip.models import find_model, index_of, statistics
from headway.http.readiness import SERVING, CachedReadiness
from headway.http.requests import JSON, Request, RouteAnswer
from headway.http.routing import Route, WrongMethod
from headway.identity.anonymous import AnonymousIdentity
from headway.oip.metadata import ModelConfig, ModelMetadata, ServerMetadata
from headway.ports import Identity


def routes(gateway: Gateway, glance: CachedReadiness, identity: Identity) -> list[Route]:
    """Make the routes.

    Arguments:
        gateway: gateway that serves the models.
        glance: whether this process should get traffic.
        identity: identity that knows the principals.
    """
    on = _Service(gateway, glance, isinstance(identity, AnonymousIdentity))
    known = Authentication(identity, gateway)
    model = "/v2/models/{model:path}"
    version = f"{model}/versions/{{version}}"
    about = {"/ready": on.model_ready, "/config": on.config, "/stats": on.statistics}
    return [
        *(Route(path, on.server) for path in ("/v2", "/v2/")),  # Clients join a base URL and nothing so.
        Route("/v2/health/live", on.live),
        Route("/v2/health/ready", on.ready),
        Route("/v2/models/stats", known(on.all_statistics)),
        *(Route(path + of, known(answer)) for of, answer in about.items() for path in (version, model)),
        Route(version, known(on.metadata)),
        Route(model, known(on.metadata)),
        Route("/v2/repository/index", known(on.index), ("POST",)),
        *(
            Route(f"/v2/repository/models/{{model:path}}/{what}", known(on.never), ("POST",))
            for what in ("load", "unload")
        ),
    ]


MOST_INDEX = 4096
"""Most bytes of the body of a repository index request."""


class _IndexRequest(msgspec.Struct, gc=False):
    ready: bool = False


class _Service:
    def __init__(self, gateway: Gateway, glance: CachedReadiness, anonymous: bool) -> None:
        self._gateway, self._served = gateway, gateway.served
        self._glance, self._anonymous = glance, anonymous
        self._most = min(MOST_INPUTS, gateway.settings.max_queue)

    async def server(self, request: Request) -> RouteAnswer:
        return _answer(ServerMetadata())

    async def live(self, request: Request) -> RouteAnswer:
        return _answer({"live": True})

    async def ready(self, request: Request) -> RouteAnswer:
        ready = await self._is_ready()
        return _answer({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> RouteAnswer:
        model = self._asked(request)
        ready = await self._is_ready() and self._served.has_worker(model)
        return _answer({"name": model, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> RouteAnswer:
        try:
            model = self._asked(request)
        except RequestError as exc:
            # No model's name, as the routes of inference come first; see `public`.
            if exc.code == NOT_FOUND and request.path.endswith("/infer"):
                raise WrongMethod(("POST",)) from None
            raise
        return _answer(ModelMetadata(model, self._served[model].reported))

    async def config(self, request: Request) -> RouteAnswer:
        return _answer(ModelConfig(self._asked(request), self._most))

    async def statistics(self, request: Request) -> RouteAnswer:
        return self._statistics(request, [self._asked(request)])

    async def all_statistics(self, request: Request) -> RouteAnswer:
        return self._statistics(request, self._models(request))

    async def index(self, request: Request) -> RouteAnswer:
        body = b""
        async for piece in request.pieces():
            body += piece
            if len(body) > MOST_INDEX:
                raise PayloadTooLarge(f"a repository index request has at most {MOST_INDEX} bytes")
        try:
            only_ready = msgspec.json.decode(body, type=_IndexRequest).ready if body else False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(f"the body is no repository index request: {exc}") from None
        return _answer(index_of(self._served, self._models(request), await self._is_ready(), only_ready=only_ready))

    async def never(self, request: Request) -> RouteAnswer:
        message = "models are not loaded and unloaded over HTTP; start a worker for a model, and it is served"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    async def _is_ready(self) -> bool:
        word, _ = await self._glance.take()
        return word in SERVING

    def _models(self, request: Request) -> list[str]:
        """Models that the principal may ask."""
        return self._served.visible(request.principal.models)

    def _asked(self, request: Request) -> str:
        """Model that the path names. Raises RequestError when it is none that the principal may ask."""
        return find_model(self._served, request.params["model"], request.params.get("version"), request.principal)

    def _statistics(self, request: Request, models: Sequence[str]) -> RouteAnswer:
        """Statistics of models: of the principal's tenant or, where nobody is asked for a credential, of the process."""
        tenant, gateway = request.principal.tenant, self._gateway
        counters = gateway.counters if self._anonymous else gateway.tenant_counts.of(tenant)
        return _answer({"model_stats": statistics(self._served, models, counters)})


def _answer(content: Any, status: int = 200) -> RouteAnswer:
    headers = {"cache-control": "no-store"}
    if status != 200:
        headers["retry-after"] = "1"
    return RouteAnswer(msgspec.json.encode(content), status, headers, JSON)
