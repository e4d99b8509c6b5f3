"""Inference over a stream: each message is a request of its own, answered in order.

    client ──▶ read ──▶ a task for each request, MOST_ITEMS at once ──▶ answers, in the order of the requests

One that fails is answered with its error, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headway.errors import BadRequest, RequestError
from headway.grpc import messages
from headway.grpc.calls import PortContext, StreamCall, read_fields, unforeseen
from headway.grpc.inference_call import InferenceCall, ReadMessage

_REQUEST = messages.message("inference.ModelInferRequest")
_RESPONSE = messages.message("inference.ModelStreamInferResponse")

MOST_ITEMS = 256
"""Most requests of one stream that are in hand at once; beyond them nothing is read."""


class InferStreamCall(StreamCall):
    """One call of ModelStreamInfer.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it, which hold for each request.
        read: reads its messages.
    """

    __slots__ = ("_read",)

    def __init__(self, port: PortContext, metadata: Any, read: ReadMessage) -> None:
        super().__init__(port, metadata)
        self._read = read

    async def talk(self, context: Any) -> None:
        """Answer requests until the client has no more, or is to open another connection."""
        fields = read_fields(self.metadata)
        self.identify(fields.get(b"authorization", b""))
        for name in (b"idempotency-key", b"x-request-id"):
            if name in fields:
                raise BadRequest(
                    f"the metadata {name.decode()} is for one request, and a stream has many; leave it out"
                )
        self.hold_room()
        items: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MOST_ITEMS)
        begun: set[asyncio.Task[bytes]] = set()
        writing = asyncio.ensure_future(_write(context, items))
        try:
            end = await self._take_in(context, items, begun)
            await items.put(None)
            await writing
        finally:
            for task in (writing, *begun):
                task.cancel()
        if end is not None:
            raise end

    async def _take_in(
        self, context: Any, items: asyncio.Queue[asyncio.Task[bytes] | None], begun: set[asyncio.Task[bytes]]
    ) -> RequestError | None:
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

    async def _answer(self, context: Any, body: bytes) -> bytes:
        """Message of the answer to one request."""
        call = InferenceCall(self.port, self.metadata, self._read)
        call.connection = self.connection
        try:
            options, id = call.begin(context)
            message, _ = await call.infer(body, options, id)
            return bytes(_RESPONSE(infer_response=message_of(message)).SerializeToString())
        except RequestError as exc:
            error = exc
        except Exception as exc:
            error = unforeseen(exc, call.shown)
        finally:
            call.release()
        call.count_refusal(error)
        text = error.message.encode("utf-8", "backslashreplace").decode()
        return bytes(_RESPONSE(error_message=text, infer_response={"id": _id_of(body)}).SerializeToString())


async def _write(context: Any, items: asyncio.Queue[asyncio.Task[bytes] | None]) -> None:
    """Write the answers in the order of the requests."""
    while (item := await items.get()) is not None:
        await context.write(await item)


def message_of(body: bytes) -> Any:
    """Answer to one request as a message."""
    return messages.message("inference.ModelInferResponse").FromString(body)


def _id_of(body: bytes) -> str:
    """Id that the client gave a request; empty where it cannot be read."""
    try:
        return str(messages.read(_REQUEST, body).id)
    except BadRequest:
        return ""
