"""Keep-alive connections of the load generator, with one request in flight each. The last one used is used next.

A plain answer that arrives whole is cut apart by a few searches. Any other goes through an AnswerReader, which costs more."""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from headway.client.errors import tls_fault
from headway.errors import HeadwayError

IDLE = -1  # Number of a connection without a request in flight.

_MOST = 10_000
# Attempts to connect at once: fewer than the 100 or more that servers queue. Any beyond are dropped, and repeated a second later.
_MOST_OPENING = 64
_SPARE_FILES = 64
_CONNECT_WITHIN = 5.0  # Seconds that an attempt to connect may take.
# Seconds after which an idle connection is not used again. Servers close theirs after 5 or more, and lose a request sent then.
_STALE = 4.0


class Owner(Protocol):
    """Whoever uses a connection, and hears from it."""

    def ready(self, connection: Connection) -> None: ...

    def answered(self, connection: Connection, status: int, body: bytes, retry_after: bool, reusable: bool) -> None:
        """Note the answer to the request in flight. `retry_after` is True if a 429 or 503 had that header; `reusable`, if the
        connection can carry another request."""

    def lost(self, connection: Connection, cause: str) -> None:
        """Note that a connection is closed, and why, for the request in flight if there is one."""


class Connection(asyncio.Protocol):
    """Connection that carries one request after the other. `send` sets `number`, `due` and `tier` of the request in flight. The
    owner sets `number` to IDLE once that has an outcome. `idle_since` is when the owner put the connection aside."""

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
        """Send a request. Only call this on an open connection with none in flight."""
        self.number, self.due, self.tier = number, due, tier
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.open = True
        self._owner.ready(self)

    def eof_received(self) -> None:
        """Note that the server will send no more."""
        self.open = False

    def data_received(self, data: bytes) -> None:
        if self.number == IDLE:
            self.close("unasked")  # An unsolicited answer, so the next would be taken for another request's.
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
            self._report(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        cause = self._cause or ("closed" if exc is None else _cause_of(exc))
        reader = self._reader
        if reader is not None and not self._cause:
            cause = "truncated"
            if exc is None:
                reader.end()
            if reader.complete:
                self._report(reader)
        self._owner.lost(self, cause)

    def retire(self) -> None:
        """Close in good order, with no request in flight."""
        self.open = False
        self.transport.close()

    def close(self, cause: str) -> None:
        """Close at once. `cause` says why, for the request in flight."""
        self.open = False
        self._cause = self._cause or cause
        self.transport.abort()

    def _take_whole(self, data: bytes) -> bool:
        """Report the answer if `data` is all of it. Returns False if only a parser can tell."""
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

    def _report(self, reader: AnswerReader) -> None:
        self._reader = None
        self._owner.answered(self, reader.status, reader.body, reader.retry_after, reader.reusable)


def _cause_of(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return f"TLS {(exc.reason or 'error').lower().replace('_', ' ')}"
    return "reset"


class AnswerReader:
    """Reader of one answer's bytes. They are malformed if they aren't HTTP, so that the answer will never be complete."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._framed = self._headed = False
        self.complete = self.malformed = self.retry_after = False
        self.reusable = False  # True if the connection may carry another request; set when complete, as is `status`.
        self.status = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # Trailing garbage spoils the connection, not the complete answer.
            self.malformed = not self.complete
            self.reusable = False

    def end(self) -> None:
        """Note that the server closed the connection, where an answer without a length ends."""
        if self._headed and not self._framed and not self.malformed:
            self.complete, self.status = True, self._parser.get_status_code()

    def on_message_begin(self) -> None:
        self.reusable = False
        if not self.complete:
            self._pieces.clear()
            self._framed = self.retry_after = False

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lowered == b"retry-after" and not self.complete:
            self.retry_after = True

    def on_headers_complete(self) -> None:
        self._headed = self._parser.get_status_code() >= 200

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Ignore interim answers, and any after the first."""
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            return
        self.complete, self.status = True, status
        self.reusable = self._parser.should_keep_alive()


class Unreachable(HeadwayError):
    """No connection to the target can be opened."""


class ConnectionPool:
    """Pool of connections to one address, up to as many as the process may open files or 10,000 by default. `build` makes the
    protocol of a new one. `tried` is called after each attempt that `grow` began, with the error's text or ""."""

    def __init__(
        self, host: str, port: int, most: int | None, build: Callable[[], Connection], tried: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._host, self._port = host, port
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": host}
        self._most = most or min(_MOST, _file_limit() - _SPARE_FILES)
        self._build, self._tried = build, tried
        self._opening: set[asyncio.Task[None]] = set()
        self.open: set[Connection] = set()  # Open connections. Their owner adds and removes them.
        self.idle: list[Connection] = []  # Free connections, the last one used at the end. Some may be closed by now.

    async def warm(self, count: int) -> None:
        """Open `count` connections, or as many as possible, to the address that answered first. Raises Unreachable if none
        opens."""
        try:
            await self._connect()
        except OSError as exc:
            if fault := tls_fault(exc, "--ca, or by SSL_CERT_FILE", "--cert"):
                raise Unreachable(f"no connection to {self._host}:{self._port}: {fault}") from None
            reason = exc.strerror or str(exc) or "no answer in time"
            raise Unreachable(
                f"no connection to {self._host}:{self._port}: {reason}. Is the server running, and is this its address?"
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
        """Return the idle connection used last, or None. `now` is compared with their `idle_since`."""
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
        """Have at least `wanted` attempts to connect under way, as far as the limits allow."""
        room = self._most - len(self.open)
        for _ in range(min(wanted, room, _MOST_OPENING) - len(self._opening)):
            task = asyncio.get_running_loop().create_task(self._try())
            self._opening.add(task)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in list(self.open):
            if self._tls:
                connection.close("closed")  # An orderly end of TLS needs the server's answer, and the loop ends now.
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
    """Return how many files this process may open, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
