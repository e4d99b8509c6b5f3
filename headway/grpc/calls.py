"""Calls of the gRPC port: what all have in common, and those of inference.

gRPC's server asks for the handler of each call, and a call is its own handler: it knows its metadata before it is run. So
who asks is known before the message is read, and a stranger's message never is. All calls are declared as streams of
messages, since of such a call no message is read before it wants one.

A call is cancelled when its client has left or its deadline has passed. Its request is then abandoned, and never gets to a
GPU if it is not there yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc
import structlog

from headway.config import Settings
from headway.errors import DRAINING, INTERNAL, REQUEST_TIMEOUT, BadRequest, RequestError
from headway.gateway.fan_out import FanOut
from headway.gateway.pending import FutureSink
from headway.grpc.call_quotas import STRANGERS, CallQuotas
from headway.grpc.relay import ClientConnection, Relay
from headway.grpc.statuses import Metadata, details_of, status_of, trailers_of
from headway.http.authentication import stranger
from headway.http.error_responses import UNFORESEEN
from headway.http.inference.codecs import no_text
from headway.http.inference.exchange import Exchange
from headway.http.inference.inference_head import SHOWN, read_id, read_options
from headway.http.rate_limit_headers import RateLimitHeaders
from headway.http.server.connection_context import Intake, NewId
from headway.http.server.quotas import STRANGERS as UNKNOWN
from headway.identity.anonymous import AnonymousIdentity
from headway.model import DedupKind, Entry, Failure, Principal, Reply, RequestOptions
from headway.ports import Identity
from headway.runtime.counters import Counters

log = structlog.get_logger(__name__)

ReadMessage = Callable[[bytes, RequestOptions], Exchange]
"""Message to exchange, whose `write` returns the message of the answer behind header lines that are empty.

