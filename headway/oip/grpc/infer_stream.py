"""Inference over a stream: each message is a request of its own, answered in order.

    client ──▶ read ──▶ its turn ──▶ a task for each request, MOST_ITEMS at once ──▶ answers, in the order of the requests

The next message is read when the one before has had its turn, and when there is room for it. The bytes of a message count for the
tenant until its answer has left. Where they are too many, a message takes the room that its stream holds for reading, and nothing is
read until its answer has left. So a client that writes faster than it is served is held back, and never refused for it.

One that fails is answered with its error, and the stream goes on. What a call of its own would say of the error in its trailing
metadata stands in the parameters of that answer.
"""

from __future__ import annotations

import asyncio
from functools import partial

from headway.core.json_pages import SHORT
from headway.doors.exchange import Reader
from headway.errors import BadRequest, RequestError
from headway.grpc import messages
from headway.grpc.calls import PortContext, StreamCall, read_fields, unforeseen
from headway.grpc.connection import CallStream
from headway.grpc.inference_call import InferenceCall
from headway.grpc.statuses import Metadata, trailers_of
from headway.oip.grpc.infer_messages import front_of
from headway.oip.parameters import FINAL, FINAL_WISH

_RESPONSE = messages.message("inference.ModelStreamInferResponse")
_INFERRED = messages.message("inference.ModelInferResponse")


class Item:
    """Request of a stream on its way to the message of its answer.

    Arguments:
        call: the request, as a call of its own would be.

    Attributes:
        error: error that it has failed with before it was submitted; None for none.
        id: id that the client gave it.
        final: whether its answer says that it is the last.
        held: bytes that are counted for it.
        alone: whether it has the room that its stream holds for reading.
        answer: message of the answer, once it is begun.
        left: set once that has left.
    """

    __slots__ = ("alone", "answer", "call", "error", "final", "held", "id", "left")

    answer: asyncio.Task[bytes]

    def __init__(self, call: InferenceCall) -> None:
        self.call = call
        self.error: RequestError | None = None
        self.id = ""
        self.final = False
        self.held = 0
        self.alone = False
        self.left = asyncio.Event()


Items = asyncio.Queue[Item | None]
"""Requests of a stream in order; None at the end."""
Begun = dict[asyncio.Task[bytes], Item]
"""Requests of a stream whose answers are not made yet."""

_TAG = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2,))
"""Byte before the length of the answer to one request within the message of a stream."""

_FINAL = bytes(_INFERRED(parameters={FINAL: {"bool_param": True}}).SerializeToString())
"""Parameter that makes the answer to a request its last, as it stands behind the message of that answer."""

MOST_ITEMS = 256
"""Most requests of one stream that are in hand at once; beyond them nothing is read."""


