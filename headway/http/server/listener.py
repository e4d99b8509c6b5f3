"""Listener: a port, its connections, and the order in which it closes.

    bind     reserve the address; clients are still refused
    open     accept connections, and inspect them from time to time
    retire   every answer says `Connection: close`; new connections are still accepted
    drain    stop accepting, say `Connection: close`, close idle connections, and wait for the others
    close    cut the remaining connections

A listener survives a shortage of file descriptors: while only a few are left, it answers new connections with 503. The code
that deals with sockets is in `headway.runtime.listening`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.routing import Handler
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

SWEEP = 0.5  # Seconds between two inspections of all connections, unless a configured timeout is shorter.
REST = 1.0  # Seconds between two inspections while there are no connections.


class Listener(ListeningPort):
    """A listening port. Port 0 lets the system choose. `prefix` is the prefix of the host and port settings' names, for error
    messages. `make_context` is called within the event loop, and makes the context that all connections share. `connect`
    makes a connection from this context."""

    takes_address = True  # True if this kind of listener binds an address.

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
    def public(cls, entrance: Entrance, answer: Handler, certificates: Certificates | None = None) -> Listener:
        """Return the listener for clients. The fast path serves inference routes, and `answer` all other routes."""
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
        return 0 if self._context is None else len(self._context.connections)

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
        context = self._context = self._make_context()
        protocol: Callable[[], asyncio.Protocol] = partial(self._connect, context)
        if self._certificates is not None:
            context.scheme = "https"
            tls = TlsPort(self._certificates, "http/1.1", context.label, context.loop)
            protocol = tls.around(protocol, _refuse_plain)
        return protocol

    async def open(self) -> None:
        await super().open()
        if self._context is not None:
            self._context.fit(descriptor_ceiling(self._context.spare) - open_descriptors())

    def retire(self) -> None:
        """Close each open connection after its next answer. Idle connections stay open, because a request may be in transit."""
        if self._context is not None:
            self._context.retire()
        for connection in self._connections():
            connection.retire()

    async def drain(self) -> None:
        """Stop accepting, close idle connections, and close the others after their next answer. Return once all are closed."""
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
        context = self._context
        least = 0.0 if context is None or context.shut.is_set() else min(context.keep_alive, context.read_timeout)
        for connection in self._connections():
            if connection.phase == IDLE and now - connection.since < least and not connection.unread.since:
                continue  # The common case: idle for a short time.
            try:
                connection.inspect(now)
            except Exception as exc:
                connection.fault(exc)

    def _connections(self) -> list[Connection]:
        return [] if self._context is None else cast(list[Connection], list(self._context.connections))

    def look(self) -> float:
        """Schedule an inspection of all connections, and return how many seconds remain until the next call."""
        context = self._context
        if context is None:
            return REST
        context.refresh()
        context.fd_ceiling = descriptor_ceiling(context.spare)
        context.fd_brief_at = descriptor_ceiling(context.spare // 2)
        if context.connections:
            # After this process was paused, all clients look unresponsive. Timers run before reads, so wait for two turns of the
            # loop, so that everything that has arrived is read first.
            context.loop.call_soon(context.loop.call_soon, self.sweep, monotonic())
        longest = 0.05 if context.shut.is_set() else SWEEP if context.connections else REST
        return max(0.01, min(longest, context.read_timeout / 2, context.keep_alive / 2))


def _refuse_plain(connection: Connection) -> None:
    connection.reject(BadRequest("received plain HTTP on a port that speaks TLS; use https:// instead of http://"))
