"""Keep-alive connections of the load generator: one request out, one answer back; the one used last is used next.

An answer that arrives whole, with a length and nothing unusual about it, is cut apart by a few searches. Every
other one goes through an AnswerReader, which costs more.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from headway.client.reaching import tls_fault
from headway.errors import HeadwayError

IDLE = -1
"""Number in place of a request's while none is in flight."""

_MOST = 10_000
_MOST_OPENING = 64
"""Attempts under way at once: fewer than the 100 or more that servers let wait to be accepted.

Past that number an attempt is dropped, and repeated a second later.
"""
_SPARE_FILES = 64
_CONNECT_WITHIN = 5.0
"""Seconds an attempt to connect may take."""
_STALE = 4.0
"""Seconds after which an idle connection is not used again.

Servers close theirs after 5 or more, and a request sent at that instant would be lost through no fault of the server.
"""


class Owner(Protocol):
    """Owner of a connection, to which it reports."""

    def ready(self, connection: Connection) -> None:
        """Note that a connection is open and free."""
        ...

    def answered(self, connection: Connection, status: int, body: bytes, retry_after: bool, reusable: bool) -> None:
        """Note the answer to the request in flight.

        Arguments:
            connection: the connection.
            status: HTTP status.
            body: body of the answer.
            retry_after: whether the answer had that header; looked for in 429 and 503 only.
            reusable: whether the connection can carry the next request.
        """
        ...

    def lost(self, connection: Connection, cause: str) -> None:
        """Note that a connection is closed. `cause` says why, for the request in flight if there is one."""
        ...


