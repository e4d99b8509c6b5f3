"""Metadata and statistics of the models, for HTTP and gRPC, and their HTTP routes.

Principals see only the models that they may use. Health and the server's metadata are visible to everyone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.core import failures
from headway.errors import NOT_FOUND, NOT_IMPLEMENTED, BadRequest, Forbidden, PayloadTooLarge, RequestError
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.gateway import Gateway
from headway.http.routing import Authentication, Handler, Request, Route, RouteAnswer, WrongMethod, as_json
from headway.model import Principal, ValueKind
from headway.oip.metadata import (
    READY,
    UNAVAILABLE,
    IndexEntry,
    ModelConfig,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    statistics_of,
    tensor_config,
    tensor_metadata,
)
from headway.oip.rest.requests import check_version


class ShownModels:
    """A gateway's models, as exposed on a port. `ready` returns True if this process should get traffic. If `anonymous`, the service has
    no credentials, and statistics cover the whole process; otherwise they are per tenant."""

    def __init__(self, gateway: Gateway, anonymous: bool, ready: Callable[[], Awaitable[bool]]) -> None:
        self._gateway, self._served = gateway, gateway.served
        self._anonymous, self.ready = anonymous, ready
        self._most = min(MOST_INPUTS, gateway.settings.max_queue)

    def find(self, model: str, version: str | None, principal: Principal) -> str:
        """Return the name of a model that the principal may use. An empty name means the default model; None means any version.
        Raises Forbidden if the principal may not use the model, whether or not it exists, and RequestError if it is unknown."""
        served = self._served
        model = model or served.default_of(principal.models)
        if model and principal.models and model not in principal.models:
            raise Forbidden(failures.no_model_for(model, principal.models).message)
        if model not in served:
            raise failures.error_of(served.absence(model, principal.models))
        check_version(served, model, version)
        return model

    async def is_ready(self, model: str) -> bool:
        return await self.ready() and self._served.has_worker(model)

    def metadata(self, model: str) -> ModelMetadata:
        served = self._served[model]
        shown = ModelMetadata(model, served.reported)
        if served.takes is ValueKind.TENSORS:
            shown = replace(shown, inputs=tensor_metadata(served.inputs))
        return replace(shown, outputs=tensor_metadata(served.outputs)) if served.gives is ValueKind.TENSORS else shown

    def config(self, model: str) -> ModelConfig:
        served = self._served[model]
        shown = ModelConfig(model, self._most)
        if served.takes is ValueKind.TENSORS:
            shown = replace(shown, input=tensor_config(served.inputs), max_batch_size=served.settings.max_batch_size)
        return replace(shown, output=tensor_config(served.outputs)) if served.gives is ValueKind.TENSORS else shown

    def statistics(self, principal: Principal, model: str = "") -> Sequence[ModelStatistics]:
        gateway, served = self._gateway, self._served
        counters = gateway.counters if self._anonymous else gateway.tenant_counts.of(principal.tenant)
        return [
            statistics_of(counters, name, ", ".join(served[name].reported), time.monotonic, time.time)
            for name in ([model] if model else served.visible(principal.models))
        ]

    async def index(self, principal: Principal, *, only_ready: bool) -> Sequence[IndexEntry]:
        """Return all versions of the models that the principal may use. If `only_ready`, skip models that have no worker."""
        served, ready, entries = self._served, await self.ready(), list[IndexEntry]()
        for model in served.visible(principal.models):
            has_worker = ready and served.has_worker(model)
            state, reason = (READY, "") if has_worker else (UNAVAILABLE, "no worker is ready")
            if model in served.failed:
                reason = "it did not load"
            if has_worker or not only_ready:
                entries += [IndexEntry(model, version, state, reason) for version in served[model].reported]
        return entries


def routes(models: ShownModels, known: Authentication) -> list[Route]:
    """Return the routes. Those wrapped in `known` admit only authenticated principals."""
    on = _Service(models)
    model = "/v2/models/{model:path}"
    version = f"{model}/versions/{{version}}"
    about = {"/ready": on.model_ready, "/config": on.config, "/stats": on.statistics}
    return [
        *(Route(path, known(_not_offered(why)), ("GET", "POST")) for path, why in _NOT_OFFERED.items()),
        *(Route(path, on.server) for path in ("/v2", "/v2/")),  # Some clients append "/" to a base URL.
        Route("/v2/health/live", on.live),
        Route("/v2/health/ready", on.ready),
        Route("/v2/models/stats", known(on.all_statistics)),
        *(Route(path + of, known(answer)) for of, answer in about.items() for path in (version, model)),
        Route(version, known(on.metadata)),
        Route(model, known(on.metadata)),
        Route("/v2/repository/index", known(on.index), ("POST",)),
    ]


_LOADING = "clients cannot load or unload models; start a worker for a model instead"
_TRACING = "clients cannot change trace settings; to trace a request, send `traceparent` with it"
_MEMORY = "shared memory is not supported; send the inputs' data in the body"
_GENERATE = "generate is not supported; send the text to /v2/models/MODEL/infer, or to /v1/completions"
_NOT_OFFERED = {  # Paths of other servers' extensions, which look like names of models, and their error messages.
    "/v2/repository/models/{model:path}/load": _LOADING,
    "/v2/repository/models/{model:path}/unload": _LOADING,
    "/v2/trace/setting": _TRACING,
    "/v2/models/{model:path}/trace/setting": _TRACING,
    "/v2/logging": "clients cannot change log settings",
    "/v2/systemsharedmemory/{rest:path}": _MEMORY,
    "/v2/cudasharedmemory/{rest:path}": _MEMORY,
    "/v2/models/{model:path}/generate": _GENERATE,
    "/v2/models/{model:path}/generate_stream": _GENERATE,
}


def _not_offered(why: str) -> Handler:
    async def answer(request: Request) -> RouteAnswer:
        raise RequestError(why, code=NOT_IMPLEMENTED)

    return answer


MOST_INDEX = 4096


class _IndexRequest(msgspec.Struct, gc=False):
    ready: bool = False


class _Service:
    def __init__(self, models: ShownModels) -> None:
        self._models = models

    async def server(self, request: Request) -> RouteAnswer:
        return _answer(ServerMetadata())

    async def live(self, request: Request) -> RouteAnswer:
        return _answer({"live": True})

    async def ready(self, request: Request) -> RouteAnswer:
        ready = await self._models.ready()
        return _answer({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> RouteAnswer:
        model = self._asked(request)
        ready = await self._models.is_ready(model)
        return _answer({"name": model, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> RouteAnswer:
        try:
            model = self._asked(request)
        except RequestError as exc:
            # Inference routes come first (see `public`), so this request to `/infer` has the wrong method.
            if exc.code == NOT_FOUND and request.path.endswith("/infer"):
                raise WrongMethod(("POST",)) from None
            raise
        return _answer(self._models.metadata(model))

    async def config(self, request: Request) -> RouteAnswer:
        return _answer(self._models.config(self._asked(request)))

    async def statistics(self, request: Request) -> RouteAnswer:
        return _answer({"model_stats": self._models.statistics(request.principal, self._asked(request))})

    async def all_statistics(self, request: Request) -> RouteAnswer:
        return _answer({"model_stats": self._models.statistics(request.principal)})

    async def index(self, request: Request) -> RouteAnswer:
        body = b""
        async for piece in request.pieces():
            body += piece
            if len(body) > MOST_INDEX:
                raise PayloadTooLarge(f"a repository index request may have at most {MOST_INDEX} bytes")
        try:
            only_ready = msgspec.json.decode(body, type=_IndexRequest).ready if body else False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(f"the body is not a repository index request: {exc}") from None
        return _answer(await self._models.index(request.principal, only_ready=only_ready))

    def _asked(self, request: Request) -> str:
        return self._models.find(request.params["model"], request.params.get("version"), request.principal)


def _answer(content: Any, status: int = 200) -> RouteAnswer:
    headers = {"cache-control": "no-store"}
    if status != 200:
        headers["retry-after"] = "1"
    return as_json(content, status, headers)
