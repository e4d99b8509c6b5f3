"""Listener: a listening port, the connections through it, and the order in which it closes.

    bind     take the address; callers are refused as if nobody was there
    open     listen → look after the connections every now and then
    retire   every answer says `Connection: close`; new connections are taken all the same
    drain    stop listening → every answer says `Connection: close` → idle connections go → none is left
    close    cut what is left

A listener must outlive the system running out of file descriptors. It refuses connections with 503 while a few
descriptors are left, so that there is something to refuse with; what its sockets do for that is in
`headway.runtime.listening`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.requests import Handler
from headway.http.server.connection import IDLE, Connection
from headway.http.server.connection_context import ConnectionContext
from headway.runtime.certificates import Certificates
from headway.runtime.counters import GatewayCounts
from headway.runtime.listening import ListeningPort, descriptor_ceiling, open_descriptors
from headway.runtime.race import end
from headway.runtime.request_id import NewId
from headway.runtime.tls_transport import TlsPort

if TYPE_CHECKING:
    from headway.doors.entrance import Entrance

SWEEP = 0.5
"""Seconds between two looks at all connections; shorter when a configured time-out is."""
REST = 1.0
"""Seconds between two looks while there is no connection."""


class Listener(ListeningPort):
    """A listening port.

    Arguments:
        host: address to bind.
        port: port to bind, 0 to let the system choose.
        prefix: prefix of the names of these two settings, for errors.
        settings: limits and times.
        make_context: builds the context that the connections share; called within the event loop.
        connect: makes a connection with that context.
        certificates: certificates of the port; None: it speaks plain HTTP.
    """

    takes_address = True
    """Whether listeners of this kind take an address of this machine."""

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        settings: Settings,
        make_context: Callable[[], ConnectionContext],
        connect: Callable[[Any], Connection],
        certificates: Certificates | None = None,
    ) -> None:
        super().__init__(host, port, f"{prefix}host", f"{prefix}port")
        self._make_context, self._connect = make_context, connect
        self._certificates = certificates
        self._context: ConnectionContext | None = None

    @classmethod
    def public(
        cls,
        entrance: Entrance,
        answer: Handler,
        certificates: Certificates | None = None,
    ) -> Listener:
        """Listener for clients: the fast path, and `answer` for all other routes."""
        from headway.http.inference.context import InferenceContext
        from headway.http.inference.fast_path import FastPathConnection

        settings = entrance.settings
        make_context = partial(InferenceContext, answer, entrance)
        return cls(settings.host, settings.port, "", settings, make_context, FastPathConnection, certificates)

    @classmethod
    def admin(
        cls,
        settings: Settings,
        answer: Handler,
        new_id: NewId,
        counters: GatewayCounts,
        certificates: Certificates | None = None,
    ) -> Listener:
        """Listener for operators."""
        return cls(
            settings.admin_host,
            settings.admin_port,
            "admin_",
            settings,
            partial(ConnectionContext, answer, settings, new_id, counters),
            Connection,
            certificates,
        )

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return 0 if self._context is None else len(self._context.connections)

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
        """Get ready for connections. Returns the maker of their protocols."""
        context = self._context = self._make_context()
        protocol: Callable[[], asyncio.Protocol] = partial(self._connect, context)
        if self._certificates is not None:
            context.scheme = "https"
            tls = TlsPort(self._certificates, "http/1.1", context.label, context.loop)
            protocol = tls.around(protocol, _refuse_plain)
        return protocol

    async def open(self) -> None:
        """Listen, with as many connections as there are descriptors for."""
        await super().open()
        if self._context is not None:
            self._context.fit(descriptor_ceiling(self._context.spare) - open_descriptors())

    def retire(self) -> None:
        """Let each open connection go with its next answer, and still take new ones.

        An idle connection is kept: closing it could cross a request on its way.
        """
        if self._context is not None:
            self._context.retire()
        for connection in self._connections():
            connection.retire()

    async def drain(self) -> None:
        """Take no new connection, and let each open one go as soon as its answer is written.

        A client that uses its connection all the time hears of the end with its next answer; one that has
        been silent for a while is left without a word. Returns when no connection is left.
        """
        context = self._context
        if context is None:
            return
        await self.stop_listening()
        context.close()
        for connection in self._connections():
            connection.retire()
        self.look_after()
        await context.emptied()

    async def close(self) -> None:
        """Cut what is left."""
        await super().close()
        context = self._context
        if context is not None:
            context.close()
            for connection in self._connections():
                connection.shutdown()
            await end(*context.tasks)
            await context.emptied()
            context.hangups.close()

    def sweep(self, now: float) -> None:
        """Look at all connections at the monotonic instant `now`, in seconds, and end what takes too long."""
        context = self._context
        least = 0.0 if context is None or context.shut.is_set() else min(context.keep_alive, context.read_timeout)
        for connection in self._connections():
            if connection.phase == IDLE and now - connection.since < least and not connection.unread.since:
                continue  # Most are idle, and have not been for long.
            try:
                connection.inspect(now)
            except Exception as exc:
                connection.fault(exc)

    def _connections(self) -> list[Connection]:
        return [] if self._context is None else cast(list[Connection], list(self._context.connections))

    def look(self) -> float:
        """Have all connections looked at soon. Returns seconds until the next look."""
        context = self._context
        if context is None:
            return REST
        context.refresh()
        context.fd_ceiling, context.fd_brief_at = (
            descriptor_ceiling(context.spare),
            descriptor_ceiling(context.spare // 2),
        )
        if context.connections:
            self._sweep_soon(context, monotonic())
        return _interval(context)

    def _sweep_soon(self, context: ConnectionContext, now: float) -> None:
        """Sweep when all that has come by `now` has been read: this process may have stood still, and not its clients.

        Timers come first after a stand-still, so this takes a turn to get behind them, and one in which is read.
        """
        loop = context.loop
        loop.call_soon(loop.call_soon, self.sweep, now)


def _refuse_plain(connection: Connection) -> None:
    connection.reject(BadRequest("plain HTTP came to a port that speaks TLS; ask https:// instead of http://"))


def _interval(context: ConnectionContext) -> float:
    most = 0.05 if context.shut.is_set() else SWEEP if context.connections else REST
    shortest = min(context.read_timeout, context.keep_alive)
    return max(0.01, min(most, shortest / 2))
