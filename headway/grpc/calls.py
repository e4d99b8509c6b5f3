"""Calls of the gRPC port: what all calls share, calls with streams of messages, and calls without inference.

The metadata identify the principal before the message is read, so a stranger's message is never read.

A call is cancelled when its client has left or its deadline has passed. The gateway then abandons its request, which doesn't
reach a GPU if it hasn't yet. All messages have the same time to arrive, so one timer serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Any

from headway.doors.entrance import Entrance
from headway.doors.fields import ID_PREFIX, TRACE_FIELDS, select_fields
from headway.errors import INTERNAL, REQUEST_TIMEOUT, UNFORESEEN, BadRequest, RequestError
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.grpc.call_quotas import STRANGERS, CallQuotas
from headway.grpc.call_stream import CallStream, Ended
from headway.grpc.message_turns import MessageTurns
from headway.grpc.statuses import Metadata, StatusCode, details_of, status_of, trailers_of
from headway.model import Principal
from headway.runtime.logger import get_logger

log = get_logger(__name__)

Respond = Callable[[bytes, Principal], Awaitable[bytes]]
"""Answer the message of a request, given its principal, with a message. Raises RequestError."""

_LOOKED_AT = TRACE_FIELDS | {
    b"authorization", b"cache-control", b"idempotency-key", b"x-request-id", b"x-request-tier", b"x-request-timeout-ms",
}  # fmt: skip
MOST_PLAIN = 1 << 16
"""Maximum size in bytes of a message other than inference. Such messages hold a few names, and are decoded without waiting."""
read_fields = partial(select_fields, names=_LOOKED_AT, lists=TRACE_FIELDS, kind="metadata")
"""Read the metadata of a call, whose names and meanings are those of the HTTP header fields."""


class PortContext:
    """Context that the calls of one gRPC port share.

    A message that asks for inference may have `largest` bytes, any other message `largest_plain`. A request may take `longest`
    seconds. A message may take `message_timeout` seconds to arrive. `reading` has the deadlines of messages being read."""

    def __init__(self, entrance: Entrance, quotas: CallQuotas, turns: MessageTurns) -> None:
        self.entrance, self.quotas, self.turns = entrance, quotas, turns
        self.gateway, self.settings = entrance.gateway, entrance.settings
        self.largest = self.settings.max_body_bytes
        self.largest_plain = min(self.largest, MOST_PLAIN)
        self.longest = self.settings.longest_request_s
        self.message_timeout = self.settings.read_timeout_ms / 1000
        self.reading = ReadDeadlines(self.message_timeout)


class Call:
    """One call of a method with one request and one answer.

    `way` is that of RequestOptions, or empty for a call without inference. `begun` is monotonic seconds. `submitted` is True once
    the gateway has the request. `principal` is NOBODY until known. While `counted`, the call and `kept` bytes count for `owner`.
    `shown` is the request's id as clients see it. Errors are counted under `tier`, which is None once the gateway has counted
    one."""

    __slots__ = (
        "_way", "begun", "counted", "headers", "kept", "owner", "port", "principal", "shown", "stream", "submitted", "tier",
    )  # fmt: skip

    def __init__(self, port: PortContext, stream: CallStream, way: str = "") -> None:
        self.port, self.stream = port, stream
        self.headers = stream.head.headers
        self._way = way
        self.begun = monotonic()
        self.submitted = False
        self.principal = NOBODY
        self.owner = ""
        self.counted = False
        self.kept = 0
        self.shown = ""
        self.tier: str | None = "none"

    async def run(self) -> None:
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
        """Read the request, write the answer, and return the trailing metadata. Raises RequestError or Ended."""
        message, trailers = await self.answer()
        if not self.stream.answer(message, trailers):
            await self.send(message)
        return trailers

    async def answer(self) -> tuple[bytes, Metadata]:
        """Return the message of the answer, and its trailing metadata. Raises RequestError."""
        raise NotImplementedError

    async def send(self, message: bytes) -> None:
        """Send a message. A client that doesn't read it within the time-out loses the call."""
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
        """Count the call for its owner until it ends. Raises RequestError if the owner has too many calls."""
        self.port.quotas.begin(owner)
        self.owner, self.counted = owner, True

    def belong_to_address(self) -> None:
        """Count a call without credentials for its client's address; see `belong`."""
        self.belong(STRANGERS + self.stream.connection.address)

    def identify(self, authorization: bytes) -> Principal:
        """Find the principal of the call, and count the call for it. Raises RequestError if the principal isn't known, or its
        tenant has too many calls or connections."""
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
        """Return the message of the request. Its bytes count for the owner until the call ends or drops them. Raises RequestError
        if the message is late, or the call ends without one."""
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
        self.count_refusal(error)
        trailers = trailers_of(error, self.shown) + self.limits_left()
        self.stream.end(status_of(error.code), details_of(error.message), trailers + more)

    def limits_left(self) -> Metadata:
        limits = self.principal.limits
        return tuple(self.port.entrance.rate_limits.fields(limits).items()) if limits else ()

    def count_refusal(self, error: RequestError) -> None:
        """Count an error and record its span, unless the gateway has done so."""
        entrance = self.port.entrance
        traces = entrance.refusal_traces
        if traces is not None and self._way and not self.submitted:
            fields = select_fields(self.headers, TRACE_FIELDS, TRACE_FIELDS)
            traces.refused(self._way, fields, self.shown, error, self.begun)
        if self.tier is not None:
            entrance.counters.refusals[error.reason or error.code.lower(), self.tier, ""] += 1

    def keep(self, amount: int) -> int:
        """Count bytes of an answer for the owner, and return how many were counted. Raises RequestError if it holds too many."""
        kept = self.port.quotas.keep(self.owner, amount) if self.counted else 0
        self.kept += kept
        return kept

    def drop(self, kept: int) -> None:
        """Stop counting bytes, unless the call has ended."""
        if self.counted and kept:
            self.kept -= kept
            self.port.quotas.drop(self.owner, kept)

    def release(self) -> None:
        if self.counted:
            self.counted = False
            self.port.quotas.drop(self.owner, self.kept)
            self.port.quotas.end(self.owner)


