"""Listener of the gRPC port, and the order in which it closes.

bind     take the address; who comes is refused as if nobody was there
open     listen → look after the connections every now and then
retire   health says NOT_SERVING → every client is told to open another connection; new ones are taken all the same
drain    health says NOT_SERVING → stop listening → every client is told to go → none is left
close    cut what is left
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic

from headway.grpc.call_quotas import CallQuotas
from headway.grpc.calls import PortContext
from headway.grpc.connection import CallConnection
from headway.grpc.connections import PortConnections
from headway.grpc.health import Health
from headway.grpc.message_turns import MessageTurns
from headway.grpc.methods import methods_of
from headway.http.admission import Admission
from headway.http.readiness import CachedReadiness, Readiness
from headway.runtime.certificates import Certificates
from headway.runtime.listening import BACKLOG, SPARE, ListeningSocket, bind, descriptor_ceiling, raise_descriptor_limit
from headway.runtime.ticks import until_tick
from headway.runtime.tls_transport import TlsPort

SWEEP = 0.5
"""Seconds between two looks at all connections."""
SWEEP_DRAINING = 0.05
"""Seconds between two of them while the port drains."""

CLOSING_TURNS = 3
"""Turns of the event loop in which it closes a listening socket."""


class GrpcListener:
    """Listener of the gRPC port.

    Arguments:
        admission: admission of the calls.
        readiness: whether this process should get traffic.
        certificates: certificates of the port; None: it speaks HTTP/2 without TLS.
        port: port to bind; None: that of the settings.

    Attributes:
        port: the port, once it is bound.
    """

    def __init__(
        self,
        admission: Admission,
        readiness: Readiness,
        certificates: Certificates | None = None,
        *,
        port: int | None = None,
    ) -> None:
        self._admission, self._readiness = admission, readiness
        self._settings, self._counters, self._quotas = admission.settings, admission.counters, admission.gateway.quotas
        self._certificates = certificates
        self._wanted = self._settings.grpc_port if port is None else port
        self._connections: PortConnections | None = None
        self._health: Health | None = None
        self._sockets: list[ListeningSocket] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._draining = False
        self.port = 0

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return 0 if self._connections is None else len(self._connections.open)

    async def bind(self) -> None:
        """Take the address, without listening.

        Raises:
            SettingError: the address cannot be had.
        """
        settings = self._settings
        connections = self._connections = PortConnections(
            self._quotas,
            settings.max_connections,
            settings.max_header_bytes,
            self._counters.refusals,
            MessageTurns(),
            monotonic,
            age=settings.grpc_max_age_s,
            grace=max(settings.longest_request_s, settings.drain_timeout_ms / 1000),
            unread_timeout=settings.read_timeout_ms / 1000,
            jitter=random.random,
        )
        protocol: Callable[[], asyncio.Protocol] = connections.accept
        if self._certificates is not None:
            tls = TlsPort(self._certificates, "h2", "grpc", self._counters, asyncio.get_running_loop())
            protocol = tls.around(protocol, _refuse_plain)
        self._sockets = await bind(settings.host, self._wanted, "host", "grpc_port", protocol)
        self.port = self._sockets[0].port

    async def open(self) -> None:
        """Listen.

        Raises:
            SettingError: the address cannot be had. Of two programs that took it, the one that listens first has it.
        """
        if self._connections is None:
            await self.bind()
        connections = self._connections
        if connections is None:
            return
        raise_descriptor_limit(self._settings.max_connections + 8 * SPARE)
        health = self._health = Health(CachedReadiness(self._readiness))
        port = PortContext(self._admission, CallQuotas(self._settings, self._quotas.bytes), connections.turns)
        connections.methods = methods_of(port, health)
        for one in self._sockets:
            await one.listen()
        self._look_after()

    def retire(self) -> None:
        """Say that this process goes down, have each client open another connection, and still take new ones."""
        if self._health is not None:
            self._health.leaving.set()
        if self._connections is not None:
            self._connections.retire()

    async def drain(self) -> None:
        """Take no new connection, and let each open one go as soon as its calls are answered.

        Returns when no connection is left.
        """
        connections = self._connections
        if connections is None:
            return
        if self._health is not None:
            self._health.leaving.set()
        for _ in range(BACKLOG):
            if not any(one.has_waiting for one in self._sockets):
                break
            await asyncio.sleep(0)  # They are accepted; else they would be cut when the listener closes.
        self._stop_listening()
        self._draining = True
        for _ in range(
            CLOSING_TURNS
        ):  # A client that is told to go while the socket is not closed would come back to it.
            await asyncio.sleep(0)
        self.retire()
        self._look_after()
        await connections.emptied()

    async def close(self) -> None:
        """Cut what is left."""
        self._stop_listening()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._connections is not None:
            await self._connections.close()

    def _look_after(self) -> None:
        """Sweep, and schedule the next sweep."""
        if self._sweep is not None:
            self._sweep.cancel()
        connections = self._connections
        if connections is None:
            return
        connections.ceiling = descriptor_ceiling(SPARE)
        loop = asyncio.get_running_loop()
        # When all that has come by now has been read: this process may have stood still, and not its clients.
        loop.call_soon(loop.call_soon, connections.sweep, monotonic(), self._draining)
        for one in self._sockets:
            one.revive()
        every = SWEEP_DRAINING if self._draining else SWEEP
        self._sweep = loop.call_later(until_tick(every), self._look_after)

    def _stop_listening(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets.clear()


_WHY_NOT_PLAIN = b"this port speaks TLS: use a secure channel\n"
_NOT_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_WHY_NOT_PLAIN), _WHY_NOT_PLAIN)
)
"""Answer to a client without TLS. One that is told so in HTTP/2 would come back at once, again and again."""


def _refuse_plain(connection: CallConnection) -> None:
    connection.write(_NOT_PLAIN)
    connection.close()
