"""Routes of the Open Inference Protocol but for inference: health, metadata, configuration, statistics, repository index.

What is said of a model is for principals that may ask it. Health and the server's metadata are for everybody.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.errors import NOT_FOUND, NOT_IMPLEMENTED, BadRequest, PayloadTooLarge, RequestError
from headway.http.authentication import Authentication
from headway.http.oip.models import ShownModels
from headway.http.requests import JSON, Request, RouteAnswer
from headway.http.routing import Route, WrongMethod
from headway.oip.metadata import ServerMetadata


def routes(models: ShownModels, known: Authentication) -> list[Route]:
    """Make the routes.

    Arguments:
        models: models that are shown.
        known: check that only known principals pass.
    """
    on = _Service(models)
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
            # No model's name, as the routes of inference come first; see `public`.
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
                raise PayloadTooLarge(f"a repository index request has at most {MOST_INDEX} bytes")
        try:
            only_ready = msgspec.json.decode(body, type=_IndexRequest).ready if body else False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(f"the body is no repository index request: {exc}") from None
        return _answer(await self._models.index(request.principal, only_ready=only_ready))

    async def never(self, request: Request) -> RouteAnswer:
        message = "models are not loaded and unloaded over HTTP; start a worker for a model, and it is served"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    def _asked(self, request: Request) -> str:
        """Model that the path names. Raises RequestError when it is none that the principal may ask."""
        return self._models.find(request.params["model"], request.params.get("version"), request.principal)


def _answer(content: Any, status: int = 200) -> RouteAnswer:
    headers = {"cache-control": "no-store"}
    if status != 200:
        headers["retry-after"] = "1"
    return RouteAnswer(msgspec.json.encode(content), status, headers, JSON)
