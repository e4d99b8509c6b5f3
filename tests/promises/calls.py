"""Calls of a client to a gateway's gRPC port, whose answers read like those of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from tests.promises.ways_in import Sent, Told, WayIn, place_of_message, read_streamed, status_of_code

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
STACK = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "DEADLINE_EXCEEDED"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (413, "PAYLOAD_TOO_LARGE"),
}
"""Statuses of calls that gRPC's own stack ends, as HTTP statuses and codes."""
FITTING = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, 422),
    grpc.StatusCode.UNAUTHENTICATED: (401,),
    grpc.StatusCode.PERMISSION_DENIED: (403,),
    grpc.StatusCode.NOT_FOUND: (404,),
    grpc.StatusCode.ABORTED: (409,),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (413, 429),
    grpc.StatusCode.INTERNAL: (500, 502),
    grpc.StatusCode.UNAVAILABLE: (503,),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504,),
}
"""Statuses of calls, and the HTTP statuses of the errors that they stand for."""
NOBODY = "failed to connect to all addresses"
"""What gRPC says when it could not connect."""

Metadata = Sequence[tuple[str, str]]


class Answered(NamedTuple):
    """Answer to a call. A status of 0 means that there was none: the connection has failed, as `code` tells. `blamed` is the place
    of the input that an error names.
    """

    status: int
    code: str
    fields: dict[str, str]
    told: Told
    blamed: int = -1


def channel(port: int) -> Any:
    """Connection of one client, made when it is first used."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)


async def answered(way: WayIn, call: Any) -> Answered:
    """Answer to a unary call."""
    try:
        body = await call
    except grpc.aio.AioRpcError as error:
        return _failed(error)
    fields = {key: str(value) for key, value in (await call.trailing_metadata() or ())}
    return Answered(200, "", fields, way.read(200, fields, body))


def _failed(error: grpc.aio.AioRpcError) -> Answered:
    fields = {key: str(value) for key, value in error.trailing_metadata() or ()}
    code = fields.get("x-headway-error", "")
    if code:
        status = status_of_code(code, error.code() is grpc.StatusCode.ABORTED)
        if status not in FITTING.get(error.code(), ()):
            status, code = 500, f"{code} told as {error.code().name}"
        return Answered(status, code, fields, Told([], code), place_of_message(error.details() or ""))
    status, code = STACK.get(error.code(), (0, f"{error.code().name}: {error.details()}"))
    return Answered(status, code, fields, Told([], code))


class Stream:
    """One call with a stream of requests, answered in their order."""

    def __init__(self, opened: Any) -> None:
        self._call = opened
        self._waiting: dict[str, asyncio.Future[Told]] = {}
        self._order: list[str] = []
        self._turn = asyncio.Lock()
        self._reading = asyncio.ensure_future(self._read())

    async def ask(self, sent: Sent, id: str) -> Told:
        """Send a request of this id, and wait for its answer."""
        future: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        async with self._turn:
            self._order.append(id)
            await self._call.write(sent.body)
        return await future

    async def close(self) -> None:
        """Send no more, and wait until all is answered."""
        await self._call.done_writing()
        await self._reading

    async def _read(self) -> None:
        async for body in self._call:
            id, told = read_streamed(body)
            assert id == self._order.pop(0), "a stream is answered in another order"
            self._waiting.pop(id).set_result(told)