class StreamCall(Call):
    """One call with any number of messages both ways. Its `talk` reads and writes them."""

    __slots__ = ()

    @property
    def retired(self) -> bool:
        """True if this call has to end soon, because its client has to open another connection."""
        return self.stream.connection.leaving is not None

    def hold_room(self) -> None:
        """Count the largest message for the owner as long as the call lasts, because its client may send one at any time. Raises
        RequestError if the owner holds too many bytes."""
        self.kept += self.port.quotas.room_for_stream(self.owner)

    async def next(self) -> bytes | None:
        """Return the next message, whose bytes `hold_room` has counted, or None if the client has no more. Raises RequestError if
        the client has to open another connection."""
        port = self.port
        return await self.stream.read(port.largest if self._way else port.largest_plain, leaves=True)

    async def pause(self, seconds: float) -> None:
        """Return after some seconds, or as soon as the client has to open another connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stream.change()


class PlainCall(Call):
    """One call without inference, which `respond` answers. If `known`, only known principals may ask."""

    __slots__ = ("_known", "_respond")

    def __init__(self, port: PortContext, stream: CallStream, respond: Respond, *, known: bool = False) -> None:
        super().__init__(port, stream)
        self._respond = respond
        self._known = known

    async def answer(self) -> tuple[bytes, Metadata]:
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        if self._known:
            self.identify(read_fields(self.headers).get(b"authorization", b""))
        else:
            self.belong_to_address()
        answer = await self._respond(await self.read(), self.principal)
        return answer, (("x-request-id", self.shown), *self.limits_left())


NOBODY = Principal(user="", tenant="", tier=0)


def unforeseen(exc: Exception, shown: str) -> RequestError:
    """Log an unforeseen exception, and return the error that the client gets."""
    log.error("a call failed", request_id=shown, exc_info=exc)
    return RequestError(UNFORESEEN, code=INTERNAL)


class ReadDeadlines:
    """Deadlines of the tasks that read a message, by the objects they read for. A message has `seconds` to arrive."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Tasks are kept here because an object that held its task would be a cycle: a cancelled task holds what it has run.
        self._reading: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reader: object) -> None:
        """Cancel the current task when its time is over, unless `end` is called before."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a message is read in a task")
        loop = asyncio.get_running_loop()
        self._reading[reader] = loop.time() + self._seconds, task
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def end(self, reader: object) -> bool:
        """End a deadline. Return False if the deadline is the only reason why the task was cancelled; the task then goes on."""
        if self._reading.pop(reader, None) is not None:
            return True
        task = asyncio.current_task()
        return task is None or task.uncancel() > 0

    def _look(self) -> None:
        """Cancel the late tasks, and set the timer for the next deadline."""
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
