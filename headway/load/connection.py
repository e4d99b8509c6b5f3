"""Keep-alive connection of the load generator: one request out, one answer back.

An answer that arrives whole, with a length and nothing unusual about it, is cut apart by a few searches. Every
other one goes through an AnswerReader, which costs more.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol, cast

from headway.load.answer import AnswerReader

IDLE = -1
"""Number in place of a request's while none is in flight."""


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
