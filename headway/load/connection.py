"""Keep-alive connections of the load generator, each with one request in flight. The pool prefers the connection used last. A
plain answer that arrives in one piece is parsed with a few searches. All others need the slower AnswerReader."""

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

IDLE = -1  # The `number` of a connection without a request in flight.

_MOST = 10_000
_MOST_OPENING = 64  # Most attempts to connect at a time. Servers queue 100 or more; others are retried a second later.
_SPARE_FILES = 64
_CONNECT_WITHIN = 5.0  # Seconds that an attempt to connect may take.
_STALE = 4.0  # Seconds after which an idle connection is not reused. Servers close idle connections after 5 s or more.


class Owner(Protocol):
    """Receiver of a connection's events."""

    def ready(self, connection: Connection) -> None: ...

    def answered(self, connection: Connection, status: int, body: bytes, retry_after: bool, reusable: bool) -> None:
        """Handle the answer to the request in flight. `retry_after` is True if a 429 or 503 had a Retry-After header."""

    def lost(self, connection: Connection, cause: str) -> None:
        """Handle the loss of a connection. `cause` becomes the outcome of the request in flight, if there is one."""


class Connection(asyncio.Protocol):
    """Connection that carries one request at a time. `send` sets `number`, `due` and `tier` of the request in flight. The
    owner resets `number` to IDLE once the request has an outcome. `idle_since` is when the connection became free."""

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
        """Send a request. The connection must be open, without a request in flight."""
        self.number, self.due, self.tier = number, due, tier
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.open = True
        self._owner.ready(self)

    def eof_received(self) -> None:
        self.open = False

    def data_received(self, data: bytes) -> None:
        if self.number == IDLE:
            self.close("unasked")  # After an unsolicited answer, each answer would be matched to the wrong request.
            return
        reader = self._reader
        if reader is None:
            if self._report_plain(data):
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
        """Close the connection gracefully. There must be no request in flight."""
        self.open = False
        self.transport.close()

    def close(self, cause: str) -> None:
        """Close the connection immediately. `cause` becomes the outcome of the request in flight."""
        self.open = False
        self._cause = self._cause or cause
        self.transport.abort()

    def _report_plain(self, data: bytes) -> bool:
        """Report the answer if `data` is a complete plain answer. Return False if it needs a real parser."""
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
    """Parses one answer. `malformed` is True if it isn't HTTP. `status` and `reusable` are set once it is `complete`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._framed = self._headed = False
        self.complete = self.malformed = self.retry_after = False
        self.reusable = False
        self.status = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # Garbage after a complete answer makes only the connection unusable.
            self.malformed = not self.complete
            self.reusable = False

    def end(self) -> None:
        """Note that the server has closed the connection. This completes an answer without a length."""
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
        """Complete the answer, but ignore interim answers and any further answer."""
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            return
        self.complete, self.status = True, status
        self.reusable = self._parser.should_keep_alive()


class Unreachable(HeadwayError):
    """The target doesn't accept connections."""


class ConnectionPool:
    """Pool of at most `most` connections to one address; by default 10,000, or fewer if the process can't open so many files.
    `build` returns a new connection. `tried` is called after each attempt to connect that `grow` has started, with the error
    message, or "" after a success."""

    def __init__(
        self, host: str, port: int, most: int | None, build: Callable[[], Connection], tried: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._host, self._port = host, port
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": host}
        self._most = most or min(_MOST, _file_limit() - _SPARE_FILES)
        self._build, self._tried = build, tried
        self._opening: set[asyncio.Task[None]] = set()
        self.open: set[Connection] = set()  # The owner of the connections adds and removes them.
        self.idle: list[Connection] = []  # Free connections, with the last used one at the end. Some may be closed.

    async def warm(self, count: int) -> None:
        """Open up to `count` connections to the address that answered first. Raises Unreachable if the first attempt fails."""
        try:
            await self._connect()
        except OSError as exc:
            if fault := tls_fault(exc, "--ca, or with SSL_CERT_FILE", "--cert"):
                raise Unreachable(f"no connection to {self._host}:{self._port}: {fault}") from None
            reason = exc.strerror or str(exc) or "no answer in time"
            hint = "Is the server running, and is this its address?"
            raise Unreachable(f"no connection to {self._host}:{self._port}: {reason}. {hint}") from None
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
        """Return the idle connection that was used last, or None. `now` is from the same clock as `idle_since`."""
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
        """Start attempts to connect until `wanted` are in progress, or a limit is reached."""
        room = self._most - len(self.open)
        for _ in range(min(wanted, room, _MOST_OPENING) - len(self._opening)):
            task = asyncio.get_running_loop().create_task(self._try())
            self._opening.add(task)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in list(self.open):
            if self._tls:
                connection.close("closed")  # A graceful end of TLS would wait for the server, but the loop ends now.
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
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
