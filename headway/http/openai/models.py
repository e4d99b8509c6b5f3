"""GET /v1/models and /v1/models/{id}: the models that a principal may ask."""

from __future__ import annotations

from time import time
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.gateway.gateway import Gateway
from headway.http.authentication import Authentication
from headway.http.error_responses import refusal
from headway.http.openai.errors import encode_error
from headway.model import Principal
from headway.ports import Identity

PATH = "/v1/models"


def routes(gateway: Gateway, identity: Identity) -> list[Route]:
    """Both routes, for principals that `identity` knows."""
    on = _Routes(gateway)
    authentication = [Middleware(Authentication, identity, gateway)]
    return [
        Route(PATH, on.all, methods=["GET"], middleware=authentication),
        Route(f"{PATH}/{{id:path}}", on.one, methods=["GET"], middleware=authentication),
    ]


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._since = int(time())

    async def all(self, request: Request) -> Response:
        data = [self._told(model) for model in self._names(request.state.principal)]
        return self._answer({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        id, names = request.path_params["id"], self._names(request.state.principal)
        if id in names:
            return self._answer(self._told(id))
        failure = self._gateway.kinds.absence(id, request.state.principal.models)
        shown, after = request.state.request_id, failure.retry_after
        return refusal(shown, failure.code, failure.message, after, failure.reason, encode=encode_error)

    def _names(self, principal: Principal) -> list[str]:
        return self._gateway.kinds.visible(principal.models)

    def _told(self, model: str) -> dict[str, Any]:
        told = {"id": model, "object": "model", "created": self._since, "owned_by": "headway"}
        return {**told, "status": "failed"} if model in self._gateway.kinds.failed else told

    def _answer(self, content: dict[str, Any]) -> Response:
        return Response(msgspec.json.encode(content), media_type="application/json")
