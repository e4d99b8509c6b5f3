"""The hot lane: the three native routes answered on the connection itself, all else left to the app.

A hot request costs one lookup of the caller, one decode, one submit, one encode and one write: no ASGI scope,
no task, no future, no timer. The connection is the waiter, since it has one request in hand at a time.

A client on a kept connection sends the same head with every request, but for its Content-Length. So a head
that was once parsed and found good is remembered as the bytes around that number; a request that begins with
the same bytes means the same, and is not parsed again. Nothing is remembered beyond the connection, and the
credential is looked up every time.
"""

from __future__ import annotations

import re
from time import monotonic
from urllib.parse import unquote_to_bytes

import httptools

from headway.errors import BACKEND_ERROR, INTERNAL, BadRequest, RequestError, Unauthenticated
from headway.http.connection import ASKED, BODY, IDLE, Connection
from headway.http.desk import Lane
from headway.http.head import Head
from headway.http.order import SHOWN, Order, take_order
from headway.http.shapes import Shape, read_octets
from headway.model import Caller, Failure, Reply

_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n")
_NOBODY = Caller(user="", tenant="", tier=0)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HotLane(Connection):
    """A connection of the public door.

    Arguments:
        lane: what it shares with the door's other connections.
    """

    __slots__ = ("after", "before", "begun", "caller", "lane", "memo", "order", "pieces")

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.lane = lane
        self.order: Order | None = None
        self.caller = _NOBODY
        self.begun = 0.0
        self.pieces: list[bytes] = []
        self.memo: Order | None = None
        self.before = b""
        self.after = b""

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent; a whole request under a known head goes straight on."""
        if self.phase == IDLE and data.startswith(self.before):
            order = self.memo
            begin = len(self.before)
            end = data.find(b"\r", begin, begin + 10)
            if order is not None and data.startswith(self.after, end):
                length = data[begin:end]
                end += len(self.after)
                if length.isdigit() and int(length) == len(data) - end <= self.desk.most_body:
                    self._repeat(order, data[end:])
                    return
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what the client was waiting for."""
        if self.phase == ASKED:
            self.lane.intake.abandon(self.caller.tenant, self.id)
        self.order = self.memo = None
        self.before = b""
        self.pieces.clear()
        super().connection_lost(exc)

    def answer(self, reply: Reply) -> None:
        """Take the reply to the request in hand; one to any other request is never written."""
        order = self.order
        if self.phase != ASKED or order is None or reply.id != self.id:
            return
        lane = self.lane
        now = monotonic()
        if reply.output is None:
            self._fail(reply)
        else:
            try:
                milliseconds = int((now - self.begun) * 1e6) / 1000
                shown = SHOWN + self.id
                body = order.shape.write(shown, reply.output, milliseconds, lane.version)
            except UnicodeEncodeError:
                self.say(BACKEND_ERROR, "the model's output contains a lone surrogate, which is no text")
            else:
                ending = b"connection: close\r\n" if self.last or lane.closing else b""
                self.transport.write(
                    b"%b%b\r\n%bcontent-length: %d\r\n\r\n%b" % (lane.opening, shown.encode(), ending, len(body), body)
                )
        self.order = None
        if self.last or lane.closing or self.stuck:
            self.finish()
        else:
            self.phase = IDLE
            self.since = now
        if self.held:
            self.advance()

    def serve(self, head: Head, raw: bytes) -> None:
        """Start on a request: the native routes here, all others in the app."""
        if head.method != b"POST":
            super().serve(head, raw)
            return
        path, query = _split(head.target)
        shape = self.lane.shapes.get(path)
        if shape is None:
            super().serve(head, raw)
        else:
            self._serve_hot(shape, head, query, raw)

    def take(self, content: bytes) -> None:
        """A piece of the body."""
        if self.order is not None:
            self.pieces.append(content)
        else:
            super().take(content)

    def complete(self) -> None:
        """The body is complete."""
        order = self.order
        if order is None:
            super().complete()
        else:
            body = b"".join(self.pieces)
            self.pieces.clear()
            self._ask(order, body)

    def reject(self, error: RequestError, tier: str = "none") -> None:
        """Answer an error that ends the connection."""
        self.order = None
        self.pieces.clear()
        super().reject(error, tier)

    def _serve_hot(self, shape: Shape, head: Head, query: bytes, raw: bytes) -> None:
        lane = self.lane
        try:
            order = take_order(shape, head, query, lane.settings)
            caller = lane.identify(order.authorization)
            if caller is None:
                raise _unknown(order)
        except RequestError as exc:
            self.refuse(exc, head)
            return
        self.order = order
        self.caller = caller
        if order.repeatable:
            self._remember(order, raw)
        length, held = head.length, self.held
        if 0 <= length <= len(held):
            self.held = held[length:]
            self._ask(order, held[:length])
            return
        self.phase = BODY
        self.expect_body(head)
        if order.expects and not held:
            self.transport.write(_CONTINUE)

    def _remember(self, order: Order, raw: bytes) -> None:
        found = _LENGTH.search(raw)
        if found is not None and len(raw) + 9 <= self.desk.most_header:
            self.memo = order
            self.before = raw[: found.start(1)]
            self.after = raw[found.end(1) :]

    def _repeat(self, order: Order, body: bytes) -> None:
        """Start on a request that came whole, under the remembered head."""
        lane = self.lane
        self.id = order.id or lane.new_id()
        caller = lane.identify(order.authorization)
        if caller is None:
            self._deny(_unknown(order))
        else:
            self.order = order
            self.caller = caller
            self._ask(order, body)

    def _ask(self, order: Order, body: bytes) -> None:
        self.begun = monotonic()
        try:
            if order.octets:
                model, text, parameters = order.model, read_octets(body), b""
            else:
                model, text, parameters = order.shape.read(body)
        except BadRequest as exc:
            self._deny(exc, self.lane.tiers[self.caller.tier])
            return
        self.phase = ASKED
        lane, caller = self.lane, self.caller
        tier = caller.tier if caller.tier > order.tier else order.tier
        lane.submit(self, caller, self.id, model or lane.model, text, parameters, tier, order.timeout)

    def _deny(self, error: RequestError, tier: str = "none") -> None:
        """Answer an error to a request that was read to its end."""
        self.order = None
        self.say(error.code, error.message, error.retry_after)
        self.desk.refused(error.code, tier)
        self.finish()

    def _fail(self, reply: Reply) -> None:
        failure = reply.failure or Failure(INTERNAL, "the reply is neither an output nor a failure")
        self.say(failure.code, failure.message, failure.retry_after, failure.reason)


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target, the path decoded."""
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        try:
            path = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return b"", b""
    return (unquote_to_bytes(path) if b"%" in path else path), query


def _unknown(order: Order) -> Unauthenticated:
    if order.authorization:
        return Unauthenticated("the key is not valid")
    return Unauthenticated("a key is required: send Authorization: Bearer KEY")
