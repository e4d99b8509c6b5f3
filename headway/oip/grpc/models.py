"""gRPC calls about the server and its models. Only principals that may use a model see anything about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headway.core.failures import error_of
from headway.errors import NO_WORKERS, NOT_FOUND, NOT_IMPLEMENTED, RequestError
from headway.gateway.limiter import Limiter
from headway.grpc import messages
from headway.grpc.calls import PortContext
from headway.model import Principal
from headway.oip import metadata
from headway.oip.rest.models import ShownModels

_NOT_THERE = (NOT_FOUND, NO_WORKERS)
"""Codes for a model or version that is not served, or not known to be. Clients that wait for a model poll until it is ready."""

Answer = Callable[[Any, Principal], Awaitable[Any]]
"""Return the members of the answer to a request message and its principal. Raises RequestError."""


class OpenInference:
    """The protocol's methods other than inference. `ready` returns True if this process should get traffic."""

    def __init__(self, port: PortContext, ready: Callable[[], Awaitable[bool]]) -> None:
        self._models = ShownModels(port.gateway, port.entrance.anonymous, ready)

    @property
    def for_everybody(self) -> dict[str, Answer]:
        return {"ServerLive": self._live, "ServerReady": self._server_ready, "ServerMetadata": self._server}

    @property
    def for_principals(self) -> dict[str, Answer]:
        return {
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._never,
            "RepositoryModelUnload": self._never,
        }

    async def _live(self, message: Any, principal: Principal) -> Any:
        return {"live": True}

    async def _server_ready(self, message: Any, principal: Principal) -> Any:
        return {"ready": await self._models.ready()}

    async def _server(self, message: Any, principal: Principal) -> Any:
        return metadata.ServerMetadata()

    async def _model_ready(self, message: Any, principal: Principal) -> Any:
        try:
            model = self._find(message, principal)
        except RequestError as exc:
            if exc.code in _NOT_THERE:
                return {"ready": False}
            raise
        return {"ready": await self._models.is_ready(model)}

    async def _model(self, message: Any, principal: Principal) -> Any:
        return self._models.metadata(self._find(message, principal))

    async def _config(self, message: Any, principal: Principal) -> Any:
        return {"config": self._models.config(self._find(message, principal))}

    async def _statistics(self, message: Any, principal: Principal) -> Any:
        model = self._find(message, principal) if message.name else ""
        return {"model_stats": self._models.statistics(principal, model)}

    async def _index(self, message: Any, principal: Principal) -> Any:
        return {"models": await self._models.index(principal, only_ready=message.ready)}

    async def _never(self, message: Any, principal: Principal) -> Any:
        message = "models are not loaded and unloaded by clients; start a worker for a model, and it is served"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    def _find(self, message: Any, principal: Principal) -> str:
        return self._models.find(message.name, message.version or None, principal)


def responder(
    method: str, answer: Answer, limiter: Limiter | None = None
) -> Callable[[bytes, Principal], Awaitable[bytes]]:
    """Make a function from a request message to its answer. With a `limiter`, calls count as polls."""
    request, response = messages.message_classes(messages.OPEN_INFERENCE, method)

    async def respond(body: bytes, principal: Principal) -> bytes:
        if limiter is not None and (over := limiter.poll(principal.limits)) is not None:
            raise error_of(over)
        members = await answer(messages.read(request, body), principal)
        return bytes(response(**msgspec.to_builtins(members)).SerializeToString())

    return respond
