"""Calls of the gRPC port: what all have in common, those with streams of messages, and those that ask for no inference.

gRPC's server asks for the handler of each call, and a call is its own handler: it knows its metadata before it is run. So
who asks is known before the message is read, and a stranger's message never is. All calls are declared as streams of
messages, since of such a call no message is read before it wants one.

A call is cancelled when its client has left or its deadline has passed. Its request is then abandoned, and never gets to a
GPU if it is not there yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc

from headway.config import Settings
from headway.errors import DRAINING, INTERNAL, REQUEST_TIMEOUT, BadRequest, RequestError
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.gateway.refusal_traces import RefusalTraces
from headway.grpc.call_quotas import STRANGERS, CallQuotas
from headway.grpc.message_turns import MessageTurns
from headway.grpc.read_deadlines import ReadDeadlines
from headway.grpc.relay import ClientConnection, Relay
from headway.grpc.statuses import Metadata, details_of, status_of, trailers_of
from headway.http.authentication import stranger
from headway.http.error_responses import UNFORESEEN
from headway.http.inference.inference_head import SHOWN
from headway.http.rate_limit_headers import RateLimitHeaders
from headway.http.server.connection_context import Intake, NewId
from headway.identity.anonymous import AnonymousIdentity
from headway.model import Principal
from headway.ports import Identity
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger

log = get_logger(__name__)

Respond = Callable[[bytes, Principal], Awaitable[bytes]]
"""Message of a request, and its principal, to the message of the answer. Raises RequestError."""

_FIELDS = {
    name: name.encode()
    for name in (
        "authorization", "cache-control", "idempotency-key", "traceparent", "tracestate", "x-request-id", "x-request-tier",
        "x-request-timeout-ms",
    )
}  # fmt: skip
"""Metadata that is read. It has the names and the meaning of the HTTP header fields."""

_TRACE_FIELDS = frozenset(("traceparent", "tracestate"))
_LISTS = frozenset(name.encode() for name in _TRACE_FIELDS)
"""Metadata of which several are joined by commas, as the header fields are; so a `traceparent` that comes twice is malformed."""


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
        refusal_traces: traces of refused requests; None where none are recorded.
        longest: seconds that a request may take.
        message_timeout: seconds within which a message has to come.
        reading: deadlines of the messages that are being read.
        anonymous: whether nobody is asked for a credential.
        rate_limits: writer of the metadata by which principals learn of their limits.
        turns: turns in which messages are taken in.
    """

    settings: Settings
    intake: Intake
    identity: Identity
    counters: Counters
    new_id: NewId
    quotas: CallQuotas
    relay: Relay
    refusal_traces: RefusalTraces | None = None
    longest: float = field(init=False)
    message_timeout: float = field(init=False)
    reading: ReadDeadlines = field(init=False)
    anonymous: bool = field(init=False)
    rate_limits: RateLimitHeaders = field(init=False)
    turns: MessageTurns = field(default_factory=MessageTurns)

    def __post_init__(self) -> None:
        self.longest = self.settings.longest_request_s
        self.message_timeout = self.settings.read_timeout_ms / 1000
        self.reading = ReadDeadlines(self.message_timeout)
        self.anonymous = isinstance(self.identity, AnonymousIdentity)
        self.rate_limits = RateLimitHeaders(self.intake)


