"""Connection of one client: reads requests, writes answers, bounds their cost, and closes.

    IDLE ──▶ HEAD ──▶ BODY ──▶ ASKED (the fast path) ─▶ WRITING (a large answer) ─▶ IDLE
      └───────┴────▶ ROUTE (an ordinary route) ───────▶ IDLE
    DROP: the answer was given before the body had come.  BLOCKED: the last answer has not left yet.
    WAITING: a handful of its requests were answered in this turn of the event loop; it goes on in a later one.
    LINGERING: refused for good, what still comes is thrown away.

The rules:

- One request at a time. What a client sends beyond it is buffered, and read on when its answer has been written,
  so that answers leave in the order of the requests.
- A head is parsed when it is complete, a counted body is only counted, a chunked one is unwrapped. No parser
  lives longer than one request, so nothing of a request can reach into the next.
- No timers: the listener looks at every connection now and then (`inspect`) and ends what takes too long.
- The end of the client's sending is its departure. A client that has closed its connection and one that
  has only shut down its sending side look the same until something is written to them, and by then a GPU
  would have worked for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping
from http import HTTPStatus
from time import monotonic

import httptools

from headway.core.excerpt import excerpt
from headway.doors.fields import ID_PREFIX, read_id
from headway.errors import INTERNAL, REQUEST_TIMEOUT, SERVICE_OVERLOADED, UNFORESEEN, AnyError, BadRequest, RequestError
from headway.http.problem import frame_error
from headway.http.requests import ClientLeft, Request, RouteAnswer, StreamedAnswer, refuse
from headway.http.server.chunks import Chunks
from headway.http.server.connection_context import GRACE, LARGE, LINGER, SLOWEST, ConnectionContext
from headway.http.server.hangups import Unread, bound
from headway.http.server.head import END, Head, past_blank, read_head, suspect, too_large, too_long, too_many_members
from headway.model import Failure
from headway.runtime.listening import descriptor_of
from headway.runtime.logger import get_logger

log = get_logger(__name__)

IDLE, HEAD, BODY, DROP, ASKED, ROUTE, WRITING, BLOCKED, WAITING, LINGERING, CLOSED = range(11)

REQUESTS_PER_TURN = 4
"""Requests of one connection that are begun in one turn of the event loop, however many its client has sent in one go; then it waits in line."""
MOST_BUFFERED = 65_536
"""Bytes a client may send ahead of its answers; also the most of a refused body that is read to keep a connection."""

FAR = 4 << 20
"""Bytes read ahead of answers where they are counted, to see an end behind them. A system buffers about as much."""

UNCOUNTED = 4_096
"""Bytes sent ahead up to which they are not counted with those of bodies."""

TURNED_AWAY = 64
"""Refused connections that may linger beyond the limit; further ones are closed with their answer."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no value of a header field may have."""


