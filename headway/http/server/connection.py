"""Connection of one client: asyncio's protocol between a reader of requests, the request in hand, and a writer of answers.

    IDLE ──▶ HEAD ──▶ BODY ──▶ ASKED ──▶ IDLE
    DROP: the answer was given before the body had come.  BLOCKED: the last answer has not left yet.
    WAITING: a handful of its requests were answered in this turn of the event loop; it goes on in a later one.
    LINGERING: refused for good, what still comes is thrown away.

The rules:

- One request at a time. What a client sends beyond it is buffered, and read on when its answer has been written,
  so that answers leave in the order of the requests.
- No timers: the listener looks at every connection now and then (`inspect`) and ends what takes too long.
- The end of the client's sending is its departure. A client that has closed its connection and one that
  has only shut down its sending side look the same until something is written to them, and by then a GPU
  would have worked for nobody.
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
from headway.http.requests import ClientLeft, Request, RouteAnswer, StreamedAnswer, refuse
from headway.http.server.connection_context import GRACE, LINGER, SLOWEST, ConnectionContext
from headway.http.server.hangups import ReadGate, Unread, bound
from headway.http.server.head import Head, too_large, too_many_members
from headway.http.server.reader import MOST_BUFFERED, HttpReader
from headway.http.server.writer import CONTINUE, Writer
from headway.model import Failure
from headway.runtime.logger import get_logger

log = get_logger(__name__)

IDLE, HEAD, BODY, ASKED, DROP, BLOCKED, WAITING, LINGERING, CLOSED = range(9)

REQUESTS_PER_TURN = 4
"""Requests of one connection that are begun in one turn of the event loop, however many its client has sent in one go; then it waits in line."""

FAR = 4 << 20
"""Bytes read ahead of answers where they are counted, to see an end behind them. A system buffers about as much."""

UNCOUNTED = 4_096
"""Bytes sent ahead up to which they are not counted with those of bodies."""

TURNED_AWAY = 64
"""Refused connections that may linger beyond the limit; further ones are closed with their answer."""


class InHand(Protocol):
    """Request whose answer a connection owes: an object of its own for each."""

    @property
    def shown(self) -> str:
        """Id as clients see it, `req_…`."""

    @property
    def tier(self) -> str:
        """Tier under which a refusal is counted; `none` while nobody knows the principal."""

    def take(self, content: bytes) -> None:
        """Take a piece of the body."""

    def complete(self) -> None:
        """Go on, as the body is complete."""

    def resume(self) -> None:
        """Go on with the answer, as the client has taken what was written."""

    def leave(self) -> None:
        """Let go of the request, as its client has left."""

    def reject(self, error: RequestError) -> bool:
        """Let go of the request, as it is refused. False: some of its answer has been written."""

    def write_error(self, error: AnyError) -> None:
        """Write the answer of an error."""


class Connection(asyncio.Protocol):
    """Connection whose requests all go to ordinary routes; the fast path adds those of inference.

    Arguments:
        context: context shared with the listener's other connections.

    Attributes:
        far: bytes a client may send ahead of its answers.
        brief: whether it is closed with its answer, as too many connections linger.
        gate: whether anything is read from the client.
        in_hand: request whose answer is owed.
        phase: see the module.
        reader, writer: what has come, and what leaves.
        served: whether it has had a request.
        owner, reserved, unfetched: see `headway.gateway.client_quotas.CountedConnection`.
        since: monotonic instant from which a time-out counts, in seconds.
        unread: answers that the client has not taken.
        unsent: bytes of a large answer that are made, and not written yet.
    """

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
        self.reader = HttpReader(context.most_header)
        self.in_hand: InHand | None = None
        self.unread = Unread()
        self.owner: str | None = None
        self.reserved = self.unfetched = self.unsent = 0
        self.phase = IDLE
        self.since = 0.0
        self.served = self.brief = False

    @property
    def silent(self) -> bool:
        """Whether no request of its client is under way."""
        return self.in_hand is None

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it when there are too many."""
        self.transport = transport
        # Any byte the kernel does not take at once counts as stuck: then nothing more is read from the client.
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
        """Take what the client has sent."""
        if self.reader.receive(data, self.phase > HEAD):
            self.advance()
        else:
            self._keep_ahead()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
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
        """Note that the client does not take its answer."""
        self.unread.begin(self.transport, monotonic())
        self.count_unfetched()

    def resume_writing(self) -> None:
        """Note that the client has taken all of its answer."""
        self.unread.since = 0.0
        self.count_unfetched()
        if self.in_hand is not None:
            self.in_hand.resume()
        elif self.phase == BLOCKED:
            self.finish()
            self.advance()

    # Requests.

    def advance(self) -> None:
        """Work through what was received, as far as the request in hand allows."""
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
        """Go on with what was received in a later turn of the event loop."""
        self.phase = WAITING
        self.context.turns.wait(self.owner or "", self._take_turn)

    def _take_turn(self) -> None:
        if self.phase == WAITING:
            self.phase = IDLE
            self.advance()

    def _take_head(self) -> bool:
        """Start on the next request, if all of its head is here."""
        reader = self.reader
        try:
            found = reader.read_head()
        except RequestError as exc:
            self.reject(exc)
            return True
        if found is None:
            if reader.buffer and self.phase == IDLE:
                self.phase = HEAD
                self.since = monotonic()
            return False
        head, raw = found
        if self.reserved:
            self.context.quotas.reserve(self, 0)
        self.since = monotonic()
        self.served = True
        self.writer.last = not head.keep
        self.serve(head, raw, read_id(head.single) or self.context.new_id())
        return True

    def serve(self, head: Head, raw: bytes, id: str) -> None:
        """Start on a request whose head is complete.

        Arguments:
            head: the head.
            raw: the head as it came.
            id: id of the request.
        """
        request = self.in_hand = RouteInHand(self, id, self.context.encode_error)
        request.begin(head)

    def _take_body(self) -> None:
        request, reader = self.in_hand, self.reader
        try:
            content = reader.read_body()
        except RequestError as exc:
            if request is None:  # It has been answered.
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
        """End the request in hand, whose answer is written: wait for the next one, or close."""
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
        """End the request in hand, whose answer is written: what is still to come of its body is dropped."""
        self.in_hand = None
        self.context.quotas.reserve(self, 0)
        self.phase = DROP
        self.since = monotonic()

    # Refusals.

    def refuse(self, error: RequestError, head: Head, counted: bool = False) -> None:
        """Answer an error to the request in hand, whose body has not been read; keep the connection if the rest is short.

        Arguments:
            error: the error.
            head: head of the request.
            counted: whether the refusal has been counted.
        """
        request = _owed(self)
        self.context.trace_head(head, request.shown, error, self.since)  # Since its head has come.
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
        """Answer an error after which nothing the client sends can be understood, or is wanted; see `refuse`."""
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
        """Answer an unforeseen exception with 500, and log it once, under the request's id."""
        log.error("a request failed", request_id=_owed(self).shown, exc_info=exc)
        try:
            if self.phase in (DROP, BLOCKED, LINGERING, CLOSED):  # The answer has been given.
                self.phase = CLOSED
                self.transport.close()
            else:
                self.reject(RequestError(UNFORESEEN, code=INTERNAL))
        except Exception:
            self.transport.abort()

    def linger(self) -> None:
        """Close the sending side, yet read on for a moment. Closing with bytes unread would reset the connection, and
        could take the answer away from a client that is still sending (RFC 9112, section 9.6)."""
        self.phase = LINGERING
        self.since = monotonic()
        self.reader.close()
        self.context.quotas.reserve(self, 0)
        if self.brief:  # What has come by now is thrown away, as bytes unread would reset the connection.
            with contextlib.suppress(OSError):
                os.read(self.gate.descriptor, MOST_BUFFERED)
            self.phase = CLOSED
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write_eof()
            self.drop()

    def drop(self) -> None:
        """Throw away what has come after the last answer. More is read when it is this connection's turn: there is no hurry, and
        who sends megabytes again and again would take the event loop from all others."""
        self.reader.drop()
        if self.phase == LINGERING:
            self.gate.hold()
            self.context.drops.wait(self.owner or "", self.gate.release)

    # What the listener calls.

    def inspect(self, now: float) -> None:
        """End what takes too long; `now` is a monotonic instant in seconds."""
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
                self.linger()  # without a word: the answer has been given
        elif phase == HEAD or self.reader.open:
            if late:
                what, most = "header" if phase == HEAD else "body", context.settings.read_timeout_ms
                message = f"the {what} did not arrive within {most:g} ms (read_timeout_ms)"
                self.reject(RequestError(message, code=REQUEST_TIMEOUT))
        elif phase == LINGERING and waited > LINGER:
            self.transport.abort()

    def retire(self) -> None:
        """Let the answer in hand be the last, as the listener is closing."""

    def shutdown(self) -> None:
        """Close at once. It no longer counts, though its socket is closed in the next turn of the event loop only."""
        self.context.connections.discard(self)
        self.transport.abort()

    # Bounds.

    def count_unfetched(self) -> None:
        """Count what waits for the client with the bytes of its owner."""
        left = self.transport.get_write_buffer_size() + self.unsent
        self.context.quotas.keep(self, left if left > MOST_BUFFERED else 0)

    def _keep_ahead(self) -> None:
        """Keep bytes sent ahead of the answer in hand, and read on, to see the client leave. Beyond what one connection
        may hold nothing is read. Beyond what its owner may hold the bytes are dropped, and the answer is the last."""
        ahead = self.reader.waiting
        quotas = self.context.quotas
        if ahead > max(UNCOUNTED, self.reserved) and not quotas.reserve(self, ahead):
            if self.phase == WAITING:
                self.reject(quotas.no_room(self))
                return
            self.reader.drop(keep=1)  # More is to come, so the end has to linger.
            self.writer.last = True
            self.retire()
            self.gate.read_on()
        elif ahead > (MOST_BUFFERED if self.phase == WAITING else self.far):
            self.gate.watch(self.shutdown)
        elif ahead <= MOST_BUFFERED:
            self.gate.read_on()


