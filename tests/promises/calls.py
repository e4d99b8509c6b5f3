"""Calls to a gateway's gRPC port, with their answers translated to HTTP."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc

from headway.errors import DRAINING
from tests.promises.ways_in import Sent, Streamed, Told, WayIn, place_of_message, read_streamed, status_of_code

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
STACK = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "DEADLINE_EXCEEDED"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (413, "PAYLOAD_TOO_LARGE"),
}
"""HTTP statuses and codes for the gRPC statuses of calls that gRPC's own stack ends."""
FITTING = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, 422),
    grpc.StatusCode.UNAUTHENTICATED: (401,),
    grpc.StatusCode.PERMISSION_DENIED: (403,),
    grpc.StatusCode.NOT_FOUND: (404,),
    grpc.StatusCode.ABORTED: (409,),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (413, 429),
    grpc.StatusCode.INTERNAL: (500, 502),
    grpc.StatusCode.UNAVAILABLE: (503,),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, 504),
}
"""The HTTP statuses of errors that each gRPC status may stand for."""
NOBODY = "failed to connect to all addresses"
"""gRPC's message if it could not connect."""

Metadata = Sequence[tuple[str, str]]


class Answered(NamedTuple):
    """The answer to a call or stream request: the matching HTTP status (0 if none) and the error code. `blamed` is the
    index of the input that an error names, or -1. `taken` is False if a stream ended normally before it had read the
    request."""

    status: int
    code: str
    fields: dict[str, str]
    told: Told
    blamed: int = -1
    taken: bool = True


def channel(port: int) -> Any:
    """Open one client's connection. It connects on first use."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)


async def answered(way: WayIn, call: Any) -> Answered:
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
    """A call with a stream of requests, answered in order. `ended` is the answer for those left when it ends."""

    def __init__(self, opened: Any) -> None:
        self._call = opened
        self._waiting: deque[tuple[str, asyncio.Future[Answered]]] = deque()
        self._turn = asyncio.Lock()
        self._reading = asyncio.ensure_future(self._read())
        self.ended: Answered | None = None

    async def ask(self, sent: Sent, id: str) -> Answered:
        """Send a request with this id, and wait for its answer."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if self.ended is not None:
                return self.ended
            self._waiting.append((id, future))
            writing = asyncio.ensure_future(self._call.write(sent.body))
            # A write never returns if the call was cancelled before it had a connection.
            await asyncio.wait((writing, self._reading), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        return await future

    def cancel(self) -> None:
        """Cancel the call without waiting."""
        self._call.cancel()

    async def close(self) -> None:
        if self.ended is None:
            await self._call.done_writing()
        await self._reading

    async def _read(self) -> None:
        end = Answered(0, "the stream has ended without a status", {}, Told([]))
        try:
            async for body in self._call:
                id, future = self._waiting[0]
                found = read_streamed(body)
                assert found.id == id, "a stream is answered in another order"
                self._waiting.popleft()
                future.set_result(_of_stream(found))
        except grpc.aio.AioRpcError as error:
            end = _failed(error)
            end = end._replace(taken=end.code != DRAINING)
        except asyncio.CancelledError:
            end = end._replace(code="the stream was broken off")
        finally:
            self.ended = end
            for _, future in self._waiting:
                if not future.done():
                    future.set_result(end)


def _of_stream(found: Streamed) -> Answered:
    if found.told.outputs:
        return Answered(200, "", found.fields, found.told)
    code = found.told.code
    status = status_of_code(code, found.fields["grpc-retry-pushback-ms"] != "-1")
    return Answered(status, code, found.fields, found.told, place_of_message(found.error))


def begin(
    way: WayIn, channel: Any, sent: Sent, metadata: Metadata, id: str, within: float
) -> tuple[Awaitable[Answered], Callable[[], object]]:
    """Begin a unary or stream call. Returns its answer and a function to cancel it. Streams have no deadline."""
    if way.wire == "stream":
        stream = Stream(channel.stream_stream(sent.path)(metadata=metadata))
        return stream.ask(sent, id), stream.cancel
    call = channel.unary_unary(sent.path)(sent.body, metadata=metadata, timeout=within)
    return answered(way, call), call.cancel
