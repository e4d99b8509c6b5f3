"""Connections of one slot to a remote API over HTTP.

An idle connection is given up before the API would: a request that meets its end on the way may have run or not. Most
servers keep one for 5 s or longer; one that says less in `Keep-Alive: timeout=…` is believed.
"""

from __future__ import annotations

import io
import re
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import msgspec

from headway.backends.remote.generations import AT_ONCE, Generations
from headway.runtime.certificates import ClientTls, RemoteCertificates
from headway.runtime.sockets import Sockets

IDLE = 4.0
"""Seconds for which an idle connection is kept at most."""
_MARGIN = 1.0
"""Seconds by which it is given up before the API would."""
_WRITTEN_WHOLE = 1 << 20
"""Bytes of a body above which it is written piece by piece, so that other tasks get their turn."""
_TIMEOUT = re.compile(r"(?:^|[\s,])timeout=([0-9]{1,6})(?![0-9])")
_ENDED = "closing transport"
"""Words of aiohttp for a write that was not begun."""


class TooLong(Exception):
    """The body is longer than it may be."""


class Response(NamedTuple):
    """Status, header fields and body, which is whole and decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class _Client(msgspec.Struct, eq=False):
    """Connections that are made alike."""

    session: aiohttp.ClientSession
    sockets: Sockets

    async def end(self) -> None:
        """Close the connections, and wait until they are."""
        await self.session.close()
        await self.sockets.end()


class Connections(Generations[_Client]):
    """Connections, replaced together when they have been idle or their certificates have changed.

    Arguments:
        clock: monotonic seconds.
        certificates: certificates of connections over TLS; None: the system's authorities are trusted, and none is shown.
    """

    def __init__(self, clock: Callable[[], float], certificates: RemoteCertificates | None = None) -> None:
        self._certificates = certificates
        super().__init__(self._client, _Client.end, self._tls, clock, IDLE)

    async def request(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], *, within: float, most: int
    ) -> Response:
        """Send one request and read its answer.

        Arguments:
            method: POST or GET.
            url: where to.
            body: the body; empty for none.
            headers: header fields.
            within: seconds until a connection must be there.
            most: most bytes of the answer's body, after decompression.

        Raises:
            NotStarted: `open` was not called.
            TooLong: the body is longer than `most`.
            aiohttp.ClientError: no answer came; `was_sent` says whether the request has left.
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
                self._note_idle(response.headers.get("Keep-Alive", ""))
                return Response(response.status, response.headers, answer)

    def _tls(self) -> ClientTls | None:
        return None if self._certificates is None else self._certificates.current

    def _client(self) -> _Client:
        tls, sockets = self._tls(), Sockets()
        trust = True if tls is None else tls.context
        return _Client(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=AT_ONCE, keepalive_timeout=IDLE, ssl=trust, socket_factory=sockets.create
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            ),
            sockets,
        )

    def _note_idle(self, keep_alive: str) -> None:
        """Keep idle connections no longer than the API says that it does."""
        if found := _TIMEOUT.search(keep_alive):
            self.idle = max(min(IDLE, int(found[1]) - _MARGIN), 0.0)


def was_sent(exc: Exception) -> bool:
    """Whether a whole request may have left before this error."""
    if isinstance(exc.__cause__, aiohttp.ClientConnectionResetError) and _ENDED in str(exc.__cause__):
        return False  # The connection had ended before the body was written, as where a certificate is refused.
    return not isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def tls_error(exc: BaseException | None) -> ssl.SSLError | None:
    """Error of `ssl` behind one of aiohttp's, which may be of the same class and know nothing; None where there is none."""
    while exc is not None and (isinstance(exc, aiohttp.ClientError) or not isinstance(exc, ssl.SSLError)):
        exc = exc.__cause__ or exc.__context__
    return exc
