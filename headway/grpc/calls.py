"""gRPC calls: what all calls have in common, streaming calls, and calls without inference.

The principal is identified from the metadata, so messages from strangers are never read. A call is cancelled when its client has left or
its deadline has passed. The gateway then drops its request, unless it is already running on a GPU. All messages have the same amount of
time to arrive, so they share one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Any

from headway.config import Settings
from headway.core.budget import GREED, Budget
from headway.doors.entrance import Entrance
from headway.doors.fields import ID_PREFIX, TRACE_FIELDS, select_fields
from headway.errors import (
    INTERNAL,
    RATE_LIMITED,
    REQUEST_TIMEOUT,
    SERVICE_OVERLOADED,
    UNFORESEEN,
    BadRequest,
    RequestError,
)
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.gateway.client_quotas import HeldBytes, no_room
from headway.grpc.call_stream import CallStream, Ended, MessageTurns
from headway.grpc.status import Metadata, StatusCode, details_of, status_of, trailers_of
from headway.model import Principal
from headway.runtime.logger import get_logger

log = get_logger(__name__)


STRANGERS = "\0"  # Prefix of the owner of calls without credentials, before the address. No address can block another.

SMALL = 4096  # Maximum size in bytes of answers that aren't charged. All calls together hold at most 40 MB of them.


class CallQuotas:
    """Quotas for the calls on one gRPC port: concurrent calls, and bytes of incoming messages and unread answers. All ports of
    the process share the budget `bytes`. Each call counts towards its tenant, since a connection may carry calls of several
    tenants, for example behind a proxy. If the service has no credentials, a call counts towards its client's address. A
    message's length is unknown until its first bytes have arrived. So a call reserves room for the largest message before it
    reads, and then releases the rest. If there is no room, the call waits behind its tenant's other calls."""

    def __init__(self, settings: Settings, bytes: HeldBytes) -> None:
        self._named = bool(settings.keys or settings.jwt)
        self._largest = settings.max_body_bytes
        self._calls = Budget(settings.max_connections, GREED if self._named else 0)
        self._bytes = bytes
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def begin(self, owner: str) -> None:
        if not self._calls.take(owner, 1):
            used = self._calls.used(owner)
            if not used:
                raise RequestError(
                    "too many calls are in progress", code=SERVICE_OVERLOADED, retry_after=1.0, reason="calls"
                )
            message = f"{used} calls of this caller are in progress; make fewer at a time (max_connections)"
            raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="calls")

    def end(self, owner: str) -> None:
        self._calls.give(owner, 1)

    def may_read(self, owner: str) -> bool:
        """Reserve room for the largest message. Return False if there is no room, or the owner's other calls are waiting."""
        return owner not in self._waiting and self._bytes.take(owner, self._largest)

    async def room_to_read(self, owner: str) -> None:
        if self.may_read(owner):
            return
        waiting = self._waiting.get(owner)
        if waiting is None:
            waiting = self._waiting[owner] = deque()
            self._bytes.freed = self._admit
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # The call was given its room at the same moment.
                self.has_read(owner)
            elif turn in waiting:
                waiting.remove(turn)
                self._forget(owner, waiting)
            raise

    def has_read(self, owner: str, kept: int = 0) -> None:
        """Release the room reserved for reading, except `kept` bytes for the received message."""
        self._bytes.give(owner, self._largest - kept)

    def room_for_stream(self, owner: str) -> int:
        """Reserve room for the largest message on an open stream, and return its size. Raises RequestError if there is no room."""
        if not self._bytes.take(owner, self._largest):
            message = "too many streams and messages of this caller are in progress; use fewer at a time (memory_mb)"
            raise RequestError(message, code=RATE_LIMITED, retry_after=1.0, reason="bodies")
        return self._largest

    def may_hold(self, owner: str, amount: int) -> bool:
        return self._bytes.take(owner, amount)

    def keep(self, owner: str, amount: int) -> int:
        """Charge an answer's bytes to the owner. Return how many. Raises RequestError if too many bytes are unread."""
        if amount <= SMALL:
            return 0
        if self._bytes.take(owner, amount):
            return amount
        if used := self._bytes.used(owner):
            raise no_room(used)
        return 0  # A single answer may wait, whatever its size.

    def drop(self, owner: str, amount: int) -> None:
        if amount:
            self._bytes.give(owner, amount)

    def _admit(self) -> None:
        admitted = True
        while admitted:
            admitted = False
            for owner, waiting in list(self._waiting.items()):
                while waiting and waiting[0].done():  # The call has ended.
                    waiting.popleft()
                if waiting and self._bytes.take(owner, self._largest):
                    waiting.popleft().set_result(None)
                    admitted = True
                self._forget(owner, waiting)

    def _forget(self, owner: str, waiting: deque[asyncio.Future[None]]) -> None:
        if not waiting:
            self._waiting.pop(owner, None)
        if not self._waiting:
            self._bytes.freed = None


