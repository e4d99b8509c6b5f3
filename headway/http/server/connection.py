"""The connection of one client: an asyncio protocol that combines a reader, the current request, and a writer.

    IDLE ──▶ HEAD ──▶ BODY ──▶ ASKED ──▶ IDLE
    DROP       answered before the whole body arrived; the rest of the body is discarded
    BLOCKED    answered, but the client has not read the whole answer yet
    WAITING    answered enough requests in this turn of the event loop; continues in a later turn
    LINGERING  refused for good; all further bytes are discarded

- A connection handles one request at a time. Bytes of later requests are buffered until its answer is written, so answers are sent in
  the order of the requests.
- There are no timers. The listener calls `inspect` on every connection from time to time, which enforces all timeouts.
- A client that closes its sending side counts as gone. Only a write could tell a closed connection from a half-closed one, and by then a
  GPU would have done the work for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from time import monotonic
from typing import Protocol

import httptools
import msgspec

from headway.core.excerpt import excerpt
from headway.doors.fields import ID_PREFIX, read_id
from headway.errors import INTERNAL, REQUEST_TIMEOUT, SERVICE_OVERLOADED, UNFORESEEN, AnyError, BadRequest, RequestError
from headway.http.problem import EncodeError
from headway.http.routing import ClientLeft, Request, RouteAnswer, StreamedAnswer, refuse
from headway.http.server.connection_context import GRACE, LINGER, SLOWEST, ConnectionContext, ReadGate, Unread, bound
from headway.http.server.head import Head, too_large, too_many_members
from headway.http.server.reader import MOST_BUFFERED, HttpReader
from headway.http.server.writer import CONTINUE, Writer
from headway.model import Failure
from headway.runtime.logger import get_logger

log = get_logger(__name__)

IDLE, HEAD, BODY, ASKED, DROP, BLOCKED, WAITING, LINGERING, CLOSED = range(9)

REQUESTS_PER_TURN = 4  # Requests that a connection may start in a turn of the event loop. Others wait for later turns.

FAR = 4 << 20  # Bytes that a client with a quota may send ahead of its answers. Reading them reveals a hang-up.

UNCOUNTED = 4_096  # Number of bytes that a client may send ahead of its answers before they count towards its quota.

TURNED_AWAY = 64  # Maximum lingering connections beyond the connection limit. Others close right after their answer.


class InHand(Protocol):
    """A request that its connection has yet to answer."""

    @property
    def shown(self) -> str:
        """The public request id, `req_…`."""

    @property
    def tier(self) -> str:
        """The tier under which a refusal is counted. It is `none` until the principal is known."""

    def take(self, content: bytes) -> None:
        """Accept a piece of the body."""

    def complete(self) -> None:
        """Process the request, now that its body is complete."""

    def resume(self) -> None:
        """Continue the answer, because the client has read everything written so far."""

    def leave(self) -> None:
        """Drop the request, because its client has left."""

    def reject(self, error: RequestError) -> bool:
        """Drop the request, because it is refused. Return False if part of its answer has already been written."""

    def write_error(self, error: AnyError) -> None:
        """Answer with an error."""


class Connection(asyncio.Protocol):
    """A connection that has only ordinary routes. `FastPathConnection` adds the inference routes.

    `far` is the number of bytes that a client may send ahead of its answers. `since` is the monotonic time at which the current
    timeout started. A `brief` connection closes right after a refusal, because too many are lingering. `unsent` is the number of
    bytes of a large answer that are made but not yet written. For `owner`, `reserved` and `unfetched` see CountedConnection."""

    far = MOST_BUFFERED

    __slots__ = (
        "brief", "context", "gate", "in_hand", "owner", "phase", "reader", "reserved", "served", "since", "transport", "unfetched",
        "unread", "unsent", "writer",
    )  # fmt: skip

    def __init__(self, context: ConnectionContext) -> None:
        self.context = context
        self.transport: asyncio.Transport
        self.writer: Writer
        self.gate: ReadGate
        self.reader = HttpReader(context.max_header)
        self.in_hand: InHand | None = None
        self.unread = Unread()
        self.owner: str | None = None
        self.reserved = self.unfetched = self.unsent = 0
        self.phase = IDLE
        self.since = 0.0
        self.served = self.brief = False

    @property
    def silent(self) -> bool:
        return self.in_hand is None

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # Let asyncio call `pause_writing` as soon as the kernel's buffer is full, so that nothing more is read from the client.
        transport.set_write_buffer_limits(high=0)
        self.since = monotonic()
        context = self.context
        self.writer = Writer(context, transport)
        self.gate = ReadGate(transport, context.hangups)
        full = len(context.connections) - context.settings.max_connections
        descriptor = self.gate.descriptor
        context.connections.add(self)
        if full >= 0 or descriptor >= context.fd_ceiling:
            self.brief = full > TURNED_AWAY or descriptor >= context.fd_brief_at
            self.reject(RequestError("too many connections are open", code=SERVICE_OVERLOADED, retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        if self.reader.receive(data, self.phase > HEAD):
            self.advance()
        else:
            self._keep_ahead()

    def connection_lost(self, exc: Exception | None) -> None:
        request, self.in_hand = self.in_hand, None
        try:
            if request is not None:
                request.leave()
        finally:
            self.phase = CLOSED
            self.reader.close()
            self.gate.forget()
            self.context.quotas.leave(self)
            self.context.connections.discard(self)
            if exc is None:
                self.transport.close()
            self.context.left()

    def pause_writing(self) -> None:
        self.unread.begin(self.transport, monotonic())
        self.count_unfetched()

    def resume_writing(self) -> None:
        self.unread.since = 0.0
        self.count_unfetched()
        if self.in_hand is not None:
            self.in_hand.resume()
        elif self.phase == BLOCKED:
            self.finish()
            self.advance()

    # Requests.

    def advance(self) -> None:
        """Process the received bytes, as far as the current request allows."""
        left = REQUESTS_PER_TURN
        reader = self.reader
        try:
            while reader.buffer or reader.refill():
                phase = self.phase
                if phase <= HEAD:
                    if not left:
                        self.wait_turn()
                    elif self._take_head():
                        left -= 1
                    elif not reader.refill():
                        break
                elif phase >= LINGERING:
                    self.drop()
                elif reader.open:
                    self._take_body()
                else:
                    self._keep_ahead()
                    return
        except Exception as exc:
            self.fault(exc)
        if self.gate.paused:
            self.gate.read_on()

    def wait_turn(self) -> None:
        self.phase = WAITING
        self.context.turns.wait(self.owner or "", self._take_turn)

    def _take_turn(self) -> None:
        if self.phase == WAITING:
            self.phase = IDLE
            self.advance()

    def _take_head(self) -> bool:
        """Start the next request. Return False if its head is still incomplete."""
        reader = self.reader
        try:
            complete = reader.read_head()
        except RequestError as exc:
            self.reject(exc)
            return True
        if complete is None:
            if reader.buffer and self.phase == IDLE:
                self.phase = HEAD
                self.since = monotonic()
            return False
        head, raw = complete
        if self.reserved:
            self.context.quotas.reserve(self, 0)
        self.since = monotonic()
        self.served = True
        self.writer.last = not head.keep
        self.serve(head, raw, read_id(head.single) or self.context.new_id())
        return True

    def serve(self, head: Head, raw: bytes, id: str) -> None:
        """Start request `id`. `raw` is its head as received."""
        request = self.in_hand = RouteInHand(self, id, self.context.encode_error)
        request.begin(head)

    def _take_body(self) -> None:
        request, reader = self.in_hand, self.reader
        try:
            content = reader.read_body()
        except RequestError as exc:
            if request is None:  # The request has already been answered.
                self.linger()
            else:
                self.reject(exc)
            return
        if request is None:
            if not reader.open:
                self.finish()
            return
        if content:
            request.take(content)
        if not reader.open and self.in_hand is request:
            request.complete()

    def finish(self) -> None:
        """Finish the current request, which has been answered. Then wait for the next one, or close."""
        self.in_hand = None
        if self.writer.last or self.context.closing:
            if self.reader.buffer:
                self.linger()
            else:
                self.phase = CLOSED
                self.transport.close()
        elif self.unread.since:
            self.phase = BLOCKED
        else:
            self.phase = IDLE
            self.since = monotonic()

    def finish_before_body(self) -> None:
        """Finish the current request, which has been answered, and discard the rest of its body."""
        self.in_hand = None
        self.context.quotas.reserve(self, 0)
        self.phase = DROP
        self.since = monotonic()

    # Refusals.

    def refuse(self, error: RequestError, head: Head, counted: bool = False) -> None:
        """Refuse the current request before reading its body. `counted` is True if the refusal has already been counted."""
        request = _owed(self)
        self.context.trace_head(head, request.shown, error, self.since)
        if head.expects or not 0 <= head.length <= MOST_BUFFERED:
            self.reject(error, counted)
            return
        request.write_error(error)
        self.context.refused(error, None if counted else request.tier)
        if self.reader.expect(head.length):
            self.finish_before_body()
        else:
            self.finish()

    def reject(self, error: RequestError, counted: bool = False) -> None:
        request = _owed(self)
        self.writer.last = True
        self.context.refused(error, None if counted else request.tier)
        unanswered = request.reject(error)
        self.in_hand = None
        if unanswered:
            request.write_error(error)
            self.linger()
        else:
            self.phase = CLOSED
            self.transport.abort()

    def fault(self, exc: Exception) -> None:
        log.error("a request failed", request_id=_owed(self).shown, exc_info=exc)
        try:
            if self.phase in (DROP, BLOCKED, LINGERING, CLOSED):  # The request is answered.
                self.phase = CLOSED
                self.transport.close()
            else:
                self.reject(RequestError(UNFORESEEN, code=INTERNAL))
        except Exception:
            self.transport.abort()

    def linger(self) -> None:
        """Close the sending side, but read on for a moment. Closing with unread bytes would reset the connection, and a client
        that is still sending might lose the answer (RFC 9112, section 9.6)."""
        self.phase = LINGERING
        self.since = monotonic()
        self.reader.close()
        self.context.quotas.reserve(self, 0)
        if self.brief:  # Unread bytes would reset the connection.
            with contextlib.suppress(OSError):
                os.read(self.gate.descriptor, MOST_BUFFERED)
            self.phase = CLOSED
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write_eof()
            self.drop()

    def drop(self) -> None:
        """Discard received bytes, and read more in the connection's next turn, so that no client can block the loop."""
        self.reader.drop()
        if self.phase == LINGERING:
            self.gate.hold()
            self.context.drops.wait(self.owner or "", self.gate.release)

    # Called by the listener.

    def inspect(self, now: float) -> None:
        """Enforce the timeouts. `now` is the monotonic time."""
        context, phase, waited, unread = self.context, self.phase, now - self.since, self.unread
        late = waited > context.read_timeout
        if unread.since:
            if unread.overdue(self.transport, now, context.read_timeout, SLOWEST):
                self.transport.abort()
            self.count_unfetched()
        elif phase == IDLE:
            if waited > (context.keep_alive if self.served else context.read_timeout) or (
                context.shut.is_set() and waited >= GRACE
            ):
                self.phase = CLOSED
                self.transport.close()
        elif phase == DROP:
            if late:
                self.linger()  # The request has been answered, so there is no error to send.
        elif phase == HEAD or self.reader.open:
            if late:
                part, limit = "header" if phase == HEAD else "body", context.settings.read_timeout_ms
                message = f"the {part} did not arrive within {limit:g} ms (read_timeout_ms)"
                self.reject(RequestError(message, code=REQUEST_TIMEOUT))
        elif phase == LINGERING and waited > LINGER:
            self.transport.abort()

    def retire(self) -> None:
        """Make the next answer the last one, because the listener is closing."""

    def shutdown(self) -> None:
        """Close immediately. The connection no longer counts as open, but its socket closes in the next turn of the loop."""
        self.context.connections.discard(self)
        self.transport.abort()

    # Bounds.

    def count_unfetched(self) -> None:
        left = self.transport.get_write_buffer_size() + self.unsent
        self.context.quotas.keep(self, left if left > MOST_BUFFERED else 0)

    def _keep_ahead(self) -> None:
        """Check how many bytes the client has sent ahead of the current answer. If they are too many, the connection stops
        reading and only watches for a hang-up. If they exceed the owner's quota, they are dropped, and the connection closes
        after its next answer."""
        ahead = self.reader.waiting
        quotas = self.context.quotas
        if ahead > max(UNCOUNTED, self.reserved) and not quotas.reserve(self, ahead):
            if self.phase == WAITING:
                self.reject(quotas.no_room(self))
                return
            self.reader.drop(keep=1)  # One byte makes `finish` linger, because more bytes are in transit.
            self.writer.last = True
            self.retire()
            self.gate.read_on()
        elif ahead > (MOST_BUFFERED if self.phase == WAITING else self.far):
            self.gate.watch(self.shutdown)
        elif ahead <= MOST_BUFFERED:
            self.gate.read_on()


