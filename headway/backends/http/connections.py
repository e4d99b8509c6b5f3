"""Connections of one slot to a remote API over HTTP.

An idle connection is closed before the API would close it, because a request that is sent at the same time may or may not have
run. Most servers keep idle connections for 5 s or longer, and a shorter `Keep-Alive: timeout=…` is respected.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp.connector import AddrInfoType

from headway.backends.remote.generations import AT_ONCE, Generations
from headway.runtime.certificates import ClientTls, RemoteCertificates

END_TIMEOUT = 1.0
"""Seconds after which connections that don't end are left to the event loop."""


class Sockets:
    """Open sockets, whose end can be awaited. A TLS connection announces its end and waits for the other side. Closing a
    session doesn't wait for connections that failed earlier, and an event loop that ends before them warns, or hangs."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        self._gone: asyncio.Event | None = None

    def create(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = _Socket(self._forget, family, kind, protocol)
        self._open.add(made)
        return made

    async def end(self) -> None:
        """Cut open sockets, and wait up to `END_TIMEOUT` until the event loop has released them."""
        if not self._open:
            return
        gone = self._gone = asyncio.Event()
        for open_socket in self._open:
            with contextlib.suppress(OSError):  # Not connected yet, or cut by the other side.
                open_socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT):
                await gone.wait()
        await asyncio.sleep(0)  # The event loop forgets a socket one turn after closing it.

    def _forget(self, closed: _Socket) -> None:
        self._open.discard(closed)
        if self._gone is not None and not self._open:
            self._gone.set()


class _Socket(socket.socket):
    """Socket that reports its end."""

    __slots__ = ("_on_close",)

    def __init__(self, on_close: Callable[[_Socket], None], family: int, kind: int, protocol: int) -> None:
        self._on_close = on_close
        super().__init__(family, kind, protocol)

    def close(self) -> None:
        super().close()
        self._on_close(self)

    def detach(self) -> int:
        """Give up the descriptor. uvloop calls this instead of `close`, and closes the descriptor itself."""
        descriptor = super().detach()
        self._on_close(self)
        return descriptor


IDLE = 4.0
"""Seconds for which an idle connection is kept."""
_MARGIN = 1.0
"""Seconds by which it is closed before the API would close it."""
_WRITTEN_WHOLE = 1 << 20
"""Size in bytes above which a body is written in pieces, so that other tasks get a turn."""
_TIMEOUT = re.compile(r"(?:^|[\s,])timeout=([0-9]{1,6})(?![0-9])")
_ENDED = "closing transport"
"""aiohttp's words for a write that didn't begin."""


class TooLong(Exception):
    """An answer's body is too long."""


class Response(NamedTuple):
    """An answer with its whole, decompressed body."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class _Client(msgspec.Struct, eq=False):
    """Connections made with the same certificates."""

    session: aiohttp.ClientSession
    sockets: Sockets

    async def end(self) -> None:
        await self.session.close()
        await self.sockets.end()


class Connections(Generations[_Client]):
    """Connections, replaced together after a long idle time or when the certificates change."""

    def __init__(self, clock: Callable[[], float], certificates: RemoteCertificates | None = None) -> None:
        self._certificates = certificates
        super().__init__(self._client, _Client.end, self._tls, clock, IDLE)

    async def request(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, within: float, most: int
    ) -> Response:
        """Send one request and read its answer. `within` limits the seconds for connecting.

        Raises:
            NotStarted: `open` wasn't called.
            TooLong: the body has more than `most` bytes after decompression.
            aiohttp.ClientError: no answer came. `was_sent` tells if the request left.
        """
        async with self.use() as used:
            data = io.BytesIO(body) if len(body) > _WRITTEN_WHOLE else body or None
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=within)
            sent = used.content.session.request(
                method, url, data=data, headers=headers, allow_redirects=False, timeout=timeout
            )
            async with sent as response:
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > most:
                        raise TooLong
                if keep := _TIMEOUT.search(response.headers.get("Keep-Alive", "")):  # The API may close it earlier.
                    self.idle = max(min(IDLE, int(keep[1]) - _MARGIN), 0.0)
                return Response(response.status, response.headers, answer)

    def _tls(self) -> ClientTls | None:
        return None if self._certificates is None else self._certificates.current

    def _client(self) -> _Client:
        tls, sockets = self._tls(), Sockets()
        trust = True if tls is None else tls.context
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        connector = aiohttp.TCPConnector(
            limit=AT_ONCE, keepalive_timeout=IDLE, ssl=trust, socket_factory=sockets.create
        )
        session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout)
        return _Client(session, sockets)


def was_sent(exc: Exception) -> bool:
    """Return True if a whole request may have left before this error."""
    if isinstance(exc.__cause__, aiohttp.ClientConnectionResetError) and _ENDED in str(exc.__cause__):
        return False  # The connection ended before the body was written, as when the API refuses a certificate.
    return not isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def tls_error(exc: BaseException | None) -> ssl.SSLError | None:
    """Return the `ssl` error behind an aiohttp error, which may have the same class without details, or None without any."""
    while exc is not None and (isinstance(exc, aiohttp.ClientError) or not isinstance(exc, ssl.SSLError)):
        exc = exc.__cause__ or exc.__context__
    return exc
