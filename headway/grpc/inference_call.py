"""Inference calls: from the metadata and the message to the gateway, and back to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from time import monotonic
from typing import NamedTuple

from headway.core.failures import error_of, failure_of, no_text, unread
from headway.core.json_pages import SHORT, Steps
from headway.doors.answer_pieces import LargeAnswer
from headway.doors.exchange import Exchange, Outcome, Reader, outcome_headers
from headway.doors.fields import ID_PREFIX, MOMENT, read_id, read_options, with_time_left
from headway.errors import RequestError
from headway.gateway.fan_out import FanOut, joined
from headway.gateway.pending import FutureSink
from headway.grpc.call_stream import CallStream
from headway.grpc.calls import Call, PortContext, read_fields
from headway.grpc.status import Metadata
from headway.model import Reply, RequestOptions

MOST_ANSWER = 32 << 20  # Maximum total size in bytes of a request's outputs, which are sent as one message.
_ONE_MESSAGE = "because over gRPC an answer is a single message"

_NO_FIELDS: Mapping[bytes, bytes] = {}


class _Usual(NamedTuple):
    """Facts shared by all calls with the same metadata."""

    authorization: bytes
    options: RequestOptions


class InferenceCall(Call):
    """A call to an inference method. `read` turns the request message into an exchange, which writes the response message."""

    __slots__ = ("_begun", "_charged", "_exchange", "_fan_out", "_read", "_reply", "_sink")

    def __init__(self, port: PortContext, stream: CallStream, read: Reader, way: str = "") -> None:
        super().__init__(port, stream, way)
        self._read = read
        self._begun = self.begun
        self._charged = False
        self._exchange: Exchange | None = None
        self._sink: FutureSink | None = None  # Set while the outcome of the request is awaited.
        self._fan_out: FanOut | None = None
        self._reply: Reply | None = None

    async def answer(self) -> tuple[bytes, Metadata]:
        options, id = self.begin()
        if self.principal.limits:  # Limits the number of messages in transit. Refunded once the message has arrived.
            self.port.entrance.charge(self.principal)
            self._charged = True
        message, marks = await self.infer(await self.read(), options, id)
        self.keep(len(message))
        return message, (("x-request-id", self.shown), *marks, *self.limits_left())

    def begin(self) -> tuple[RequestOptions, str]:
        """Identify the principal, check its limits, and return the request's options and id. Raises RequestError."""
        port, entrance, head = self.port, self.port.entrance, self.stream.head
        remaining = self.stream.time_remaining()
        is_usual = (remaining is None or remaining > port.longest) and self.headers is head.headers
        usual = head.usual if is_usual and isinstance(head.usual, _Usual) else None
        fields = read_fields(self.headers) if usual is None else _NO_FIELDS
        id = read_id(fields) if usual is None else ""
        chosen = bool(id)
        id = id or entrance.new_id()
        self.shown = ID_PREFIX + id
        authorization = fields.get(b"authorization", b"") if usual is None else usual.authorization
        principal = self.identify(authorization)
        if principal.limits and (over := entrance.excess(principal, id)) is not None:
            self.tier = None
            raise over
        if usual is not None:
            return usual.options, id
        origin = self.stream.connection.address if entrance.anonymous else None
        longest = port.longest if remaining is None or remaining > port.longest else max(remaining, MOMENT)
        try:
            options = read_options(fields, port.settings, longest, chosen, origin, way=self._way)
        except RequestError:
            entrance.charge(principal)
            raise
        if is_usual and not chosen:
            head.usual = _Usual(authorization, options)
        return options, id

    async def infer(self, body: bytes, options: RequestOptions, id: str) -> tuple[bytes, Metadata]:
        """Submit a message's request when it is the owner's turn, and wait for the outcome; see `submit` and `outcome`."""
        size = len(body)
        try:
            if size <= SHORT:
                work = partial(self.submit, body, options, id)
                del body  # Only the entry holds a reference now.
                await self.port.turns.take(self.owner, work)
                del work
            else:
                await self.take_long(body, options, id)
                del body
        except asyncio.CancelledError:
            self.abandon()
            raise
        self.drop(size)
        return await self.outcome()

    async def take_long(self, body: bytes, options: RequestOptions, id: str) -> Exchange:
        """Decode a long message, one step in each of the owner's turns, and submit its request. Raises RequestError if the
        request is invalid or its time is up. The decoded bytes are charged in any case."""
        turns, principal, begun, size = self.port.turns, self.principal, monotonic(), 0
        steps = self._long_steps(body, options)
        try:
            while isinstance(read := await turns.take(self.owner, partial(_step, steps)), int):
                size += read
                if monotonic() - begun > options.timeout:
                    raise error_of(unread(options.timeout))
            waited = monotonic() - begun
            return await turns.take(self.owner, partial(self.submit, b"", options, id, exchange=read, spent=waited))
        finally:
            self.port.entrance.charge_pages(principal, size)

    def _long_steps(self, body: bytes, options: RequestOptions) -> Steps[Exchange]:
        entrance, served, only = self.port.entrance, self.port.gateway.served, self.principal.models
        try:
            return (yield from self._read.steps(body, options, served.seen_by(only) if only else served))
        except RequestError:
            if self._charged:
                entrance.refund(self.principal)
            entrance.charge(self.principal)
            raise

    def submit(
        self, body: bytes, options: RequestOptions, id: str, waited: float, *, exchange: Exchange | None = None, spent: float = 0.0
    ) -> Exchange:  # fmt: skip
        """Submit a message's request, and return its exchange. `exchange` is given if the message is already decoded. The
        message waited `waited` seconds for its turn; decoding took `spent` seconds. Raises RequestError if it is invalid."""
        entrance = self.port.entrance
        served, only = entrance.gateway.served, self.principal.models
        waited += spent
        self._begun = monotonic() - waited
        if self._charged:
            entrance.refund(self.principal)
        if exchange is None:
            try:
                exchange = self._read.at_once(body, options, served.seen_by(only) if only else served)
            except RequestError:
                entrance.charge(self.principal)
                raise
        exchange.options = with_time_left(exchange.options, waited, self.stream.time_remaining())
        asker = self.principal
        principal = self.principal = entrance.principal_for(exchange, asker)
        self.submitted = True
        self._exchange, sink = exchange, FutureSink()
        # Hardly any other request would use a lane for rare options.
        if exchange.options is options and options.timeout == self.port.longest:
            input = exchange.input
            if not isinstance(input, list):
                lane = entrance.gateway.lane(asker, options, exchange.model)
                exchange.input, self.principal, self._sink = "", lane.principal, sink
                if lane.open or (lane.rows and served[lane.model].takes_unweighed(input)):
                    entrance.gateway.enter(sink, lane, id, input, exchange.parameters)
                else:
                    entrance.gateway.take_in(sink, lane, options, id, input, exchange.parameters)
                return exchange
        self._fan_out = entrance.submit(sink, principal, id, exchange, self.owner, MOST_ANSWER, _ONE_MESSAGE)
        self._sink = sink
        return exchange

    def abandon(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if self._fan_out is not None:
            self._fan_out.abandon()
        else:
            self.port.gateway.abandon(sink, self.principal.tenant, self.shown.removeprefix(ID_PREFIX))

    async def outcome(self) -> tuple[bytes, Metadata]:
        """Wait for the outcome. Return the answer's message, and metadata about the outcome. Raises RequestError."""
        exchange, sink = self._exchange, self._sink
        if exchange is None or sink is None:
            raise RuntimeError("no request is submitted")
        try:
            replies = await sink.replies
        except asyncio.CancelledError:
            self.abandon()
            raise
        room = None if self._fan_out is None else self._fan_out.room
        self._sink = self._fan_out = None
        reply = self._reply = joined(replies[0].id, replies)
        self.tier = None
        if reply.output is None:
            raise error_of(failure_of(reply))
        milliseconds = int((monotonic() - self._begun) * 1e6) / 1000
        outputs = [part.output for part in replies if part.output is not None]
        try:
            version = (reply.ran.version if reply.ran is not None else "") or self.port.settings.model_version
            tokens = [part.tokens for part in replies]
            _, message = exchange.write(Outcome(self.shown, outputs, milliseconds, version, tokens))
            if isinstance(message, Iterator):
                if room is None or room.held:
                    message = await LargeAnswer(message, room).whole(self.port.gateway.turns, self.owner)
                else:
                    message = b"".join(message)
        except UnicodeEncodeError:
            raise error_of(no_text()) from None
        finally:
            if room is not None:
                room.shrink(0)
        return message, outcome_headers(reply)

    def refuse(self, error: RequestError, more: Metadata = ()) -> None:
        marks = outcome_headers(self._reply) if self._reply is not None else ()
        super().refuse(error, more + marks)


def _step(steps: Steps[Exchange], waited: float) -> Exchange | int:
    """Do one step of decoding a message. Return the number of bytes decoded or, after the last step, the exchange."""
    try:
        return next(steps)
    except StopIteration as stop:
        exchange: Exchange = stop.value
        return exchange