class Connection(asyncio.Protocol):
    """Connection that carries one request after the other for an Owner.

    Attributes:
        number, due, tier: number, due instant and tier of the request in flight, set by `send`; `number` is IDLE when
        there is none, which the owner sets when the request has its outcome.
        idle_since: instant at which the owner put it aside; the owner's.
        open: whether it can carry a request.
    """

    __slots__ = ("_cause", "_owner", "_reader", "due", "idle_since", "number", "open", "tier", "transport")

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._reader: AnswerReader | None = None
        self._cause = ""
        self.number = IDLE
        self.due = self.idle_since = 0.0
        self.tier = 0
        self.open = False

    def send(self, request: bytes, number: int, due: float, tier: int) -> None:
        """Put a request in flight. Only when open, and when none is."""
        self.number, self.due, self.tier = number, due, tier
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's: the connection is open."""
        self.transport = cast(asyncio.Transport, transport)
        self.open = True
        self._owner.ready(self)

    def eof_received(self) -> None:
        """Asyncio's: the server will send no more."""
        self.open = False

    def data_received(self, data: bytes) -> None:
        """Asyncio's: some bytes of an answer."""
        if self.number == IDLE:
            self.close("unasked")
            return
        reader = self._reader
        if reader is None:
            if self._take_whole(data):
                return
            reader = self._reader = AnswerReader()
        reader.feed(data)
        if reader.malformed:
            self.close("malformed")
        elif reader.complete:
            self._hand_over(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's: the connection is closed."""
        self.open = False
        cause = self._cause or ("closed" if exc is None else _cause_of(exc))
        reader = self._reader
        if reader is not None and not self._cause:
            cause = "truncated"
            if exc is None:
                reader.end()
            if reader.complete:
                self._hand_over(reader)
        self._owner.lost(self, cause)

    def retire(self) -> None:
        """Close; no request is in flight."""
        self.open = False
        self.transport.close()

    def close(self, cause: str) -> None:
        """Close at once. `cause` says why, for the request in flight if there is one."""
        self.open = False
        self._cause = self._cause or cause
        self.transport.abort()

    def _take_whole(self, data: bytes) -> bool:
        """Report an answer that `data` holds entirely; False when it takes a parser to tell."""
        end = data.find(b"\r\n\r\n")
        if end < 0 or not data.startswith(b"HTTP/1.1 "):
            return False
        head = data[:end].lower()
        at = head.find(b"\r\ncontent-length: ")
        if at < 0 or b"\r\ntransfer-encoding:" in head:
            return False
        line = head.find(b"\r\n", at + 18)
        try:
            status = int(head[9:12])
            length = int(head[at + 18 : line] if line > 0 else head[at + 18 :])
        except ValueError:
            return False
        if status < 200 or len(data) != end + 4 + length:
            return False
        if b"\r\nconnection:" in head and b"\r\nconnection: keep-alive" not in head:
            return False
        retry_after = status in (429, 503) and b"\r\nretry-after:" in head
        self._owner.answered(self, status, data[end + 4 :], retry_after, True)
        return True

    def _hand_over(self, reader: AnswerReader) -> None:
        self._reader = None
        self._owner.answered(self, reader.status, reader.body, reader.retry_after, reader.reusable)


def _cause_of(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return f"TLS {(exc.reason or 'error').lower().replace('_', ' ')}"
    return "reset"


class AnswerReader:
    """Reader of the bytes of one answer.

    Attributes:
        complete: whether the answer is all there.
        malformed: whether the bytes are no HTTP, so that it will never be complete.
        reusable: whether the connection may carry the next request; set when complete.
        status: HTTP status; set when complete.
        retry_after: whether it has a Retry-After header.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._framed = self._headed = False
        self.complete = self.malformed = self.reusable = self.retry_after = False
        self.status = 0

    @property
    def body(self) -> bytes:
        """The body, as far as it has come."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        """Take the bytes that came next."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # What follows a complete answer spoils the connection, not the answer.
            self.malformed = not self.complete
            self.reusable = False

    def end(self) -> None:
        """The server closed the connection: an answer without a length ends there."""
        if self._headed and not self._framed and not self.malformed:
            self.complete, self.status = True, self._parser.get_status_code()

    def on_message_begin(self) -> None:
        """Httptools': an answer begins."""
        self.reusable = False
        if not self.complete:
            self._pieces.clear()
            self._framed = self.retry_after = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools': one header."""
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lowered == b"retry-after" and not self.complete:
            self.retry_after = True

    def on_headers_complete(self) -> None:
        """Httptools': all headers are there."""
        self._headed = self._parser.get_status_code() >= 200

    def on_body(self, data: bytes) -> None:
        """Httptools': a piece of the body."""
        if not self.complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Httptools': an answer is complete. An interim one does not count, nor does one nobody asked for."""
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            return
        self.complete, self.status = True, status
        self.reusable = self._parser.should_keep_alive()


class Unreachable(HeadwayError):
    """No connection to the target can be opened."""


class ConnectionPool:
    """Pool of connections to one address, up to a number.

    Arguments:
        host, port: address.
        most: most connections at once; None for as many as the process may open files, up to 10,000.
        build: makes the protocol of a new connection.
        tried: called when an attempt that `grow` began is over: with the error's text, "" for none.
        tls: certificates to trust and to show; None: no TLS.
    """

    def __init__(
        self,
        host: str,
        port: int,
        most: int | None,
        build: Callable[[], Connection],
        tried: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": host}
        self._most = most or min(_MOST, _file_limit() - _SPARE_FILES)
        self._build, self._tried = build, tried
        self._opening: set[asyncio.Task[None]] = set()
        self.open: set[Connection] = set()
        """Open connections. Their owners add and remove them."""
        self.idle: list[Connection] = []
        """Connections free for a request, the one used last at the end; some may have been closed since."""

    async def warm(self, count: int) -> None:
        """Open `count` connections or as many as may be; all of them go to the address that answered first.

        Raises:
            Unreachable: not even one could be opened.
        """
        try:
            await self._connect()
        except OSError as exc:
            if fault := tls_fault(exc, "--ca, or by SSL_CERT_FILE", "--cert"):
                raise Unreachable(f"no connection to {self._host}:{self._port}: {fault}") from None
            why = exc.strerror or str(exc) or "no answer in time"
            raise Unreachable(
                f"no connection to {self._host}:{self._port}: {why}. Is the server running, and is this its address?"
            ) from None
        for transport in (connection.transport for connection in self.open):
            self._host, self._port = transport.get_extra_info("peername")[:2]
        wanted = min(count, self._most)
        while len(self.open) < wanted:
            before = len(self.open)
            step = min(_MOST_OPENING, wanted - before)
            await asyncio.gather(*(self._connect() for _ in range(step)), return_exceptions=True)
            if len(self.open) <= before:
                return

    def take(self, now: float) -> Connection | None:
        """The idle connection used last, None when there is none; `now` is compared with their `idle_since`."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            if not connection.open:
                continue
            if now - connection.idle_since <= _STALE:
                return connection
            connection.retire()
        return None

    def grow(self, wanted: int) -> None:
        """Have at least `wanted` connections on their way, as far as they may be."""
        room = self._most - len(self.open)
        for _ in range(min(wanted, room, _MOST_OPENING) - len(self._opening)):
            task = asyncio.get_running_loop().create_task(self._try())
            self._opening.add(task)

    def close(self) -> None:
        """Close all connections and give up all attempts."""
        for task in self._opening:
            task.cancel()
        for connection in list(self.open):
            if self._tls:
                connection.close("closed")  # To end TLS in order takes the server's answer, and the loop ends now.
            else:
                connection.retire()

    async def _try(self) -> None:
        failure = ""
        try:
            await self._connect()
        except OSError as exc:
            failure = f"connect {errno.errorcode.get(exc.errno or 0, 'timeout')}"
        task = asyncio.current_task()
        if task is not None:
            self._opening.discard(task)
        self._tried(failure)

    async def _connect(self) -> None:
        async with asyncio.timeout(_CONNECT_WITHIN):
            await asyncio.get_running_loop().create_connection(self._build, self._host, self._port, **self._tls)


def _file_limit() -> int:
    """Number of files this process may open, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
