"""Inference over a stream: each message is a request, and answers are sent in the order of the requests.

    client ──▶ read ──▶ its turn ──▶ a task for each request, at most MOST_ITEMS ──▶ answers, in the order of the requests

The next message is read once the previous one has had its turn and there is room for it. A message's bytes are charged to its tenant
until its answer has been sent. If that would be too many bytes for the tenant, the message uses the room that the stream reserved for
reading, and nothing more is read until its answer has been sent. So a client that writes too fast is slowed down but never refused. A
failed request is answered with its error. The answer's parameters contain what a unary call reports in its trailing metadata.
"""

from __future__ import annotations

import asyncio
from functools import partial

from headway import protos
from headway.core.json_pages import SHORT
from headway.doors.exchange import Reader
from headway.errors import BadRequest, RequestError
from headway.grpc.call_stream import CallStream
from headway.grpc.calls import PortContext, StreamCall, read_fields, unforeseen
from headway.grpc.inference_call import InferenceCall
from headway.grpc.status import Metadata, trailers_of
from headway.http.problem import escaped
from headway.oip.grpc.infer_messages import front_of
from headway.oip.parameters import FINAL, FINAL_WISH

_RESPONSE = protos.message("inference.ModelStreamInferResponse")
_INFERRED = protos.message("inference.ModelInferResponse")


class Item:
    """One request on a stream, and the unary `call` that runs it. `error` is why it wasn't submitted. If `final`, its last answer is
    marked as such. `held` is the number of bytes charged for it. An `alone` request is charged nothing: it uses the room that the
    stream reserved for reading, and nothing more is read until its answer is sent. `left` is set once its answer is sent."""

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


Items = asyncio.Queue[Item | None]  # The requests of a stream in order, and None at the end.
Begun = dict[asyncio.Task[bytes], Item]

_TAG = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2,))
_FINAL = bytes(_INFERRED(parameters={FINAL: {"bool_param": True}}).SerializeToString())  # Marks a last answer.
MOST_ITEMS = 256  # Maximum number of a stream's requests in progress. At the maximum, nothing more is read.


class InferStreamCall(StreamCall):
    """A ModelStreamInfer call. `read` decodes its messages. The call's metadata, except an id, apply to every request."""

    __slots__ = ("_read",)

    def __init__(self, port: PortContext, stream: CallStream, read: Reader, way: str = "") -> None:
        super().__init__(port, stream, way)
        # A proxy may give every call an id, but each request gets its own.
        self.headers = [field for field in stream.head.headers if field[0] != b"x-request-id"]
        self._read = read

    async def talk(self) -> Metadata:
        fields = read_fields(self.headers)
        self.identify(fields.get(b"authorization", b""))
        if b"idempotency-key" in fields:
            raise BadRequest(
                "the metadata idempotency-key is for a single request, but a stream has many; leave it out"
            )
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
                del item.answer  # A cancelled task refers to its item, so this would be a cycle.
                item.call.abandon()
                item.call.release()
        if end is not None:
            raise end
        return ()

    async def _take_in(self, items: Items, begun: Begun) -> RequestError | None:
        """Start each request as it arrives. Return the error that ends the call, if any."""
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
                    del body  # Only the entry holds a reference now.
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
        if self.port.quotas.may_hold(self.owner, amount):
            item.held = amount
            self.kept += amount
        else:
            item.alone = True

    def _begin(self, item: Item, body: bytes, waited: float) -> None:
        try:
            options, id = item.call.begin()
            exchange = item.call.submit(body, options, id, waited)
            item.id, item.final = exchange.id, exchange.final
        except Exception as exc:
            _refuse(item, body, exc)

    async def _begin_long(self, item: Item, body: bytes) -> None:
        try:
            options, id = item.call.begin()
            exchange = await item.call.take_long(body, options, id)
            item.id, item.final = exchange.id, exchange.final
        except Exception as exc:
            _refuse(item, body, exc)

    async def _answer(self, item: Item) -> bytes:
        call = item.call
        try:
            if item.error is not None:
                raise item.error
            message, _ = await call.outcome()
            self._hold_answer(item, len(message))
            if item.final:
                message += _FINAL
            return b"%b%b%b" % (_TAG, protos.varint(len(message)), message)
        except RequestError as exc:
            error = exc.with_traceback(None)
        except Exception as exc:
            error = unforeseen(exc, call.shown)
        finally:
            call.release()
        call.count_refusal(error)
        return _failed(item, error)

    def _hold_answer(self, item: Item, amount: int) -> None:
        """Charge the bytes of an answer instead of those of its request. Raises RequestError if the owner holds too many bytes."""
        room = self.port.settings.max_body_bytes if item.alone else item.held
        if amount > room:
            item.held += self.keep(amount - room)
        elif not item.alone:
            self.drop(room - amount)
            item.held = amount

    async def _write(self, items: Items) -> None:
        while (item := await items.get()) is not None:
            answer = await item.answer
            await self.send(answer)
            self.drop(item.held)
            item.left.set()


def _refuse(item: Item, body: bytes, exc: Exception) -> None:
    item.error = exc.with_traceback(None) if isinstance(exc, RequestError) else unforeseen(exc, item.call.shown)
    item.id, item.final = _id_and_final(body)


def _failed(item: Item, error: RequestError) -> bytes:
    answer = _RESPONSE(error_message=escaped(error.message), infer_response={"id": item.id})
    for name, value in trailers_of(error, item.call.shown):
        answer.infer_response.parameters[name].string_param = value
    if item.final:
        answer.infer_response.parameters[FINAL].bool_param = True
    return bytes(answer.SerializeToString())


def _id_and_final(body: bytes) -> tuple[str, bool]:
    """Return the id that a request carries, and True if its last answer must be marked; ("", False) for an unreadable message."""
    try:
        request = front_of(body)
    except BadRequest:
        return "", False
    return str(request.id), FINAL_WISH in request.parameters and request.parameters[FINAL_WISH].bool_param