Respond = Callable[[bytes, Principal], Awaitable[bytes]]  # Answers a message with a message. Raises RequestError.

_LOOKED_AT = TRACE_FIELDS | {
    b"authorization", b"cache-control", b"idempotency-key", b"x-request-id", b"x-request-tier", b"x-request-timeout-ms",
}  # fmt: skip
MOST_PLAIN = 1 << 16  # Maximum size in bytes of a message without inference: only a few names, decoded immediately.
read_fields = partial(select_fields, names=_LOOKED_AT, lists=TRACE_FIELDS, kind="metadata")
"""Reads a call's metadata, which have the same names and meanings as the HTTP header fields."""


class PortContext:
    """Context of the calls of one port. `largest` is the size limit of an inference message in bytes, and `largest_plain` that
    of any other message. A request may take up to `longest` seconds. A message must arrive within `message_timeout` seconds,
    which `reading` enforces."""

    def __init__(self, entrance: Entrance, quotas: CallQuotas, turns: MessageTurns) -> None:
        self.entrance, self.quotas, self.turns = entrance, quotas, turns
        self.gateway, self.settings = entrance.gateway, entrance.settings
        self.largest = self.settings.max_body_bytes
        self.largest_plain = min(self.largest, MOST_PLAIN)
        self.longest = self.settings.longest_request_s
        self.message_timeout = self.settings.read_timeout_ms / 1000
        self.reading = ReadDeadlines(self.message_timeout)


