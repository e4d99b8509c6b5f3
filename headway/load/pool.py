"""Pool of a load test's connections: opened when wanted; the one used last is used next."""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
from collections.abc import Callable
from typing import Any

from headway.client.reaching import tls_fault
from headway.errors import HeadwayError
from headway.load.connection import Connection

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
