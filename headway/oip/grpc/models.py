"""The Open Inference Protocol over gRPC but for inference: what is said of the server and its models.

What is said of a model is for principals that may ask it.
"""

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
"""Codes of a model or version that is not served, or of which that is not known now: who waits for it asks until it is ready."""

Answer = Callable[[Any, Principal], Awaitable[Any]]
"""Request message, and its principal, to the answer's members. Raises RequestError."""


class OpenInference:
    """Methods of the protocol but for inference.

    Arguments:
        port: context of the port.
        ready: whether this process should get traffic.
    """

    def __init__(self, port: PortContext, ready: Callable[[], Awaitable[bool]]) -> None:
        self._models = ShownModels(port.gateway, port.entrance.anonymous, ready)

    @property
    def for_everybody(self) -> dict[str, Answer]:
        """Methods that need no credential, by name."""
        return {"ServerLive": self._live, "ServerReady": self._server_ready, "ServerMetadata": self._server}

    @property
    def for_principals(self) -> dict[str, Answer]:
        """Methods for known principals, by name."""
        return {
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._never,
            "RepositoryModelUnload": self._never,
        }

    async def _live(self, asked: Any, principal: Principal) -> Any:
        return {"live": True}

    async def _server_ready(self, asked: Any, principal: Principal) -> Any:
        return {"ready": await self._models.ready()}

    async def _server(self, asked: Any, principal: Principal) -> Any:
        return metadata.ServerMetadata()

    async def _model_ready(self, asked: Any, principal: Principal) -> Any:
        try:
            model = self._find(asked, principal)
        except RequestError as exc:
            if exc.code in _NOT_THERE:
                return {"ready": False}
            raise
        return {"ready": await self._models.is_ready(model)}

    async def _model(self, asked: Any, principal: Principal) -> Any:
        return self._models.metadata(self._find(asked, principal))

    async def _config(self, asked: Any, principal: Principal) -> Any:
        return {"config": self._models.config(self._find(asked, principal))}

    async def _statistics(self, asked: Any, principal: Principal) -> Any:
        model = self._find(asked, principal) if asked.name else ""
        return {"model_stats": self._models.statistics(principal, model)}

    async def _index(self, asked: Any, principal: Principal) -> Any:
        return {"models": await self._models.index(principal, only_ready=asked.ready)}

    async def _never(self, asked: Any, principal: Principal) -> Any:
        message = "models are not loaded and unloaded by clients; start a worker for a model, and it is served"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    def _find(self, asked: Any, principal: Principal) -> str:
        """Model that a message names. Raises RequestError when it is none that the principal may ask."""
        return self._models.find(asked.name, asked.version or None, principal)


def responder(
    method: str, answer: Answer, limiter: Limiter | None = None
) -> Callable[[bytes, Principal], Awaitable[bytes]]:
    """Make the function from a method's message to the message of its answer. `limiter`: limiter for which the call is a poll."""
    request, response = messages.message_classes(messages.OPEN_INFERENCE, method)

    async def respond(body: bytes, principal: Principal) -> bytes:
        if limiter is not None and (over := limiter.poll(principal.limits)) is not None:
            raise error_of(over)
        found = await answer(messages.read(request, body), principal)
        return bytes(response(**msgspec.to_builtins(found)).SerializeToString())

    return respond