Raises RequestError.
"""

_FIELDS = {
    name: name.encode()
    for name in (
        "authorization", "cache-control", "idempotency-key", "x-request-id", "x-request-tier", "x-request-timeout-ms",
    )
}  # fmt: skip
"""Metadata that is read. It has the names and the meaning of the HTTP header fields."""

_SHARED = {
    (DedupKind.SAME, True): ("x-headway-cache", "hit"),
    (DedupKind.SAME, False): ("x-headway-cache", "collapsed"),
    (DedupKind.KEY, True): ("idempotency-replayed", "true"),
    (DedupKind.KEY, False): ("idempotency-replayed", "true"),
}


@dataclass(slots=True)
class PortContext:
    """Context shared by the calls of one gRPC port.

    Attributes:
        settings: bounds, times, tiers and the default model.
        intake: the gateway.
        identity: identity that knows the principals.
        counters: counters of refusals.
        new_id: makes request ids.
        quotas: quotas of calls.
        relay: connections of the clients.
        longest: seconds that a request may take.
        message_timeout: seconds within which a message has to come.
        anonymous: whether nobody is asked for a credential.
        rate_limits: writer of the metadata by which principals learn of their limits.
    """

    settings: Settings
    intake: Intake
    identity: Identity
    counters: Counters
    new_id: NewId
    quotas: CallQuotas
    relay: Relay
    longest: float = field(init=False)
    message_timeout: float = field(init=False)
    anonymous: bool = field(init=False)
    rate_limits: RateLimitHeaders = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.settings.request_timeout_ms / 1000
        self.message_timeout = self.settings.body_timeout_ms / 1000
        self.anonymous = isinstance(self.identity, AnonymousIdentity)
        self.rate_limits = RateLimitHeaders(self.intake)


class Call:
    """One call of a method with one request and one answer.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
    """

    request_streaming = True
    response_streaming = False
    request_deserializer = response_serializer = None
    unary_unary = unary_stream = stream_stream = None

    __slots__ = ("connection", "counted", "kept", "metadata", "owner", "port", "shown", "tier")

    def __init__(self, port: PortContext, metadata: Sequence[tuple[str, Any]]) -> None:
        self.port = port
        self.metadata = metadata
        self.connection: ClientConnection | None = None
        self.owner = ""
        self.counted = False
        self.kept = 0
        self.shown = ""
        self.tier: str | None = "none"
        """Tier under which an error is counted; None: the gateway has counted it."""

    async def stream_unary(self, _: object, context: Any) -> bytes:
        """Answer the call; see grpc.RpcMethodHandler."""
        try:
            self.enter(context)
            return await self.answer(context)
        except RequestError as exc:
            error = exc
        except Exception as exc:
            error = unforeseen(exc, self.shown)
        await self.refuse(context, error)
        raise AssertionError("a refused call has ended")

    async def answer(self, context: Any) -> bytes:
        """Message of the answer. Raises RequestError."""
        raise NotImplementedError

    def enter(self, context: Any) -> None:
        """Find the connection that the call came on, and count the call for it until it ends.

        Raises:
            RequestError: it came on none.
        """
        connection = self.port.relay.connections.get(context.peer())
        if connection is None:
            raise RequestError("the call came by no connection of this port", code=INTERNAL)
        self.connection = connection
        connection.calls += 1
        context.add_done_callback(self._ended)

    def belong(self, owner: str) -> None:
        """Count the call for its owner until it ends.

        Raises:
            RequestError: the owner has too many.
        """
        self.port.quotas.begin(owner)
        self.owner, self.counted = owner, True

    async def read(self, context: Any) -> bytes:
        """Return the message of the request.

        Raises:
            RequestError: there is none, or it does not come in time.
        """
        port = self.port
        try:
            async with asyncio.timeout(port.message_timeout):
                await port.quotas.room_to_read(self.owner)
                try:
                    body = await context.read()
                finally:
                    port.quotas.has_read(self.owner)
        except TimeoutError:
            message = f"the message did not come within {port.settings.body_timeout_ms:g} ms (body_timeout_ms)"
            raise RequestError(message, code=REQUEST_TIMEOUT) from None
        if body is grpc.aio.EOF:
            raise BadRequest("the call has no message; send one")
        return bytes(body)

    async def refuse(self, context: Any, error: RequestError, more: Metadata = ()) -> None:
        """End the call with an error."""
        if self.tier is not None:
            self.port.counters.refusals[error.reason or error.code.lower(), self.tier] += 1
        trailers = trailers_of(error.code, self.shown, error.retry_after, error.reason)
        await context.abort(status_of(error.code), details_of(error.message), trailers + more)

    def _ended(self, context: Any) -> None:
        if self.connection is not None:
            self.connection.calls -= 1
        if self.counted:
            self.port.quotas.drop(self.owner, self.kept)
            self.port.quotas.end(self.owner)


class InferenceCall(Call):
    """One call of an inference method.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
        read: reads its message.
    """

    __slots__ = ("_read", "principal")

    def __init__(self, port: PortContext, metadata: Sequence[tuple[str, Any]], read: ReadMessage) -> None:
        super().__init__(port, metadata)
        self._read = read
        self.principal = NOBODY

    async def answer(self, context: Any) -> bytes:
        """Message of the answer. Raises RequestError."""
        options, id = self.begin(context)
        body = await self.read(context)
        return await self.infer(context, body, options, id)

    def begin(self, context: Any) -> tuple[RequestOptions, str]:
        """Find out who asks, and what the metadata say: options and id of the request.

        Raises:
            RequestError: the principal is not known, is over a limit, or the metadata are wrong.
        """
        port, intake = self.port, self.port.intake
        fields = read_fields(self.metadata)
        id = read_id(fields)
        chosen = bool(id)
        id = id or port.new_id()
        self.shown = SHOWN + id
        principal = self.identify(fields.get(b"authorization", b""))
        failure = None
        if principal.limits:
            failure = intake.limiter.excess(intake.counted(principal.limits), intake.broker)
        if failure is not None:
            self.tier = None
            refused = Entry(id, "", "", principal.tier, principal.tenant, "", 0.0, 0.0)
            intake.note_refusal(principal, refused, failure)
            raise error_of(failure)
        origin = self.connection.address if port.anonymous and self.connection is not None else None
        try:
            remaining = context.time_remaining()
            longest = port.longest if remaining is None or remaining > port.longest else max(remaining, 0.001)
            return read_options(fields, port.settings, longest, chosen, origin), id
        except RequestError:
            self.charge()
            raise

    def identify(self, authorization: bytes) -> Principal:
        """Principal of the call, for whom it is counted from now on.

        Raises:
            RequestError: the principal is not known, or its tenant has too many calls or connections.
        """
        port, connection = self.port, self.connection
        principal = port.identity.identify(authorization)
        if principal is None:
            raise stranger(authorization)
        self.principal = principal
        if connection is not None and connection.owner == UNKNOWN:
            try:
                port.relay.quotas.belong(connection, principal.tenant)
            except RequestError:
                connection.retire()
                raise
        self.belong(principal.tenant if connection is None or not port.anonymous else connection.address)
        return principal

    async def infer(self, context: Any, body: bytes, options: RequestOptions, id: str) -> bytes:
        """Submit the request in a message, and wait for its outcome. Returns the message of the answer.

        Raises:
            RequestError: it is wrong, or has failed.
        """
        begun = monotonic()
        port = self.port
        try:
            exchange = self._read(body, options)
        except RequestError:
            self.tier = port.settings.tier_names[self.principal.tier]
            self.charge()
            raise
        replies = await self._outcome(exchange, id)
        first = replies[0]
        if first.output is None:
            self.tier = None
            raise error_of(first.failure or Failure(INTERNAL, "the reply is neither an output nor a failure"))
        milliseconds = int((monotonic() - begun) * 1e6) / 1000
        outputs = [one.output for one in replies if one.output is not None]
        self.tier = None
        try:
            _, message = exchange.write(self.shown, outputs, milliseconds, port.settings.model_version)
        except UnicodeEncodeError:
            raise error_of(no_text()) from None
        self.kept += port.quotas.keep(self.owner, len(message))
        context.set_trailing_metadata((("x-request-id", self.shown), *self.marks(replies), *self.limits_left()))
        return message

    async def _outcome(self, exchange: Exchange, id: str) -> Sequence[Reply]:
        """Replies to all inputs of a request, or the failure of one."""
        intake, principal = self.port.intake, self.principal
        model = exchange.model or self.port.settings.model
        input, options, parameters = exchange.input, exchange.options, exchange.parameters
        if not isinstance(input, list):
            sink = FutureSink()
            intake.submit(sink, principal, id, options, model, input, parameters)
            try:
                return (await sink.reply,)
            except asyncio.CancelledError:
                intake.abandon(sink, principal.tenant, id)
                raise
        several: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()

        def ended(replies: Sequence[Reply]) -> None:
            if not several.done():
                several.set_result(replies)

        fan_out = FanOut(intake, principal, id, options, model, input, parameters, ended)
        fan_out.start()
        try:
            return await several
        except asyncio.CancelledError:
            fan_out.abandon()
            raise

    def charge(self) -> None:
        """Count a wrong request towards its principal's limits."""
        if self.principal.limits:
            self.port.intake.limiter.charge(self.port.intake.counted(self.principal.limits))

    def marks(self, replies: Sequence[Reply]) -> Metadata:
        """Metadata on how the outcome came about, where it is another request's."""
        first = replies[0]
        found: list[tuple[str, str]] = []
        if first.shared is not None and all(one.shared is first.shared for one in replies):
            mark = _SHARED.get((first.shared, all(one.kept for one in replies)))
            if mark is not None:
                found.append(mark)
        if any(one.unkept for one in replies):
            found.append(("x-headway-kept", "no"))
        return tuple(found)

    def limits_left(self) -> Metadata:
        """Metadata by which the principal learns of its limits."""
        return tuple(self.port.rate_limits.fields(self.principal.limits).items())

    async def refuse(self, context: Any, error: RequestError, more: Metadata = ()) -> None:
        """End the call with an error, and the principal's limits."""
        await super().refuse(context, error, more + self.limits_left())