class RouteInHand(msgspec.Struct, eq=False):
    """A request to an ordinary route, or bytes that aren't a valid request; see InHand.

    Each answer gets the header lines `marks`, which end with a line break. `request` is None if no route receives the request.
    `upload` is the maximum size of the body in bytes if the route allows more than usual, otherwise 0. `expects` is True while the
    client waits for `100 Continue`, and `sending` once a streamed answer has started. `written` is set when the client has read
    everything."""

    connection: Connection
    id: str
    encode_error: EncodeError
    marks: bytes = b""
    request: Request | None = None
    expects: bool = False
    upload: int = 0
    sending: bool = False
    written: asyncio.Event | None = None
    tier = "none"

    @property
    def shown(self) -> str:
        return ID_PREFIX + self.id

    def begin(self, head: Head) -> None:
        connection, context = self.connection, self.connection.context
        limit = context.max_body_of(head)
        if head.length > limit:
            connection.refuse(too_large(limit), head)
            return
        self.upload = limit if limit > context.max_body else 0
        self.expects = head.expects
        try:
            url = httptools.parse_url(head.target)
        except httptools.HttpParserInvalidURLError:
            connection.reject(BadRequest(f"the target {head.target[:80].decode()!r} is not a valid URL"))
            return
        if (error := too_many_members(head.target)) is not None:
            connection.reject(error)
            return
        address = connection.transport.get_extra_info("peername")
        request = self.request = Request(
            head, url.path or b"/", url.query or b"", self.shown, address[:2] if isinstance(address, tuple) else None,
            self.encode_error, context.shut, connection.shutdown, self._read_more,
        )  # fmt: skip
        connection.phase = ASKED
        if not connection.reader.expect(head.length, limit):
            request.end()
        context.begin(self._answer(request))

    def take(self, content: bytes) -> None:
        if self.request is None:
            return
        connection = self.connection
        if self.upload:  # An upload may take long, as long as it keeps a minimum rate.
            connection.since = min(monotonic(), connection.since + len(content) / SLOWEST)
        if self.request.feed(content) > MOST_BUFFERED:
            connection.gate.hold()
            if self.upload:
                connection.since = math.inf  # The route is slow, not the client.

    def complete(self) -> None:
        if self.request is not None:
            self.request.end()

    def leave(self) -> None:
        if self.request is not None:
            self.request.leave()
        self.resume()

    def reject(self, error: RequestError) -> bool:
        self.leave()
        return not self.sending

    def resume(self) -> None:
        if self.written is not None:
            self.written.set()

    def write_error(self, error: AnyError) -> None:
        encoded = self.encode_error(error, self.shown)
        self.connection.writer.write_error(error.code, self.shown, encoded, self.marks)

    def _read_more(self) -> None:
        connection = self.connection
        if self.expects and not connection.transport.is_closing():
            connection.transport.write(CONTINUE)
            self.expects = False
        if connection.gate.held and self.upload:
            connection.since = monotonic()
        connection.gate.release()

    async def _answer(self, request: Request) -> None:
        begun, connection = monotonic(), self.connection
        response: RouteAnswer | None = None
        try:
            response = await self._ask(request)
            if request.gone:
                return
            connection.context.trace_answer(request, response.status, begun)
            if isinstance(response, StreamedAnswer):
                await self._stream(request, response)
            else:
                connection.writer.last |= self._leaves_body()
                connection.writer.write_answer(response, self.shown, self.marks, request.method)
            if not request.gone:
                self._end()
        except (ClientLeft, asyncio.CancelledError):  # A closing port cancels its tasks.
            return
        except Exception as exc:
            if request.gone:
                log.error("a request failed", request_id=self.shown, exc_info=exc)
            else:
                connection.fault(exc)
        finally:
            if isinstance(response, StreamedAnswer):
                response.ended()

    async def _ask(self, request: Request) -> RouteAnswer:
        try:
            return await self.connection.context.answer(request)
        except ClientLeft:
            raise
        except Exception:
            log.exception(
                "a route failed", request_id=request.id, method=excerpt(request.method), path=excerpt(request.path)
            )
            return refuse(request, Failure(INTERNAL, UNFORESEEN))

    async def _stream(self, request: Request, response: StreamedAnswer) -> None:
        """Write an answer piece by piece. Each piece is written only after the client has read all previous pieces."""
        connection, empty = self.connection, request.method == "HEAD"
        transport, writer = connection.transport, connection.writer
        chunked = not writer.last and "content-length" not in response.headers
        fields = {**response.headers, "transfer-encoding": "chunked"} if chunked and not empty else response.headers
        transport.write(writer.frame(response.status, fields, self.shown, self.marks))
        self.sending = True
        bound(transport)
        if empty:
            return
        async with contextlib.aclosing(response.pieces()) as pieces:
            async for piece in pieces:
                while connection.unread.since and not request.gone:
                    self.written = self.written or asyncio.Event()
                    self.written.clear()
                    await self.written.wait()
                if request.gone:
                    return
                transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked and not request.gone:
            transport.write(b"0\r\n\r\n")

    def _leaves_body(self) -> bool:
        """Return True if the connection must close because the rest of the body may be long or never arrive."""
        reader = self.connection.reader
        return reader.open and (self.expects or not 0 <= reader.missing <= MOST_BUFFERED)

    def _end(self) -> None:
        connection = self.connection
        connection.gate.release()
        if connection.transport.is_closing():
            connection.in_hand, connection.phase = None, CLOSED
            connection.reader.drop()
        elif not connection.reader.open:
            connection.finish()
        elif self._leaves_body():
            connection.in_hand = None
            connection.linger()
        else:
            connection.finish_before_body()
        if (
            connection.phase == IDLE and connection.reader.buffer
        ):  # Let other tasks run, because an ordinary route may be slow.
            connection.wait_turn()
        else:
            connection.advance()


def _owed(connection: Connection) -> InHand:
    """Return the current request, or a new one if the client didn't send a valid request."""
    if connection.in_hand is None:
        connection.in_hand = RouteInHand(connection, connection.context.new_id(), connection.context.encode_error)
    return connection.in_hand
