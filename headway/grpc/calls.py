"""Calls of the gRPC port: what all have in common, those with streams of messages, and those that ask for no inference.

Who asks is known from the metadata, before the message is read, and a stranger's message never is.

A call is cancelled when its client has left or its deadline has passed. Its request is then abandoned, and never gets to a
GPU if it is not there yet. Messages that are being read all have the same time, so that one timer does for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from headway.config import Settings
from headway.doors.entrance import Entrance
from headway.doors.fields import ID_PREFIX, TRACE_FIELDS, select_fields
from headway.errors import INTERNAL, REQUEST_TIMEOUT, UNFORESEEN, BadRequest, RequestError
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.gateway.gateway import Gateway
from headway.grpc.call_quotas import STRANGERS, CallQuotas
from headway.grpc.call_stream import CallStream, Ended
from headway.grpc.message_turns import MessageTurns
from headway.grpc.statuses import Metadata, StatusCode, details_of, status_of, trailers_of
from headway.model import Principal
from headway.runtime.logger import get_logger

log = get_logger(__name__)

Respond = Callable[[bytes, Principal], Awaitable[bytes]]
"""Message of a request, and its principal, to the message of the answer. Raises RequestError."""

_LOOKED_AT = TRACE_FIELDS | {
    b"authorization", b"cache-control", b"idempotency-key", b"x-request-id", b"x-request-tier", b"x-request-timeout-ms",
}  # fmt: skip
MOST_PLAIN = 1 << 16
"""Most bytes of a message that asks for no inference. It is a few names, and nobody waits for a turn to decode it."""
read_fields = partial(select_fields, names=_LOOKED_AT, lists=TRACE_FIELDS, kind="metadata")
"""Reader of the metadata of a call. They have the names and the meaning of the HTTP header fields."""


@dataclass(slots=True)
class PortContext:
    """Context shared by the calls of one gRPC port.

    Attributes:
        entrance: entrance of the calls.
        quotas: quotas of calls.
        turns: turns in which messages are taken in.
        gateway: the gateway.
        settings: bounds, times, tiers and the default model.
        largest: most bytes of a message that asks for inference.
        largest_plain: most bytes of any other.
        longest: seconds that a request may take.
        message_timeout: seconds within which a message has to come.
        reading: deadlines of the messages that are being read.
    """

    entrance: Entrance
    quotas: CallQuotas
    turns: MessageTurns
    gateway: Gateway = field(init=False)
    settings: Settings = field(init=False)
    largest: int = field(init=False)
    largest_plain: int = field(init=False)
    longest: float = field(init=False)
    message_timeout: float = field(init=False)
    reading: ReadDeadlines = field(init=False)

    def __post_init__(self) -> None:
        self.gateway, self.settings = self.entrance.gateway, self.entrance.settings
        self.largest = self.settings.max_body_bytes
        self.largest_plain = min(self.largest, MOST_PLAIN)
        self.longest = self.settings.longest_request_s
        self.message_timeout = self.settings.read_timeout_ms / 1000
        self.reading = ReadDeadlines(self.message_timeout)


class Call:
    """One call of a method with one request and one answer.

    Arguments:
        port: context of the port.
        stream: stream that it came on.
        way: see RequestOptions; empty where it asks for no inference.

    Attributes:
        headers: header fields that came with it.
    """

    __slots__ = (
        "_way", "begun", "counted", "headers", "kept", "owner", "port", "principal", "shown", "stream", "submitted", "tier",
    )  # fmt: skip

    def __init__(self, port: PortContext, stream: CallStream, way: str = "") -> None:
        self.port, self.stream = port, stream
        self.headers = stream.head.headers
        self._way = way
        self.begun = monotonic()
        self.submitted = False
        """Whether the gateway has its request."""
        self.principal = NOBODY
        self.owner = ""
        self.counted = False
        self.kept = 0
        """Bytes that are counted for its owner until it ends."""
        self.shown = ""
        self.tier: str | None = "none"
        """Tier under which an error is counted; None: the gateway has counted it."""

    async def run(self) -> None:
        """Answer the call, whatever comes of it."""
        try:
            self.stream.end(StatusCode.OK, "", await self.talk())
        except RequestError as exc:
            self.refuse(exc.with_traceback(None))
        except Ended as exc:
            self.stream.end(exc.status, exc.details)
        except Exception as exc:
            self.refuse(unforeseen(exc, self.shown))
        finally:
            self.release()

    async def talk(self) -> Metadata:
        """Read the request, and write the answer. Returns the trailing metadata. Raises RequestError or Ended."""
        message, trailers = await self.answer()
        if not self.stream.answer(message, trailers):
            await self.send(message)
        return trailers

    async def answer(self) -> tuple[bytes, Metadata]:
        """Message of the answer, and its trailing metadata. Raises RequestError."""
        raise NotImplementedError

    async def send(self, message: bytes) -> None:
        """Send a message; a client that does not take it for too long loses the call."""
        stream = self.stream
        stream.send(message)
        if stream.sent is None:
            return
        try:
            async with asyncio.timeout(self.port.message_timeout):
                await stream.sent
        except TimeoutError:
            text = f"no answer was taken within {self.port.settings.read_timeout_ms:g} ms (read_timeout_ms); read them"
            self.count_refusal(RequestError(text, code=REQUEST_TIMEOUT))
            log.info("a client takes no answers", request_id=self.shown, error=text)
            stream.reset()  # No status can pass the answer.
            raise asyncio.CancelledError from None

    def belong(self, owner: str) -> None:
        """Count the call for its owner until it ends.

        Raises:
            RequestError: the owner has too many.
        """
        self.port.quotas.begin(owner)
        self.owner, self.counted = owner, True

    def belong_to_address(self) -> None:
        """Count a call that needs no credential for its client's address until it ends; see `belong`."""
        self.belong(STRANGERS + self.stream.connection.address)

    def identify(self, authorization: bytes) -> Principal:
        """Principal of the call, for whom it is counted from now on.

        Raises:
            RequestError: the principal is not known, or its tenant has too many calls or connections.
        """
        port, connection = self.port, self.stream.connection
        principal = port.entrance.identify(authorization)
        self.principal, self.tier = principal, port.entrance.tiers[principal.tier]
        if connection.owner == UNKNOWN:
            try:
                port.gateway.quotas.belong(connection, principal.tenant)
            except RequestError:
                connection.retire()
                raise
        self.belong(connection.address if port.entrance.anonymous else principal.tenant)
        return principal

    async def read(self) -> bytes:
        """Return the message of the request. Its bytes are counted until the call ends, or drops them.

        Raises:
            RequestError: there is none, or it does not come in time.
        """
        port = self.port
        quotas, deadlines = port.quotas, port.reading
        most = port.largest if self._way else port.largest_plain
        there = self.stream.length_there(most)
        if there >= 0 and quotas.may_hold(self.owner, there):
            self.kept += there
            return self.stream.take_message(there)
        deadlines.begin(self)
        try:
            if not quotas.may_read(self.owner):
                await quotas.room_to_read(self.owner)
            size = 0
            try:
                body = await self.stream.read(most)
                size = 0 if body is None else len(body)
            finally:
                quotas.has_read(self.owner, size)
                self.kept += size
        except asyncio.CancelledError:
            if deadlines.end(self):
                raise
            message = f"the message did not come within {port.settings.read_timeout_ms:g} ms (read_timeout_ms)"
            raise RequestError(message, code=REQUEST_TIMEOUT) from None
        except BaseException:
            deadlines.end(self)
            raise
        deadlines.end(self)
        if body is None:
            raise BadRequest("the call has no message; send one")
        return body

    def refuse(self, error: RequestError, more: Metadata = ()) -> None:
        """End the call with an error."""
        self.count_refusal(error)
        trailers = trailers_of(error, self.shown) + self.limits_left()
        self.stream.end(status_of(error.code), details_of(error.message), trailers + more)

    def limits_left(self) -> Metadata:
        """Metadata by which the principal learns of its limits; none where it is not known, or has none."""
        limits = self.principal.limits
        return tuple(self.port.entrance.rate_limits.fields(limits).items()) if limits else ()

    def count_refusal(self, error: RequestError) -> None:
        """Count an error, and record its span, unless the gateway has."""
        entrance = self.port.entrance
        traces = entrance.refusal_traces
        if traces is not None and self._way and not self.submitted:
            fields = select_fields(self.headers, TRACE_FIELDS, TRACE_FIELDS)
            traces.refused(self._way, fields, self.shown, error, self.begun)
        if self.tier is not None:
            entrance.counters.refusals[error.reason or error.code.lower(), self.tier, ""] += 1

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