class StreamCall(Call):
    """One call with any number of messages both ways.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
    """

    response_streaming = True
    stream_unary = None  # type: ignore[assignment]

    __slots__ = ()

    async def stream_stream(self, _: object, context: Any) -> None:  # type: ignore[override]
        """Answer the call; see grpc.RpcMethodHandler."""
        try:
            self.enter(context)
            await self.talk(context)
            return
        except RequestError as exc:
            error = exc
        except Exception as exc:
            error = unforeseen(exc, self.shown)
        await self.refuse(context, error)

    async def talk(self, context: Any) -> None:
        """Read and write messages until the call ends. Raises RequestError."""
        raise NotImplementedError

    @property
    def retired(self) -> bool:
        """Whether the client is to open another connection, so that this call is to end soon."""
        return self.connection is not None and self.connection.retired.is_set()

    def to_be_opened_anew(self) -> RequestError:
        """Error that ends a call because of that."""
        message = "the connection is to be closed, as it is old or this process goes down; open another one"
        return RequestError(message, code=DRAINING, retry_after=0.0)

    async def next(self, context: Any) -> bytes | None:
        """Return the next message; None: the client has no more.

        Raises:
            RequestError: the client is to open another connection.
        """
        connection = self.connection
        if connection is None or connection.retired.is_set():
            raise self.to_be_opened_anew()
        reading = asyncio.ensure_future(context.read())
        retired = asyncio.ensure_future(connection.retired.wait())
        try:
            await asyncio.wait((reading, retired), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise self.to_be_opened_anew()
            body = reading.result()
            return None if body is grpc.aio.EOF else bytes(body)
        finally:
            reading.cancel()
            retired.cancel()

    async def pause(self, seconds: float) -> None:
        """Return after some seconds, or as soon as the client is to open another connection."""
        if self.connection is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.connection.retired.wait(), seconds)


