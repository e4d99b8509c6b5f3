"""A remote API over HTTP: one POST per batch.

| the API says | meaning | reaction |
|---|---|---|
| nothing, 408, 429, 5xx | it is in trouble | up to `max_tries` attempts, after an exponential pause or the requested rest |
| 400, 413, 422 | it rejects an input or the batch | final; search for the bad input |
| any other status | wrong API or credential | final; no input is to blame |

An API requests a rest with Retry-After or retry-after-ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp.connector import AddrInfoType

from headway.backends.remote import backend, tls_failures
from headway.backends.remote.backend import AT_ONCE, Answered, Generations, NotStarted, RemoteBackend, Tried, TryVerdict
from headway.config.target import RemoteTarget
from headway.core.trace_context import trace_fields
from headway.dialects.dialect import Remote, RemoteCall
from headway.dialects.table import reach
from headway.errors import BadOutput, RemoteAbsent, RemoteError, RemoteRefused
from headway.runtime.certificates import ClientTls, RemoteCertificates
from headway.runtime.spans import OUTGOING
from headway.version import __version__

END_TIMEOUT = 1.0  # Seconds to wait for connections to close.


class Sockets:
    """Keeps track of open sockets, so that `end` can wait for them. Closing a session doesn't wait for failed connections.
    With TLS, these may still be waiting for the other side. If the event loop ended before them, it would warn or hang."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        self._gone: asyncio.Event | None = None

    def create(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = _Socket(self._forget, family, kind, protocol)
        self._open.add(made)
        return made

    async def end(self) -> None:
        """Shut down open sockets, and wait up to `END_TIMEOUT` until the event loop has released them."""
        if not self._open:
            return
        gone = self._gone = asyncio.Event()
        for open_socket in self._open:
            with contextlib.suppress(OSError):  # It isn't connected yet, or the other side closed it.
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
    """A socket that reports when it is closed."""

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


IDLE = 4.0  # How many seconds an idle connection is kept.
_MARGIN = 1.0  # Seconds by which an idle connection is closed before the API would close it.
_WRITTEN_WHOLE = 1 << 20  # Size in bytes above which a body is written in pieces, so that other tasks get a turn.
_TIMEOUT = re.compile(r"(?:^|[\s,])timeout=([0-9]{1,6})(?![0-9])")
_ENDED = "closing transport"  # aiohttp's words for a write that didn't begin.


class TooLong(Exception):
    """An answer's body is too long."""


class Response(NamedTuple):
    """An answer with its whole, decompressed body."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class _Client(msgspec.Struct, eq=False):
    session: aiohttp.ClientSession
    sockets: Sockets

    async def end(self) -> None:
        await self.session.close()
        await self.sockets.end()


class Connections(Generations[_Client]):
    """One slot's connections. All are replaced after a long idle time, or when the certificates change."""

    def __init__(self, clock: Callable[[], float], certificates: RemoteCertificates | None = None) -> None:
        self._certificates = certificates
        super().__init__(self._client, _Client.end, self._tls, clock, IDLE)

    async def request(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, within: float, most: int
    ) -> Response:
        """Send one request, and return its answer. Connecting may take `within` seconds.

        Raises NotStarted before `open`, TooLong if the decompressed body exceeds `most` bytes, or aiohttp.ClientError if
        there is no answer. In the last case, `was_sent` tells whether the request may have been sent."""
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
    """Return True if the whole request may have been sent before this error."""
    if isinstance(exc.__cause__, aiohttp.ClientConnectionResetError) and _ENDED in str(exc.__cause__):
        return False  # The connection ended before the body was written, for example because the API refused a certificate.
    return not isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def tls_error(exc: BaseException | None) -> ssl.SSLError | None:
    """Return the `ssl` error behind an aiohttp error, or None. aiohttp's own TLS errors lack the details."""
    while exc is not None and (isinstance(exc, aiohttp.ClientError) or not isinstance(exc, ssl.SSLError)):
        exc = exc.__cause__ or exc.__context__
    return exc


_JSON_BYTES = "Inference-Header-Content-Length"

_REFUSALS = frozenset([400, 413, 422])


class HttpBackend(RemoteBackend):
    """Backend for a slot of a remote API over HTTP. The default `remote` is derived from the URL. `wall` returns Unix time."""

    def __init__(
        self,
        spec: RemoteTarget,
        *,
        remote: Remote | None = None,
        wall: Callable[[], float] = time.time,
        **settings: Any,
    ) -> None:
        super().__init__(spec, remote or reach(spec.url), **settings)
        self._wall = wall
        self._generations = self._connections = Connections(time.monotonic, self._certificates)

    async def _try(self, call: RemoteCall, left: float) -> Answered | Tried:
        try:
            response = await self._connections.request(
                "POST" if call.body else "GET",
                call.place or self._remote.url,
                call.body,
                self._headers(call.headers, left),
                within=max(left / 2, 0.001),
                most=backend.MAX_ANSWER,
            )
        except NotStarted:
            raise self._error(RemoteError, "was not started") from None
        except TooLong:
            raise self._error(BadOutput, f"answered more than {backend.MAX_ANSWER} bytes") from None
        except Exception as exc:  # Libraries raise all kinds of errors for bad data.
            if (error := tls_error(exc)) is not None:
                return Tried(tls_failures.explain(error), tls_failures.SHOWN, RemoteAbsent, final=False)
            final = not isinstance(exc, aiohttp.ClientError | OSError) or isinstance(exc, aiohttp.InvalidURL)
            kind = RemoteError if was_sent(exc) else RemoteAbsent
            return Tried(self._described(exc), type(exc).__name__, kind, final)
        if 200 <= response.status < 300:
            return Answered(response.body, _json_bytes(response.headers))
        if failure := tls_failures.explain_answer(response.status, response.body):
            return Tried(failure, tls_failures.SHOWN, RemoteAbsent, final=True)
        verdict = judge(response.status, response.headers, self._wall())
        return Tried.judged(verdict, f"HTTP {response.status}", response.body, response.status)

    def _headers(self, own: Mapping[str, str], left: float) -> dict[str, str]:
        return {
            "User-Agent": f"headway/{__version__}",
            **self._credentials.current(),
            **own,
            **trace_fields(OUTGOING.get()),
            "X-Request-Timeout-Ms": str(max(int(left * 1000), 1)),
        }

    def _described(self, exc: Exception) -> str:
        """Return a connection error's type, and its message unless that may quote the API's answer or a secret."""
        quotes = isinstance(exc, aiohttp.ClientError) and not isinstance(exc, OSError)
        text = "" if quotes else str(exc)
        return f"{type(exc).__name__}: {text}" if text and not self._is_secret(text) else type(exc).__name__


def _json_bytes(headers: Mapping[str, str]) -> int:
    """Return the length of the JSON that precedes a body's binary data, or -1 if unknown."""
    text = headers.get(_JSON_BYTES, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def judge(status: int, headers: Mapping[str, str], now: float) -> TryVerdict:
    """Judge a failure status. `now` is Unix time in seconds, for a Retry-After with a date."""
    if status in _REFUSALS:
        return TryVerdict(True, RemoteRefused)
    if status not in (408, 429) and status < 500:
        return TryVerdict(True, RemoteError)
    rest = milliseconds(headers.get("retry-after-ms", ""))
    if rest is None:
        rest = retry_after(headers.get("Retry-After", ""), now)
    return TryVerdict(headers.get("x-should-retry") == "false", RemoteError, rest)


def milliseconds(value: str) -> float | None:
    """Return the seconds in a retry-after-ms header, or None if it is missing or invalid."""
    try:
        seconds = float(value) / 1000 if value[:1].isdigit() else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def retry_after(value: str, now: float) -> float | None:
    """Return the seconds that a Retry-After header (RFC 9110, 10.2.3) means at Unix time `now`, or None if it is invalid."""
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