class StreamCall(Call):
    """One call with any number of messages both ways; `talk` reads and writes them."""

    __slots__ = ()

    @property
    def retired(self) -> bool:
        """Whether the client is to open another connection, so that this call is to end soon."""
        return self.stream.connection.leaving is not None

    def hold_room(self) -> None:
        """Take room for the largest message as long as the call lasts, as its client may send one at any time.

        Raises:
            RequestError: its owner has too little.
        """
        self.kept += self.port.quotas.room_for_stream(self.owner)

    async def next(self) -> bytes | None:
        """Return the next message, for which room is held; None: the client has no more.

        Raises:
            RequestError: the client is to open another connection.
        """
        port = self.port
        return await self.stream.read(port.largest if self._way else port.largest_plain, leaves=True)

    async def pause(self, seconds: float) -> None:
        """Return after some seconds, or as soon as the client is to open another connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stream.change()


class PlainCall(Call):
    """One call that asks for no inference.

    Arguments:
        port: context of the port.
        stream: stream that it came on.
        respond: message, and the principal, to the message of the answer. Raises RequestError.
        known: whether only known principals may ask.
    """

    __slots__ = ("_known", "_respond")

    def __init__(self, port: PortContext, stream: CallStream, respond: Respond, *, known: bool = False) -> None:
        super().__init__(port, stream)
        self._respond = respond
        self._known = known

    async def answer(self) -> tuple[bytes, Metadata]:
        """Message of the answer, and its trailing metadata. Raises RequestError."""
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        if self._known:
            self.identify(read_fields(self.headers).get(b"authorization", b""))
        else:
            self.belong_to_address()
        answer = await self._respond(await self.read(), self.principal)
        return answer, (("x-request-id", self.shown), *self.limits_left())


NOBODY = Principal(user="", tenant="", tier=0)


def unforeseen(exc: Exception, shown: str) -> RequestError:
    """Error of a call that has failed for a reason nobody thought of, which is logged."""
    log.error("a call failed", request_id=shown, exc_info=exc)
    return RequestError(UNFORESEEN, code=INTERNAL)


class ReadDeadlines:
    """Deadlines of the tasks that read a message, each for a reader; a task reads for one at a time.

    A reader never gets to hold its task, as a task that is cancelled holds what it has run.

    Arguments:
        seconds: seconds within which a message has to come.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reading: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reader: object) -> None:
        """Have the current task cancelled at the end of its time, unless `end` is called before."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a message is read in a task")
        loop = asyncio.get_running_loop()
        self._reading[reader] = loop.time() + self._seconds, task
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def end(self, reader: object) -> bool:
        """Note that a reader reads no more. False: its task was cancelled for its time alone, and goes on."""
        if self._reading.pop(reader, None) is not None:
            return True
        task = asyncio.current_task()
        return task is None or task.uncancel() > 0

    def _look(self) -> None:
        """Cancel what is late, and look again when the next one would be."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = []
        for reader, (deadline, _) in self._reading.items():  # In the order of their deadlines.
            if deadline > now:
                self._timer = loop.call_at(deadline, self._look)
                break
            late.append(reader)
        for reader in late:
            self._reading.pop(reader)[1].cancel()
