"""Acceptors of calls: many calls of a method are taken in within one turn of the event loop.

grpc.aio's server asks its C library for one call at a time, and takes some four turns of the event loop for each. A process that
gets little processor time has few turns, so that calls waited seconds for theirs where requests over HTTP waited none. Here many
coroutines ask beside the server's own loop. They ask for calls of methods that are registered, as the library tells their names.

The names that this takes of grpc.aio are its own, and differ between versions. With a version that has others the server's own loop
takes all calls in.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import grpc
from grpc._cython import cygrpc

from headway.grpc.methods import FREQUENT, Methods
from headway.runtime.logger import get_logger

log = get_logger(__name__)

AT_ONCE = 16
"""Calls of one method that are asked for at once."""

_SERVE = ("method_handler", "rpc_state", "loop")
_NAMES = {
    "_handle_stream_unary_rpc": _SERVE,
    "_handle_stream_stream_rpc": _SERVE,
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}
"""Functions of the library that serve a call, and their parameters."""


class CallAcceptors:
    """Acceptors of one server's calls.

    Arguments:
        server: server, which has not started yet.
        methods: methods that it serves.
    """

    def __init__(self, server: grpc.aio.Server, methods: Methods) -> None:
        self._server, self._methods = server, methods
        self._core: Any = getattr(server, "_server", None)
        self._many = hasattr(self._core, "_request_registered_call") and all(map(_known, _NAMES.items()))
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self) -> None:
        """Register the methods with the server, before it starts."""
        self._server.add_generic_rpc_handlers((self._methods,))
        if not self._many:
            log.info("gRPC takes calls in one at a time, as its version is not known here", version=grpc.__version__)
            return
        for name in FREQUENT:
            service, _, method = name[1:].partition("/")
            self._server.add_registered_method_handlers(service, {method: self._methods.repeated(name)})

    def start(self) -> None:
        """Take calls in until the server stops. It has started."""
        if self._many:
            for name in FREQUENT:
                for _ in range(AT_ONCE):
                    self._run(self._accept(name))

    def _run(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, method: str) -> None:
        loop, name, handler = asyncio.get_running_loop(), method.encode(), self._methods.repeated(method)
        streams = handler.response_streaming
        serve = cygrpc._handle_stream_stream_rpc if streams else cygrpc._handle_stream_unary_rpc
        while self._core.is_running():
            try:
                state = await self._core._request_registered_call(name)
            except cygrpc._RequestCallError:  # The server stops.
                continue
            call = serve(handler, state, loop)
            self._run(cygrpc._schedule_rpc_coro(call, state, loop, method))


def _known(function: tuple[str, tuple[str, ...]]) -> bool:
    """Whether the library has a function with such parameters."""
    name, parameters = function
    found = getattr(cygrpc, name, None)
    return found is not None and tuple(inspect.signature(found).parameters) == parameters
