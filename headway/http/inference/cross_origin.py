"""Connections of a public port that pages of other sites may ask (CORS). Where none may, there is none of these.

A browser asks by OPTIONS whether it may send a request that no form could; that needs no credential, and no route. Every answer to
a page that may ask says so. Nothing here reads a cookie, so pages send their credential themselves.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from headway.doors.fields import ID_PREFIX
from headway.errors import FORBIDDEN, RequestError
from headway.http.inference.context import InferenceContext
from headway.http.inference.fast_path import FastPathConnection
from headway.http.inference.inference_head import InferenceHead
from headway.http.server.connection import IDLE
from headway.http.server.head import Head

ANY = "*"
_EXPOSED = (
    "x-request-id, retry-after, retry-after-ms, location, preference-applied, ratelimit, ratelimit-policy, idempotency-replayed, "
    "x-headway-cache, x-headway-kept, x-headway-dropped-reason, x-headway-error, x-should-retry, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, inference-header-content-length"
)
_MAX_AGE = 600
"""Seconds for which a browser need not ask again."""


class Origins:
    """Origins whose pages may ask.

    Arguments:
        text: value of the setting `cors_origins`.
    """

    def __init__(self, text: str) -> None:
        self._any = text == ANY
        self._known = {origin.strip().lower().encode() for origin in text.split(",")}

    def lines(self, origin: bytes) -> bytes:
        """Header lines that let a page of an origin read an answer; empty where it may not."""
        if not self._any and origin.lower() not in self._known:
            return b""
        allowed = b"*\r\n" if self._any else origin + b"\r\nvary: origin\r\n"
        return b"access-control-allow-origin: " + allowed

    def refuse(self, origin: bytes) -> RequestError:
        """Refusal of a page of another origin."""
        shown = origin[:100].decode("latin-1")
        return RequestError(f"pages of {shown!r} may not ask here: it is not in --cors-origins", code=FORBIDDEN)


class _Marking:
    """Transport that adds header lines to the first answer that is written to it after they were set.

    Attributes:
        lines: lines to add; empty for none.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.lines = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write."""
        if self.lines and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            begin = data.index(b"\r\n") + 2
            data, self.lines = b"%b%b%b" % (data[:begin], self.lines, data[begin:]), b""
        self._transport.write(data)


class CrossOriginConnection(FastPathConnection):
    """Connection of the public port that answers pages of other sites, too.

    Arguments:
        inference: context shared with the listener's other connections.
        origins: origins whose pages may ask.
    """

    __slots__ = ("marking", "origins", "remembered")

    def __init__(self, inference: InferenceContext, origins: Origins) -> None:
        super().__init__(inference)
        self.origins = origins
        self.marking: _Marking | None = None
        self.remembered = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in."""
        self.marking = _Marking(transport)
        super().connection_made(cast(asyncio.Transport, self.marking))

    def serve(self, head: Head, raw: bytes) -> None:
        """Start on a request, or answer a browser that asks whether it may send one."""
        origin = wanted = b""
        for name, value in head.fields:
            if name == b"origin":
                origin = value
            elif name == b"access-control-request-method":
                wanted = value
        lines = self.origins.lines(origin) if origin else b""
        if origin and self.marking is not None:
            self.marking.lines = lines and lines + f"access-control-expose-headers: {_EXPOSED}\r\n".encode()
        if head.method != b"OPTIONS" or not wanted:
            super().serve(head, raw)
        elif lines:
            self._permit(head)
        else:
            self.refuse(self.origins.refuse(origin), head)

    def _permit(self, head: Head) -> None:
        """Answer a browser that it may send what it asks to."""
        asked = next((value for name, value in head.fields if name == b"access-control-request-headers"), b"")
        headers = b"access-control-allow-headers: %b\r\n" % asked if asked else b""
        close = b"connection: close\r\n" if self.last or self.context.closing else b""
        self.transport.write(
            b"HTTP/1.1 204 No Content\r\ndate: %b\r\nx-request-id: %b\r\naccess-control-allow-methods: GET, POST, DELETE\r\n"
            b"%baccess-control-max-age: %d\r\n%b\r\n"
            % (self.context.date, (ID_PREFIX + self.id).encode(), headers, _MAX_AGE, close)
        )
        if self.expect_body(head):
            self._drop_body()
        else:
            self.finish()

    def _take_head(self) -> bool:
        """Start on the next request, if all of its head is here; its answer gets lines of its own."""
        if self.marking is not None:
            self.marking.lines = b""
        return super()._take_head()

    def _remember(self, request: InferenceHead, raw: bytes) -> None:
        super()._remember(request, raw)
        self.remembered = self.marking.lines if self.marking is not None else b""

    def data_received(self, data: bytes) -> None:
        """Take the bytes that came. Their answer gets the lines of the remembered head, unless they are taken for another."""
        if self.marking is not None and self.phase == IDLE:
            self.marking.lines = self.remembered
        super().data_received(data)