class InferStreamCall(StreamCall):
    """One call of ModelStreamInfer.

    Arguments:
        port: context of the port.
        stream: stream that it came on. Its metadata hold for each request, but for an id.
        read: reads its messages.
        way: see RequestOptions.
    """

    __slots__ = ("_read",)

    def __init__(self, port: PortContext, stream: CallStream, read: Reader, way: str = "") -> None:
        super().__init__(port, stream, way)
        # A proxy may give every call an id: it is that of the call, and each of its requests gets one of its own.
        self.headers = [field for field in stream.head.headers if field[0] != b"x-request-id"]
        self._read = read

    async def talk(self) -> Metadata:
        """Answer requests until the client has no more, or is to open another connection."""
        fields = read_fields(self.headers)
        self.identify(fields.get(b"authorization", b""))
        if b"idempotency-key" in fields:
            raise BadRequest("the metadata idempotency-key is for one request, and a stream has many; leave it out")
        self.hold_room()
        items: Items = asyncio.Queue(MOST_ITEMS)
        begun: Begun = {}
        writing = asyncio.ensure_future(self._write(items))
        reading = asyncio.ensure_future(self._take_in(items, begun))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            end = await reading
            await items.put(None)
            await writing
        finally:
            reading.cancel()
            writing.cancel()
            for answer, item in list(begun.items()):
                answer.cancel()
                del item.answer  # A cancelled task keeps its item: together they would be a cycle.
                item.call.abandon()
                item.call.release()
        if end is not None:
            raise end
        return ()

    async def _take_in(self, items: Items, begun: Begun) -> RequestError | None:
        """Begin each request that comes, until there are no more. Returns the error with which the call then ends."""
        while True:
            try:
                body = await self.next()
            except RequestError as exc:
                return exc
            if body is None:
                return None
            item = Item(InferenceCall(self.port, self.stream, self._read, self._way))
            item.call.headers = self.headers
            self._hold(item, len(body))
            try:
                if len(body) <= SHORT:
                    work = partial(self._begin, item, body)
                    del body  # Nothing but its entry stays of it.
                    await self.port.turns.take(self.owner, work)
                    del work
                else:
                    await self._begin_long(item, body)
                    del body
            except asyncio.CancelledError:
                item.call.abandon()
                item.call.release()
                raise
            item.answer = asyncio.ensure_future(self._answer(item))
            begun[item.answer] = item
            item.answer.add_done_callback(begun.pop)
            await items.put(item)
            if item.alone:
                await item.left.wait()

    def _hold(self, item: Item, amount: int) -> None:
        """Count the bytes of a request, or have it take the room of the stream."""
        if self.port.quotas.may_hold(self.owner, amount):
            item.held = amount
            self.kept += amount
        else:
            item.alone = True

    def _begin(self, item: Item, body: bytes, waited: float) -> None:
        """Submit a request in its turn."""
        try:
            options, id = item.call.begin()
            item.call.submit(body, options, id, waited)
            item.id, item.final = item.call.asked_id, item.call.asks_final
        except Exception as exc:
            _refuse(item, body, exc)

    async def _begin_long(self, item: Item, body: bytes) -> None:
        """Submit a request whose message is long, and is read in turns."""
        try:
            options, id = item.call.begin()
            await item.call.take_long(body, options, id)
            item.id, item.final = item.call.asked_id, item.call.asks_final
        except Exception as exc:
            _refuse(item, body, exc)

    async def _answer(self, item: Item) -> bytes:
        """Message of the answer to one request."""
        call = item.call
        try:
            if item.error is not None:
                raise item.error
            message, _ = await call.outcome()
            self._hold_answer(item, len(message))
            return _succeeded(message + _FINAL if item.final else message)
        except RequestError as exc:
            error = exc.with_traceback(None)
        except Exception as exc:
            error = unforeseen(exc, call.shown)
        finally:
            call.release()
        call.count_refusal(error)
        return _failed(item, error)

    def _hold_answer(self, item: Item, amount: int) -> None:
        """Count the bytes of an answer in place of its request's. Raises RequestError: the owner holds too many."""
        room = self.port.settings.max_body_bytes if item.alone else item.held
        if amount > room:
            item.held += self.keep(amount - room)
        elif not item.alone:
            self.drop(room - amount)
            item.held = amount

    async def _write(self, items: Items) -> None:
        """Write the answers in the order of the requests; a client that takes none of them for too long is cut off."""
        while (item := await items.get()) is not None:
            answer = await item.answer
            await self.send(answer)
            self.drop(item.held)
            item.left.set()


def _refuse(item: Item, body: bytes, exc: Exception) -> None:
    """Note why a request is not submitted."""
    item.error = exc.with_traceback(None) if isinstance(exc, RequestError) else unforeseen(exc, item.call.shown)
    item.id, item.final = _told_in(body)


def _succeeded(message: bytes) -> bytes:
    """Message of the answer to a request, around the one that a call of its own would have."""
    return b"%b%b%b" % (_TAG, messages.varint(len(message)), message)


def _failed(item: Item, error: RequestError) -> bytes:
    """Message of the answer to a request that has failed."""
    text = error.message.encode("utf-8", "backslashreplace").decode()
    answer = _RESPONSE(error_message=text, infer_response={"id": item.id})
    for name, value in trailers_of(error, item.call.shown):
        answer.infer_response.parameters[name].string_param = value
    if item.final:
        answer.infer_response.parameters[FINAL].bool_param = True
    return bytes(answer.SerializeToString())


def _told_in(body: bytes) -> tuple[str, bool]:
    """Id that the client gave a request, and whether its answer says that it is the last; none of it where it cannot be read."""
    try:
        asked = front_of(body)
    except BadRequest:
        return "", False
    return str(asked.id), FINAL_WISH in asked.parameters and asked.parameters[FINAL_WISH].bool_param