class Connection(asyncio.Protocol):
    """Connection whose requests all go to ordinary routes; the fast path adds those of inference.

    Arguments:
        context: context shared with the listener's other connections.

    Attributes:
        far: bytes a client may send ahead of its answers.
        encode_error: encoder of errors of the request in hand; the listener's own until its route is known.
        marks: header lines that the answer to the request in hand gets whatever it is, each with its end.
    """

    far = MOST_BUFFERED

    __slots__ = (
        "ahead", "asked", "brief", "buffer", "chunks", "context", "descriptor", "encode_error", "expects", "held", "id", "last", "marks",
        "missing", "open", "paused", "phase", "seen", "since", "streaming", "transport", "unread", "upload", "writable",
    )  # fmt: skip

    def __init__(self, context: ConnectionContext) -> None:
        self.context = context
        self.transport: asyncio.Transport
        self.descriptor = -1
        self.phase = IDLE
        self.since = 0.0
        self.buffer = b""
        self.ahead: bytearray | None = None
        self.seen = 0
        self.id = ""
        self.encode_error = context.encode_error
        self.marks = b""
        self.last = False
        self.brief = False
        """Whether it is closed with its answer, as too many connections linger."""
        self.paused = False
        self.open = False
        self.expects = False
        self.missing = 0
        self.chunks: Chunks | None = None
        self.unread = Unread()
        self.asked: Request | None = None
        """Request of an ordinary route that is in hand."""
        self.held = False
        """Whether nothing more is read from the client for now."""
        self.streaming = False
        self.upload = 0
        """Most bytes of the body of the request in hand, where that may be larger than others; else 0."""
        self.writable: asyncio.Event | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it when there are too many."""
        self.transport = transport
        # Any byte the kernel does not take at once counts as stuck: then nothing more is read from the client.
        transport.set_write_buffer_limits(high=0)
        self.since = monotonic()
        context = self.context
        full = len(context.connections) - context.settings.max_connections
        descriptor = self.descriptor = descriptor_of(transport)
        context.connections.add(self)
        if full >= 0 or descriptor >= context.fd_ceiling:
            self.brief = full > TURNED_AWAY or descriptor >= context.fd_brief_at
            self.reject(RequestError("too many connections are open", code=SERVICE_OVERLOADED, retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        buffer = self.buffer
        if self.ahead or (len(buffer) > MOST_BUFFERED and self.phase > HEAD and not self.open):
            self.ahead = self.ahead or bytearray()
            self.ahead += data
            self._keep_ahead()
        else:
            self.buffer = buffer + data if buffer else data
            self.advance()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self.phase = CLOSED
        self.buffer, self.ahead = b"", None
        self.chunks = None
        if self.paused:
            self.context.hangups.forget(self.descriptor)
        self.context.connections.discard(self)
        if self.asked is not None:
            self.asked.leave()
        self._let_write()
        if exc is None:
            self.transport.close()
        self.context.left()

    def pause_writing(self) -> None:
        """Note that the client does not take its answer."""
        self.unread.begin(self.transport, monotonic())

    def resume_writing(self) -> None:
        """Note that the client has taken all of its answer."""
        self.unread.since = 0.0
        self._let_write()
        if self.phase == BLOCKED:
            self.finish()
            self.advance()

    # Requests.

    def advance(self) -> None:
        """Work through what was received, as far as the request in hand allows."""
        left = REQUESTS_PER_TURN
        try:
            while self.buffer or self._fetch():
                phase = self.phase
                if phase <= HEAD:
                    if not left:
                        self._wait_turn()
                    elif self._take_head():
                        left -= 1
                    elif not self._fetch():
                        break
                elif phase >= LINGERING:
                    self.drop()
                elif self.open:
                    self._take_body()
                else:
                    self._keep_ahead()
                    return
        except Exception as exc:
            self.fault(exc)
        self._read_on()

    def take_turn(self) -> None:
        """Go on with what was received."""
        if self.phase == WAITING:
            self.phase = IDLE
            self.advance()

    def serve(self, head: Head, raw: bytes) -> None:
        """Start on a request whose head is complete; `raw` is the head as it came."""
        most = self.context.most_body_of(head)
        if head.length > most:
            self.refuse(too_large(most), head)
            return
        self.upload = most if most > self.context.most_body else 0
        try:
            url = httptools.parse_url(head.target)
        except httptools.HttpParserInvalidURLError:
            self.reject(BadRequest(f"the target {head.target[:80].decode()!r} is not a valid URL"))
            return
        if (error := too_many_members(head.target)) is not None:
            self.reject(error)
            return
        address = self.transport.get_extra_info("peername")
        request = self.asked = Request(
            head, url.path or b"/", url.query or b"", ID_PREFIX + self.id, address[:2] if isinstance(address, tuple) else None,
            self.encode_error, self.context.shut, self.shutdown, self._want_body,
        )  # fmt: skip
        self.phase = ROUTE
        if not self.expect_body(head):
            request.end()
        self.context.begin(self._answer(request))

    def expect_body(self, head: Head) -> bool:
        """Prepare for the body that `head` announces; False when it has none."""
        self.open = head.length != 0
        self.expects = head.expects
        if head.length < 0:
            self.chunks = Chunks(self.upload or self.context.most_body, self.context.most_header)
        else:
            self.missing = head.length
        return self.open

    def reserve(self, amount: int) -> bool:
        """Let the connection hold `amount` bytes of bodies, in all; False, and nothing is changed, when it may not."""
        return True

    def known_tenant(self) -> str:
        """Tenant whose turns the connection takes; empty while it is not known."""
        return ""

    def take(self, content: bytes) -> None:
        """Take a piece of the body. Without a route that waits for it, the piece is dropped."""
        if self.asked is None:
            return
        if self.upload:  # A large one may take its time, as long as it comes at a pace.
            self.since = min(monotonic(), self.since + len(content) / SLOWEST)
        if self.asked.feed(content) > MOST_BUFFERED:
            self._hold()

    def complete(self) -> None:
        """Note that the body is complete."""
        if self.asked is not None:
            self.asked.end()
        else:
            self.finish()

    async def _answer(self, request: Request) -> None:
        """Answer a request of an ordinary route."""
        begun = monotonic()
        try:
            response = await self.context.answer(request)
        except (ClientLeft, asyncio.CancelledError):  # The latter when the port closes, which cuts all connections.
            return
        except Exception:
            log.exception(
                "a route failed", request_id=request.id, method=excerpt(request.method), path=excerpt(request.path)
            )
            response = refuse(request, Failure(INTERNAL, UNFORESEEN))
        try:
            if not request.gone:
                await self._send_answer(request, response, begun)
        finally:
            if isinstance(response, StreamedAnswer):
                response.ended()

    async def _send_answer(self, request: Request, response: RouteAnswer, begun: float) -> None:
        """Send the answer of an ordinary route, to a request that came at the monotonic instant `begun`."""
        try:
            self.context.trace_answer(request, response.status, begun)
            if isinstance(response, StreamedAnswer):
                await self._stream(request, response)
            else:
                self.last |= self._leaves_body()
                self._write(request, response)
        except asyncio.CancelledError:
            return
        except Exception as exc:
            self.fault(exc)
            return
        if not request.gone:
            self.asked, self.streaming = None, False
            self._answered()

    def _write(self, request: Request, response: RouteAnswer) -> None:
        empty = response.status in (204, 304)
        fields = response.headers if empty else {"content-length": str(len(response.body)), **response.headers}
        head = self._frame(request, response.status, fields)
        body = b"" if empty or request.method == "HEAD" else response.body
        for part in (head + body,) if len(body) < LARGE else (head, body):  # What is large is not copied.
            self.transport.write(part)

    async def _stream(self, request: Request, response: StreamedAnswer) -> None:
        """Write an answer piece by piece, each when its client has taken those before."""
        empty = request.method == "HEAD"
        chunked = not self.last and "content-length" not in response.headers
        fields = {**response.headers, "transfer-encoding": "chunked"} if chunked and not empty else response.headers
        self.transport.write(self._frame(request, response.status, fields))
        self.streaming = True
        bound(self.transport)
        if empty:
            return
        async with contextlib.aclosing(response.pieces()) as pieces:
            async for piece in pieces:
                while self.unread.since and not request.gone:
                    self.writable = self.writable or asyncio.Event()
                    self.writable.clear()
                    await self.writable.wait()
                if request.gone:
                    return
                self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked and not request.gone:
            self.transport.write(b"0\r\n\r\n")

    def _frame(self, request: Request, status: int, fields: Mapping[str, str]) -> bytes:
        """Beginning of an answer, up to its body."""
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {self.context.date.decode()}\r\nx-request-id: {request.id}"
        ]
        for name, value in fields.items():
            if _UNSAFE.search(value):
                raise ValueError(f"the header field {name} has a control character in it")
            lines.append(f"{name}: {value}")
        if self.last or self.context.closing:
            lines.append("connection: close")
        return "\r\n".join((*lines, "")).encode("latin-1") + self.marks + b"\r\n"

    def _leaves_body(self) -> bool:
        """Whether the rest of the body may be long, or never come, so that the connection has to end behind the answer."""
        return self.open and bool(self.expects or self.missing > MOST_BUFFERED or self.chunks is not None)

    def _answered(self) -> None:
        """Go on after the answer of an ordinary route."""
        self._release()
        if self.transport.is_closing():
            self.phase = CLOSED
            self.buffer, self.ahead = b"", None
        elif not self.open:
            self.finish()
        elif self._leaves_body():
            self.linger()
        else:
            self._drop_body()
        if self.phase == IDLE and self.buffer:  # An ordinary route may cost as much as a handful.
            self._wait_turn()
        else:
            self.advance()

    def finish(self) -> None:
        """End a request whose answer is written: wait for the next request, or close."""
        if self.last or self.context.closing:
            if self.buffer:
                self.linger()
            else:
                self.phase = CLOSED
                self.transport.close()
        elif self.unread.since:
            self.phase = BLOCKED
        else:
            self._rest()

    # Refusals.

    def refuse(self, error: RequestError, head: Head, tier: str | None = "none") -> None:
        """Answer an error to a request whose body has not been read; keep the connection if the rest is short. The
        refusal is counted under a tier; None: it has been counted."""
        self.context.trace_head(head, ID_PREFIX + self.id, error, self.since)  # Since its head has come.
        if head.expects or not 0 <= head.length <= MOST_BUFFERED:
            self.reject(error, tier)
            return
        self.write_error(error)
        self.context.refused(error, tier)
        if self.expect_body(head):
            self._drop_body()
        else:
            self.finish()

    def reject(self, error: RequestError, tier: str | None = "none") -> None:
        """Answer an error after which nothing the client sends can be understood, or is wanted."""
        self.id = self.id or self.context.new_id()
        self.last = True
        self.context.refused(error, tier)
        if self.asked is not None:
            self.asked.leave()
            self.asked = None
            if self.streaming:
                self.phase = CLOSED
                self.transport.abort()
                return
        self.write_error(error)
        self.linger()

    def close_over_quota(self) -> None:
        """End a connection between two requests, since its owner holds too much."""
        self.linger()

    def fault(self, exc: Exception) -> None:
        """Answer an unforeseen exception with 500, and log it once, under the request's id."""
        self.id = self.id or self.context.new_id()
        log.error("a request failed", request_id=ID_PREFIX + self.id, exc_info=exc)
        try:
            if self.phase in (DROP, WRITING, BLOCKED, LINGERING, CLOSED):  # The answer has been given, or begun.
                self.phase = CLOSED
                self.transport.close()
            else:
                self.reject(RequestError(UNFORESEEN, code=INTERNAL))
        except Exception:
            self.transport.abort()

    def write_error(self, error: AnyError, fields: bytes = b"") -> None:
        """Write the answer of an error, with further lines of its header."""
        context, shown = self.context, ID_PREFIX + self.id
        encoded = self.encode_error(error, shown)
        close = self.last or context.closing
        fields += self.marks
        self.transport.write(frame_error(error.code, shown, encoded, date=context.date, close=close, fields=fields))

    def linger(self) -> None:
        """Close the sending side, yet read on for a moment. Closing with bytes unread would reset the connection, and
        could take the answer away from a client that is still sending (RFC 9112, section 9.6)."""
        self.phase = LINGERING
        self.since = monotonic()
        self.buffer, self.ahead = b"", None
        self.reserve(0)
        self.open = False
        self.chunks = None
        if self.brief:
            self._close_at_once()
        elif not self.transport.is_closing():
            self.transport.write_eof()
            self.drop()

    def _close_at_once(self) -> None:
        """Close with the answer. What has come by now is thrown away, as bytes unread would reset the connection."""
        with contextlib.suppress(OSError):
            os.read(self.descriptor, MOST_BUFFERED)
        self.phase = CLOSED
        self.transport.close()

    def drop(self) -> None:
        """Throw away what has come after the last answer. More is read when it is this connection's turn: there is no hurry, and
        who sends megabytes again and again would take the event loop from all others."""
        self.buffer, self.ahead = b"", None
        if self.phase == LINGERING:
            self._hold()
            self.context.drops.wait(self.known_tenant(), self._drop_more)

    def _drop_more(self) -> None:
        if self.phase == LINGERING:
            self._release()

    # What the listener calls.

    def inspect(self, now: float) -> None:
        """End what takes too long; `now` is a monotonic instant in seconds."""
        context, phase, waited = self.context, self.phase, now - self.since
        if self.unread.since:
            if self.unread.overdue(self.transport, now, context.read_timeout, SLOWEST):
                self.transport.abort()
        elif phase == IDLE:
            if waited > (context.keep_alive if self.id else context.read_timeout) or (
                context.shut.is_set() and waited >= GRACE
            ):
                self.phase = CLOSED
                self.transport.close()
        elif phase == HEAD:
            if waited > context.read_timeout:
                self._forget()
                self._late("header")
        elif phase == DROP:
            if waited > context.read_timeout:
                self.linger()  # without a word: the answer has been given
        elif self.open:
            if waited > context.read_timeout and not (self.upload and self.held):
                self._late("body")
        elif phase == LINGERING and waited > LINGER:
            self.transport.abort()

    def retire(self) -> None:
        """Let the answer in hand be the last, as the listener is closing."""

    def shutdown(self) -> None:
        """Close at once. It no longer counts, though its socket is closed in the next turn of the event loop only."""
        self.context.connections.discard(self)
        self.transport.abort()

    # Steps.

    def _hold(self) -> None:
        """Read nothing more from the client for now."""
        if not self.held:
            self.held = True
            self.transport.pause_reading()

    def _release(self) -> None:
        if self.held:
            self.held = False
            if self.upload:
                self.since = monotonic()
            self.transport.resume_reading()

    def _want_body(self) -> None:
        """Have more of the body come, as the route waits for it."""
        if self.expects and not self.transport.is_closing():
            self.transport.write(CONTINUE)
            self.expects = False
        self._release()

    def _let_write(self) -> None:
        if self.writable is not None:
            self.writable.set()

    def _take_head(self) -> bool:
        """Start on the next request, if all of its head is here."""
        buffer = self.buffer
        if buffer.startswith(b"\r"):
            buffer = self.buffer = past_blank(buffer)
            if buffer == b"\r":
                self._begin_head()
                return False
            if not buffer:
                return False
        end, context = buffer.find(END, max(self.seen - 3, 0)), self.context
        if end > context.most_header - len(END) or (end < 0 and len(buffer) > context.most_header):
            self._forget()
            self.reject(too_long(context.most_header))
            return True
        if end < 0:
            self._await_head(buffer)
            return False
        end += len(END)
        raw = buffer[:end]
        self.buffer = buffer[end:]
        self.reserve(0)
        self.seen = self.upload = 0
        self.since = monotonic()
        self.encode_error = context.encode_error
        try:
            head = read_head(raw)
        except RequestError as exc:
            self._forget()
            self.reject(exc)
        else:
            self.id = read_id(head.single) or context.new_id()
            self.last = not head.keep
            self.serve(head, raw)
        return True

    def _await_head(self, buffer: bytes) -> None:
        why = suspect(buffer, self.seen)
        if why is not None:
            self._forget()
            self.reject(why)
            return
        self.seen = len(buffer)
        self._begin_head()

    def _forget(self) -> None:
        """Forget the last request, as what comes after it is none."""
        self.id, self.encode_error, self.marks = "", self.context.encode_error, b""

    def _begin_head(self) -> None:
        if self.phase == IDLE:
            self.phase = HEAD
            self.since = monotonic()

    def _take_body(self) -> None:
        buffer, chunks = self.buffer, self.chunks
        if chunks is None:
            content, self.buffer = buffer[: self.missing], buffer[self.missing :]
            self.missing -= len(content)
            self.open = self.missing > 0
        else:
            try:
                content, self.buffer = chunks.feed(buffer)
            except RequestError as exc:
                self.reject(exc)
                return
            self.open = not chunks.done
        if content:
            self.take(content)
        if not self.open:
            self.chunks = None
            self.complete()

    def _keep_ahead(self) -> None:
        """Keep bytes sent ahead of the answer in hand, and read on, to see the client leave. Beyond what one connection
        may hold nothing is read. Beyond what its owner may hold the bytes are dropped, and the answer is the last."""
        ahead = len(self.buffer) + (len(self.ahead) if self.ahead else 0)
        if ahead > UNCOUNTED and not self.reserve(ahead):
            if self.phase == WAITING:
                self.close_over_quota()
                return
            self.buffer, self.ahead = self.buffer[:1], None  # More is to come, so the end has to linger.
            self.last = True
            self.retire()
            self._read_on()
        elif ahead > (MOST_BUFFERED if self.phase == WAITING else self.far) and not self.paused:
            self.paused = True
            self._hold()
            self.context.hangups.watch(self.descriptor, self.shutdown)
        elif ahead <= MOST_BUFFERED:
            self._read_on()

    def _fetch(self) -> bool:
        """Take up some of the bytes sent far ahead; False when there are none."""
        ahead = self.ahead
        if not ahead:
            return False
        self.buffer += bytes(ahead[:MOST_BUFFERED])
        del ahead[:MOST_BUFFERED]
        return True

    def _read_on(self) -> None:
        if self.paused:
            self.paused = False
            self.context.hangups.forget(self.descriptor)
            self._release()

    def _wait_turn(self) -> None:
        self.phase = WAITING
        self.context.turns.wait(self.known_tenant(), self.take_turn)

    def _drop_body(self) -> None:
        self.reserve(0)
        self.phase = DROP
        self.since = monotonic()

    def _rest(self) -> None:
        self.phase = IDLE
        self.since = monotonic()

    def _late(self, what: str) -> None:
        message = f"the {what} did not arrive within {self.context.settings.read_timeout_ms:g} ms (read_timeout_ms)"
        self.reject(RequestError(message, code=REQUEST_TIMEOUT))