class Call:
    """A call of a method with one request and one answer. For `way` see RequestOptions; it is empty for a call without inference.
    `begun` is a monotonic time. `submitted` is True once the gateway has the request. `principal` is NOBODY until it is known. While
    `counted`, the call and `kept` bytes count towards the quotas of `owner`. `shown` is the public request id. Errors are counted
    under `tier`, which is None once the gateway has counted the error."""

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
        """Send a message. The call ends if its client doesn't read the message in time."""
        stream = self.stream
        stream.send(message)
        if stream.sent is None:
            return
        try:
            async with asyncio.timeout(self.port.message_timeout):
                await stream.sent
        except TimeoutError:
            text = (
                f"the client did not read the answer within {self.port.settings.read_timeout_ms:g} ms (read_timeout_ms)"
            )
            self.count_refusal(RequestError(text, code=REQUEST_TIMEOUT))
            log.info("a client is not reading its answers", request_id=self.shown, error=text)
            stream.reset()  # A status cannot overtake the answer.
            raise asyncio.CancelledError from None

    def belong(self, owner: str) -> None:
        """Count the call towards its owner until it ends. Raises RequestError if the owner has too many calls."""
        self.port.quotas.begin(owner)
        self.owner, self.counted = owner, True

    def belong_to_address(self) -> None:
        self.belong(STRANGERS + self.stream.connection.address)

    def identify(self, authorization: bytes) -> Principal:
        """Return the principal, and count the call towards its tenant. Raises RequestError if the call is refused."""
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
        """Return the request's message, and charge its bytes to the owner. Raises RequestError if it is late or missing."""
        port = self.port
        quotas, deadlines = port.quotas, port.reading
        most = port.largest if self._way else port.largest_plain
        length = self.stream.length_there(most)
        if length >= 0 and quotas.may_hold(self.owner, length):
            self.kept += length
            return self.stream.take_message(length)
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
            message = f"the message did not arrive within {port.settings.read_timeout_ms:g} ms (read_timeout_ms)"
            raise RequestError(message, code=REQUEST_TIMEOUT) from None
        except BaseException:
            deadlines.end(self)
            raise
        deadlines.end(self)
        if body is None:
            raise BadRequest("the call has no message; send exactly one")
        return body

    def refuse(self, error: RequestError, more: Metadata = ()) -> None:
        self.count_refusal(error)
        trailers = trailers_of(error, self.shown) + self.limits_left()
        self.stream.end(status_of(error.code), details_of(error.message), trailers + more)

    def limits_left(self) -> Metadata:
        limits = self.principal.limits
        return tuple(self.port.entrance.rate_limits.fields(limits).items()) if limits else ()

    def count_refusal(self, error: RequestError) -> None:
        """Count an error and record its span, unless the gateway has already done so."""
        entrance = self.port.entrance
        traces = entrance.refusal_traces
        if traces is not None and self._way and not self.submitted:
            fields = select_fields(self.headers, TRACE_FIELDS, TRACE_FIELDS)
            traces.refused(self._way, fields, self.shown, error, self.begun)
        if self.tier is not None:
            entrance.counters.refusals[error.reason or error.code.lower(), self.tier, ""] += 1

    def keep(self, amount: int) -> int:
        """Charge an answer's bytes to the owner. Return how many. Raises RequestError if the owner holds too many bytes."""
        kept = self.port.quotas.keep(self.owner, amount) if self.counted else 0
        self.kept += kept
        return kept

    def drop(self, kept: int) -> None:
        if self.counted and kept:
            self.kept -= kept
            self.port.quotas.drop(self.owner, kept)

    def release(self) -> None:
        if self.counted:
            self.counted = False
            self.port.quotas.drop(self.owner, self.kept)
            self.port.quotas.end(self.owner)


class StreamCall(Call):
    """A call with any number of messages in both directions, which are read and written by `talk`."""

    __slots__ = ()

    @property
    def retired(self) -> bool:
        """True if this call should end soon because the connection is closing."""
        return self.stream.connection.leaving is not None

    def hold_room(self) -> None:
        """Reserve room for the largest message until the call ends. Raises RequestError if the owner holds too many bytes."""
        self.kept += self.port.quotas.room_for_stream(self.owner)

    async def next(self) -> bytes | None:
        """Return the next message, or None after the last one. Raises RequestError once the client must reconnect."""
        port = self.port
        return await self.stream.read(port.largest if self._way else port.largest_plain, leaves=True)

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stream.change()


class PlainCall(Call):
    """A call without inference, which is answered by `respond`. If `known`, only known principals are admitted."""

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
    """Log an unexpected exception, and return the error to send to the client."""
    log.error("a call failed", request_id=shown, exc_info=exc)
    return RequestError(UNFORESEEN, code=INTERNAL)


class ReadDeadlines:
    """Deadlines for reading messages. Each message must arrive within `seconds`. A reader is the object for which a task reads
    a message; it has at most one deadline at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # If a reader referred to its task, that would create a cycle, because a cancelled task refers to what it has run.
        self._reading: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reader: object) -> None:
        """Start a reader's deadline. When the deadline passes, the current task is cancelled."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a message is read in a task")
        loop = asyncio.get_running_loop()
        self._reading[reader] = loop.time() + self._seconds, task
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def end(self, reader: object) -> bool:
        """End a reader's deadline. Return False if the deadline has passed and nothing else has cancelled the current task. The
        task may then continue."""
        if self._reading.pop(reader, None) is not None:
            return True
        task = asyncio.current_task()
        return task is None or task.uncancel() > 0

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = []
        for reader, (deadline, _) in self._reading.items():  # Ordered by deadline.
            if deadline > now:
                self._timer = loop.call_at(deadline, self._look)
                break
            late.append(reader)
        for reader in late:
            self._reading.pop(reader)[1].cancel()