class Call:
    """One call of a method with one request and one answer.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
        way: see RequestOptions; empty where it asks for no inference.
    """

    request_streaming = True
    response_streaming = False
    request_deserializer = response_serializer = None
    unary_unary = unary_stream = stream_stream = None

    __slots__ = (
        "_way", "begun", "connection", "counted", "kept", "metadata", "owner", "port", "principal", "shown", "submitted", "tier",
    )  # fmt: skip

    def __init__(self, port: PortContext, metadata: Sequence[tuple[str, Any]], way: str = "") -> None:
        self.port = port
        self._way = way
        self.begun = monotonic()
        self.submitted = False
        """Whether the gateway has its request."""
        self.metadata = metadata
        self.connection: ClientConnection | None = None
        self.principal = NOBODY
        self.owner = ""
        self.counted = False
        self.kept = 0
        """Bytes that are counted for its owner until it ends."""
        self.shown = ""
        self.tier: str | None = "none"
        """Tier under which an error is counted; None: the gateway has counted it."""

    async def stream_unary(self, asked: object, context: Any) -> bytes:
        """Answer the call; see grpc.RpcMethodHandler."""
        del asked
        try:
            self.enter(context)
            return await self.answer(context)
        except RequestError as exc:
            error = exc.with_traceback(None)
        except Exception as exc:
            error = unforeseen(exc, self.shown)
        try:
            await self.refuse(context, error)
        except BaseException as end:
            # gRPC keeps it with the call, and its frames would keep the call: garbage that no count of references finds.
            end.__traceback__ = None
            del context, error
            raise
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
        task = asyncio.current_task()
        if task is not None:  # The context's own callbacks would hold the context.
            task.add_done_callback(self._ended)

    def belong(self, owner: str) -> None:
        """Count the call for its owner until it ends.

        Raises:
            RequestError: the owner has too many.
        """
        self.port.quotas.begin(owner)
        self.owner, self.counted = owner, True

    def belong_to_address(self) -> None:
        """Count a call that needs no credential for its client's address until it ends; see `belong`."""
        self.belong(STRANGERS + (self.connection.address if self.connection is not None else ""))

    def identify(self, authorization: bytes) -> Principal:
        """Principal of the call, for whom it is counted from now on.

        Raises:
            RequestError: the principal is not known, or its tenant has too many calls or connections.
        """
        port, connection = self.port, self.connection
        principal = port.identity.identify(authorization)
        if principal is None:
            raise stranger(authorization)
        self.principal, self.tier = principal, port.settings.tier_names[principal.tier]
        if connection is not None and connection.owner == UNKNOWN:
            try:
                port.relay.quotas.belong(connection, principal.tenant)
            except RequestError:
                connection.retire()
                raise
        self.belong(principal.tenant if connection is None or not port.anonymous else connection.address)
        return principal

    async def read(self, context: Any) -> bytes:
        """Return the message of the request. Its bytes are counted until the call ends, or drops them.

        Raises:
            RequestError: there is none, or it does not come in time.
        """
        port = self.port
        quotas, deadlines = port.quotas, port.reading
        task = deadlines.begin()
        try:
            if not quotas.may_read(self.owner):
                await quotas.room_to_read(self.owner)
            size = 0
            try:
                body = await context.read()
                size = 0 if body is grpc.aio.EOF else len(body)
            finally:
                quotas.has_read(self.owner, size)
                self.kept += size
        except asyncio.CancelledError:
            if deadlines.end(task) or task.uncancel() > 0:
                raise
            message = f"the message did not come within {port.settings.read_timeout_ms:g} ms (read_timeout_ms)"
            raise RequestError(message, code=REQUEST_TIMEOUT) from None
        except BaseException:
            deadlines.end(task)
            raise
        deadlines.end(task)
        if body is grpc.aio.EOF:
            raise BadRequest("the call has no message; send one")
        return bytes(body)

    async def refuse(self, context: Any, error: RequestError, more: Metadata = ()) -> None:
        """End the call with an error."""
        self.count_refusal(error)
        trailers = trailers_of(error.code, self.shown, error.retry_after, error.reason) + self.limits_left()
        try:
            await context.abort(status_of(error.code), details_of(error.message), trailers + more)
        except grpc.aio.InternalError:
            # gRPC has ended it by itself, as for a message that is too large once it is unpacked.
            raise asyncio.CancelledError from None

    def limits_left(self) -> Metadata:
        """Metadata by which the principal learns of its limits; none where it is not known, or has none."""
        limits = self.principal.limits
        return tuple(self.port.rate_limits.fields(limits).items()) if limits else ()

    def count_refusal(self, error: RequestError) -> None:
        """Count an error, and record its span, unless the gateway has."""
        traces = self.port.refusal_traces
        if traces is not None and self._way and not self.submitted:
            fields = read_fields([(name, value) for name, value in self.metadata if name in _TRACE_FIELDS])
            traces.refused(self._way, fields, self.shown, error, self.begun)
        if self.tier is not None:
            self.port.counters.refusals[error.reason or error.code.lower(), self.tier, ""] += 1

    def keep(self, amount: int) -> int:
        """Count bytes for the call's owner; returns how many are counted. Raises RequestError: the owner holds too many."""
        kept = self.port.quotas.keep(self.owner, amount) if self.counted else 0
        self.kept += kept
        return kept

    def drop(self, kept: int) -> None:
        """Stop counting bytes, unless the call has ended."""
        if self.counted and kept:
            self.kept -= kept
            self.port.quotas.drop(self.owner, kept)

    def release(self) -> None:
        """Stop counting the call, and what it holds, for its owner."""
        if self.counted:
            self.counted = False
            self.port.quotas.drop(self.owner, self.kept)
            self.port.quotas.end(self.owner)

    def _ended(self, task: object) -> None:
        if self.connection is not None:
            self.connection.calls -= 1
        self.release()