class RouteInHand(msgspec.Struct, eq=False):
    """Request to an ordinary route, or one that is only known to be invalid; see InHand.

    Attributes:
        connection: connection that it came on.
        id: its id.
        encode_error: encoder of its errors.
        marks: header lines added to any answer to it, each with its line ending.
        request: the request as its route gets it; None until then.
        expects: whether the client waits for `100 Continue` before it sends the body.
        upload: limit of its body in bytes, if the route allows more than usual; otherwise 0.
        sending: whether its answer has begun.
        written: set when the client has taken what was written; None while nobody has waited for that.
    """

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
        """See InHand."""
        return ID_PREFIX + self.id

    def begin(self, head: Head) -> None:
        """Leave the answer to its route. `head`: its head, which is complete."""
        connection, context = self.connection, self.connection.context
        most = context.most_body_of(head)
        if head.length > most:
            connection.refuse(too_large(most), head)
            return
        self.upload = most if most > context.most_body else 0
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
            self.encode_error, context.shut, connection.shutdown, self._want,
        )  # fmt: skip
        connection.phase = ASKED
        if not connection.reader.expect(head.length, most):
            request.end()
        context.begin(self._answer(request))

    def take(self, content: bytes) -> None:
        """See InHand."""
        if self.request is None:
            return
        connection = self.connection
        if self.upload:  # A large one may take its time, as long as it comes at a pace.
            connection.since = min(monotonic(), connection.since + len(content) / SLOWEST)
        if self.request.feed(content) > MOST_BUFFERED:
            connection.gate.hold()
            if self.upload:
                connection.since = math.inf  # Its route is slow, and not its client.

    def complete(self) -> None:
        """See InHand."""
        if self.request is not None:
            self.request.end()

    def leave(self) -> None:
        """See InHand."""
        if self.request is not None:
            self.request.leave()
        self.resume()

    def reject(self, error: RequestError) -> bool:
        """See InHand."""
        self.leave()
        return not self.sending

    def resume(self) -> None:
        """See InHand."""
        if self.written is not None:
            self.written.set()

    def write_error(self, error: AnyError) -> None:
        """See InHand."""
        encoded = self.encode_error(error, self.shown)
        self.connection.writer.write_error(error.code, self.shown, encoded, self.marks)

    def _want(self) -> None:
        """Have more of the body come, as the route waits for it."""
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
        except (ClientLeft, asyncio.CancelledError):  # The latter when the port closes, which cuts all connections.
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
        """Write an answer piece by piece, each when its client has taken those before."""
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
        """Whether the rest of the body may be long, or never come, so that the connection has to end behind the answer."""
        reader = self.connection.reader
        return reader.open and (self.expects or not 0 <= reader.missing <= MOST_BUFFERED)

    def _end(self) -> None:
        """Go on after the answer."""
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
        if connection.phase == IDLE and connection.reader.buffer:  # An ordinary route may cost as much as a handful.
            connection.wait_turn()
        else:
            connection.advance()


def _owed(connection: Connection) -> InHand:
    """Request in hand; a new one where what has come is none."""
    if connection.in_hand is None:
        connection.in_hand = RouteInHand(connection, connection.context.new_id(), connection.context.encode_error)
    return connection.in_hand
