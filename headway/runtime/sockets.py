"""Sockets of connections to a server elsewhere, whose end can be waited for.

A connection over TLS says that it ends and then waits for the other side to say so too. A session that is closed does
not wait for those which had failed before. An event loop that ends meanwhile warns of what it leaves, or cannot end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from aiohttp.connector import AddrInfoType

END_TIMEOUT = 1.0
"""Seconds until connections that do not end are left to the event loop."""


class Sockets:
    """Sockets that are open."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        self._gone: asyncio.Event | None = None

    def create(self, address: AddrInfoType) -> socket.socket:
        """Socket for an address."""
        family, kind, protocol, _, _ = address
        made = _Socket(self._forget, family, kind, protocol)
        self._open.add(made)
        return made

    async def end(self) -> None:
        """Cut what is still open, and wait until the event loop has let go of it, at most `END_TIMEOUT`."""
        if not self._open:
            return
        gone = self._gone = asyncio.Event()
        for one in self._open:
            with contextlib.suppress(OSError):  # It is not connected yet, or the other side has cut it.
                one.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT):
                await gone.wait()
        await asyncio.sleep(0)  # The event loop forgets a socket a turn after it has closed it.

    def _forget(self, one: _Socket) -> None:
        self._open.discard(one)
        if self._gone is not None and not self._open:
            self._gone.set()


class _Socket(socket.socket):
    """Socket that tells of its end."""

    __slots__ = ("_told",)

    def __init__(self, told: Callable[[_Socket], None], family: int, kind: int, protocol: int) -> None:
        self._told = told
        super().__init__(family, kind, protocol)

    def close(self) -> None:
        super().close()
        self._told(self)

    def detach(self) -> int:
        """Give the descriptor up, as uvloop does in the place of `close`: it closes that itself."""
        descriptor = super().detach()
        self._told(self)
        return descriptor
