"""Inference over a stream: each message is a request of its own, answered in order.

    client ──▶ read ──▶ a task for each request, MOST_ITEMS at once ──▶ answers, in the order of the requests

One that fails is answered with its error, and the stream goes on. What a call of its own would say of the error in its trailing
metadata stands in the parameters of that answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headway.errors import REQUEST_TIMEOUT, BadRequest, RequestError
from headway.grpc import messages
from headway.grpc.calls import PortContext, StreamCall, log, read_fields, unforeseen
from headway.grpc.inference_call import InferenceCall, ReadMessage
from headway.grpc.statuses import trailers_of

_REQUEST = messages.message("inference.ModelInferRequest")
_RESPONSE = messages.message("inference.ModelStreamInferResponse")

Item = asyncio.Task[tuple[bytes, int]]
"""Request of a stream on its way to the message of its answer, and the bytes that are counted for that."""
Items = asyncio.Queue[Item | None]
"""Requests of a stream in order; None at the end."""

MOST_ITEMS = 256
"""Most requests of one stream that are in hand at once; beyond them nothing is read."""


class InferStreamCall(StreamCall):
    """One call of ModelStreamInfer.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it, which hold for each request, but for an id.
        read: reads its messages.
        way: see RequestOptions.
    """

    __slots__ = ("_read",)

    def __init__(self, port: PortContext, metadata: Any, read: ReadMessage, way: str = "") -> None:
        # A proxy may give every call an id: it is that of the call, and each of its requests gets one of its own.
        super().__init__(port, [field for field in metadata if field[0] != "x-request-id"], way)
        self._read = read

    async def talk(self, context: Any) -> None:
        """Answer requests until the client has no more, or is to open another connection."""
        fields = read_fields(self.metadata)
        self.identify(fields.get(b"authorization", b""))
        if b"idempotency-key" in fields:
            raise BadRequest("the metadata idempotency-key is for one request, and a stream has many; leave it out")
        self.hold_room()
        items: Items = asyncio.Queue(MOST_ITEMS)
        begun: set[Item] = set()
        writing = asyncio.ensure_future(self._write(context, items))
        reading = asyncio.ensure_future(self._take_in(context, items, begun))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            end = await reading
            await items.put(None)
            await writing
        finally:
            reading.cancel()
            for task in (writing, *begun):
                task.cancel()
        if end is not None:
            raise end

    async def _take_in(self, context: Any, items: Items, begun: set[Item]) -> RequestError | None:
        """Begin each request that comes, until there are no more. Returns the error with which the call then ends."""
        while True:
            try:
                body = await self.next(context)
            except RequestError as exc:
                return exc
            if body is None:
                return None
            item = asyncio.ensure_future(self._answer(context, body))
            begun.add(item)
            item.add_done_callback(begun.discard)
            await items.put(item)

    async def _answer(self, context: Any, body: bytes) -> tuple[bytes, int]:
        """Message of the answer to one request, and how many of its bytes are counted until it has left."""
        call = InferenceCall(self.port, self.metadata, self._read, self._way)
        call.connection = self.connection
        held = 0
        try:
            held = self.keep(len(body))
            options, id = call.begin(context)
            message, _ = await call.infer(body, options, id)
            self.drop(held)
            held = 0
            answer = bytes(_RESPONSE(infer_response=message_of(message)).SerializeToString())
            return answer, self.keep(len(answer))
        except RequestError as exc:
            error = exc
        except Exception as exc:
            error = unforeseen(exc, call.shown)
        finally:
            self.drop(held)
            call.release()
        call.count_refusal(error)
        return _failed(body, error, call.shown), 0

    async def _write(self, context: Any, items: Items) -> None:
        """Write the answers in the order of the requests; a client that takes none of them for too long is cut off."""
        port = self.port
        while (item := await items.get()) is not None:
            answer, kept = await item
            try:
                async with asyncio.timeout(port.message_timeout):
                    await context.write(answer)
            except TimeoutError:
                message = (
                    f"no answer was taken within {port.settings.body_timeout_ms:g} ms (body_timeout_ms); read them"
                )
                await self._cut(RequestError(message, code=REQUEST_TIMEOUT))
            self.drop(kept)

    async def _cut(self, error: RequestError) -> None:
        """Cut the connection, as an answer is on its way and no status can pass it. Returns never: the call is cancelled."""
        self.count_refusal(error)
        log.info("a client takes no answers", request_id=self.shown, error=error.message)
        if self.connection is not None:
            self.connection.shutdown()
        await asyncio.get_running_loop().create_future()


def message_of(body: bytes) -> Any:
    """Answer to one request as a message."""
    return messages.message("inference.ModelInferResponse").FromString(body)


def _failed(body: bytes, error: RequestError, shown: str) -> bytes:
    """Message of the answer to a request that has failed."""
    text = error.message.encode("utf-8", "backslashreplace").decode()
    answer = _RESPONSE(error_message=text, infer_response={"id": _id_of(body)})
    for name, value in trailers_of(error.code, shown, error.retry_after, error.reason):
        answer.infer_response.parameters[name].string_param = value
    return bytes(answer.SerializeToString())


def _id_of(body: bytes) -> str:
    """Id that the client gave a request; empty where it cannot be read."""
    try:
        return str(messages.read(_REQUEST, body).id)
    except BadRequest:
        return ""