class PlainCall(Call):
    """One call that asks for no inference, and needs no credential.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
        respond: message to the message of the answer. Raises RequestError.
    """

    __slots__ = ("_respond",)

    def __init__(self, port: PortContext, metadata: Sequence[tuple[str, Any]], respond: Callable[[bytes], Any]) -> None:
        super().__init__(port, metadata)
        self._respond = respond

    async def answer(self, context: Any) -> bytes:
        """Message of the answer. Raises RequestError."""
        self.shown = SHOWN + self.port.new_id()
        self.belong(STRANGERS)
        found = self._respond(await self.read(context))
        return bytes(await found if asyncio.iscoroutine(found) else found)


NOBODY = Principal(user="", tenant="", tier=0)


def read_fields(metadata: Sequence[tuple[str, Any]]) -> dict[bytes, bytes]:
    """Metadata that are read, as header fields.

    Raises:
        BadRequest: one is there twice.
    """
    found: dict[bytes, bytes] = {}
    for key, value in metadata:
        name = _FIELDS.get(key)
        if name is not None:
            if name in found:
                raise BadRequest(f"the metadata {key} was sent twice; send it once")
            found[name] = value.encode("latin-1")
    return found


def error_of(failure: Failure) -> RequestError:
    """Error of a request that has failed."""
    return RequestError(failure.message, code=failure.code, retry_after=failure.retry_after, reason=failure.reason)


def unforeseen(exc: Exception, shown: str) -> RequestError:
    """Error of a call that has failed for a reason nobody thought of, which is logged."""
    log.error("a call failed", request_id=shown, exc_info=exc)
    return RequestError(UNFORESEEN, code=INTERNAL)
