"""Connections of one slot to a remote API.

An idle connection is given up before the API would: a request that meets its end on the way may have run or not. Most
servers keep one for 5 s or longer; one that says less in `Keep-Alive: timeout=…` is believed.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import msgspec

from headway.runtime.remote_certificates import ClientTls, RemoteCertificates
from headway.runtime.sockets import Sockets

IDLE = 4.0
"""Seconds for which an idle connection is kept at most."""
_MARGIN = 1.0
"""Seconds by which it is given up before the API would."""
AT_ONCE = 8
"""Most connections of a slot, for a batch that has to go in several requests."""
_WRITTEN_WHOLE = 1 << 20
"""Bytes of a body above which it is written piece by piece, so that other tasks get their turn."""
_TIMEOUT = re.compile(r"(?:^|[\s,])timeout=([0-9]{1,6})(?![0-9])")


class NotStarted(Exception):
    """Use of connections that were not opened."""


class TooLong(Exception):
    """The body is longer than it may be."""


class Response(NamedTuple):
    """Status, header fields and body, which is whole and decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class _Generation(msgspec.Struct, eq=False):
    """Connections that are given up together."""

    session: aiohttp.ClientSession
    sockets: Sockets
    tls: ClientTls | None
    running: int = 0

    async def end(self) -> None:
        """Close the connections, and wait until they are."""
        await self.session.close()
        await self.sockets.end()


class Connections:
    """Connections, replaced together when they have been idle or their certificates have changed; what runs on the old ones
    ends there.

    Arguments:
        clock: monotonic seconds.
        certificates: certificates of connections over TLS; None: the system's authorities are trusted, and none is shown.
    """

    def __init__(self, clock: Callable[[], float], certificates: RemoteCertificates | None = None) -> None:
        self._clock, self._certificates = clock, certificates
        self._generation: _Generation | None = None
        self._retired: list[_Generation] = []
        self._idle, self._used_at = IDLE, 0.0

    def open(self) -> None:
        """Make ready to connect."""
        if self._generation is None:
            self._generation = self._new_generation()

    async def close(self) -> None:
        """Close all connections, whatever they do."""
        generations = [*self._retired, *([] if self._generation is None else [self._generation])]
        self._generation = None
        self._retired.clear()
        for one in generations:
            await one.end()

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
        generation, former = self._current()
        generation.running += 1  # Before anything is waited for: what nothing runs on may be closed.
        try:
            if former is not None:
                await asyncio.shield(former.end())
            data = io.BytesIO(body) if len(body) > _WRITTEN_WHOLE else body or None
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=within)
            sent = generation.session.request(
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
        finally:
            generation.running -= 1
            self._used_at = self._clock()
            if generation in self._retired and not generation.running:
                self._retired.remove(generation)
                await asyncio.shield(generation.end())

    def _current(self) -> tuple[_Generation, _Generation | None]:
        """Connections for the next request, and former ones that are to be closed, as nothing runs on them."""
        generation = self._generation
        if generation is None:
            raise NotStarted
        idle = not generation.running and self._clock() - self._used_at > self._idle
        if not idle and generation.tls is self._tls:
            return generation, None
        fresh = self._generation = self._new_generation()
        if not generation.running:
            return fresh, generation
        self._retired.append(generation)
        return fresh, None

    @property
    def _tls(self) -> ClientTls | None:
        return None if self._certificates is None else self._certificates.current

    def _new_generation(self) -> _Generation:
        self._used_at = self._clock()
        tls = self._tls
        trust = True if tls is None else tls.context
        sockets = Sockets()
        return _Generation(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=AT_ONCE, keepalive_timeout=IDLE, ssl=trust, socket_factory=sockets.create
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            ),
            sockets,
            tls,
        )

    def _note_idle(self, keep_alive: str) -> None:
        """Keep idle connections no longer than the API says that it does."""
        if found := _TIMEOUT.search(keep_alive):
            self._idle = max(min(IDLE, int(found[1]) - _MARGIN), 0.0)


def was_sent(exc: Exception) -> bool:
    """Whether a whole request may have left before this error."""
    if isinstance(exc.__cause__, aiohttp.ClientConnectionResetError) and _ENDED in str(exc.__cause__):
        return False  # The connection had ended before the body was written, as where a certificate is refused.
    return not isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


_ENDED = "closing transport"
"""Words of aiohttp for a write that was not begun."""