class StreamCall(Call):
    """One call with any number of messages both ways.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
    """

    response_streaming = True
    stream_unary = None  # type: ignore[assignment]

    __slots__ = ()

    async def stream_stream(self, asked: object, context: Any) -> None:  # type: ignore[override]
        """Answer the call; see grpc.RpcMethodHandler."""
        del asked
        try:
            self.enter(context)
            await self.talk(context)
            return
        except RequestError as exc:
            error = exc.with_traceback(None)
        except Exception as exc:
            error = unforeseen(exc, self.shown)
        try:
            await self.refuse(context, error)
        except BaseException as end:
            end.__traceback__ = None  # As in `stream_unary`.
            del context, error
            raise

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

    def hold_room(self) -> None:
        """Take room for the largest message as long as the call lasts, as its client may send one at any time.

        Raises:
            RequestError: its owner has too little.
        """
        self.kept += self.port.quotas.room_for_stream(self.owner)

    async def next(self, context: Any) -> bytes | None:
        """Return the next message, for which room is held; None: the client has no more.

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
                async with asyncio.timeout(seconds):
                    await self.connection.retired.wait()


class PlainCall(Call):
    """One call that asks for no inference.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
        respond: message, and the principal, to the message of the answer. Raises RequestError.
        known: whether only known principals may ask.
    """

    __slots__ = ("_known", "_respond")

    def __init__(
        self, port: PortContext, metadata: Sequence[tuple[str, Any]], respond: Respond, *, known: bool = False
    ) -> None:
        super().__init__(port, metadata)
        self._respond = respond
        self._known = known

    async def answer(self, context: Any) -> bytes:
        """Message of the answer. Raises RequestError."""
        self.shown = SHOWN + self.port.new_id()
        if self._known:
            self.identify(read_fields(self.metadata).get(b"authorization", b""))
        else:
            self.belong_to_address()
        answer = await self._respond(await self.read(context), self.principal)
        context.set_trailing_metadata((("x-request-id", self.shown), *self.limits_left()))
        return answer


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
            if name in found and name not in _LISTS:
                raise BadRequest(f"the metadata {key} was sent twice; send it once")
            content = value.encode("latin-1")
            found[name] = b"%b, %b" % (found[name], content) if name in found else content
    return found


def unforeseen(exc: Exception, shown: str) -> RequestError:
    """Error of a call that has failed for a reason nobody thought of, which is logged."""
    log.error("a call failed", request_id=shown, exc_info=exc)
    return RequestError(UNFORESEEN, code=INTERNAL)
