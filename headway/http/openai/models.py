"""GET /v1/models and /v1/models/{id}: the models that a principal may use."""

from __future__ import annotations

from time import time
from typing import Any

import msgspec

from headway.gateway.gateway import Gateway
from headway.http.openai.errors import encode_error
from headway.http.requests import JSON, Request, RouteAnswer, refusal
from headway.http.routing import Authentication, NoRoute, Route
from headway.model import Principal

PATH = "/v1/models"


def routes(gateway: Gateway, known: Authentication) -> list[Route]:
    """Return both routes."""
    models = _Models(gateway)
    return [Route(PATH, known(models.list_all)), Route(f"{PATH}/{{id:path}}", known(models.get))]


class _Models:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._since = int(time())

    async def list_all(self, request: Request) -> RouteAnswer:
        data = [self._described(model) for model in self._names(request.principal)]
        return self._answer({"object": "list", "data": data})

    async def get(self, request: Request) -> RouteAnswer:
        id, names = request.params["id"], self._names(request.principal)
        if not id:
            raise NoRoute
        if id in names:
            return self._answer(self._described(id))
        failure = self._gateway.served.absence(id, request.principal.models)
        return refusal(request.id, failure, encode_error)

    def _names(self, principal: Principal) -> list[str]:
        return self._gateway.served.visible(principal.models)

    def _described(self, model: str) -> dict[str, Any]:
        content = {"id": model, "object": "model", "created": self._since, "owned_by": "headway"}
        return {**content, "status": "failed"} if model in self._gateway.served.failed else content

    def _answer(self, content: dict[str, Any]) -> RouteAnswer:
        return RouteAnswer(msgspec.json.encode(content), media_type=JSON)
