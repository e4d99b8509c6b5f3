"""Listener of the gRPC port, and the order in which it closes.

bind     take the address; clients are refused as if nobody were there
open     listen → look after the connections every now and then
retire   health says NOT_SERVING → every client is told to open another connection; new connections are still taken
drain    health says NOT_SERVING → stop listening → every client is told to go → no connection is left
close    cut the connections that are left
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic

from headway.doors.entrance import Entrance
from headway.doors.readiness import CachedReadiness, Readiness
from headway.grpc.call_quotas import CallQuotas
from headway.grpc.calls import PortContext
from headway.grpc.connection import CallConnection, PortConnections
from headway.grpc.health import Health
from headway.grpc.message_turns import MessageTurns
from headway.grpc.methods import methods_of
from headway.runtime.certificates import Certificates
from headway.runtime.listening import SPARE, ListeningPort, descriptor_ceiling
from headway.runtime.tls_transport import TlsPort

SWEEP = 0.5
"""Seconds between two looks at all connections."""
SWEEP_DRAINING = 0.05
"""The same while the port drains."""
CLOSING_TURNS = 3
"""Turns that the event loop takes to close a listening socket."""


class GrpcListener(ListeningPort):
    """Listener of the gRPC port.

    Arguments:
        entrance: entrance of the calls.
        readiness: tells if this process should get traffic.
        certificates: certificates of the port; None for HTTP/2 without TLS.
        port: port to bind; None for the port in the settings.

    Attributes:
        port: the port, once it is bound.
    """

    def __init__(
        self,
        entrance: Entrance,
        readiness: Readiness,
        certificates: Certificates | None = None,
        *,
        port: int | None = None,
    ) -> None:
        settings = entrance.settings
        wanted = settings.grpc_port if port is None else port
        super().__init__(settings.host, wanted, "host", "grpc_port")
        self._entrance, self._readiness = entrance, readiness
        self._certificates = certificates
        self._connections: PortConnections | None = None
        self._health: Health | None = None
        self._draining = False

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return 0 if self._connections is None else len(self._connections.open)

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
        """Prepare for connections. Return the maker of their protocols."""
        entrance, settings = self._entrance, self._entrance.settings
        quotas = entrance.gateway.quotas
        connections = self._connections = PortConnections(
            settings, quotas, entrance.counters.refusals, MessageTurns(), monotonic, random.random
        )
        health = self._health = Health(CachedReadiness(self._readiness))
        port = PortContext(entrance, CallQuotas(settings, quotas.bytes), connections.turns)
        connections.methods = methods_of(port, health)
        if self._certificates is None:
            return connections.accept
        tls = TlsPort(self._certificates, "h2", "grpc", asyncio.get_running_loop())
        return tls.around(connections.accept, _refuse_plain)

    def retire(self) -> None:
        """Report that this process goes down, and have each client open another connection. New ones are still taken."""
        if self._health is not None:
            self._health.leaving.set()
        if self._connections is not None:
            self._connections.retire()

    async def drain(self) -> None:
        """Take no new connections, and end each open one as soon as its calls are answered. Return when none is left."""
        connections = self._connections
        if connections is None:
            return
        if self._health is not None:
            self._health.leaving.set()
        await self.stop_listening()
        self._draining = True
        for _ in range(CLOSING_TURNS):  # A client that is told to go before the socket is closed would come back to it.
            await asyncio.sleep(0)
        self.retire()
        self.look_after()
        await connections.emptied()

    async def close(self) -> None:
        """Close the connections that are left."""
        await super().close()
        if self._connections is not None:
            await self._connections.close()

    def look(self) -> float:
        """Have all connections looked at soon. Return the seconds until the next look."""
        connections = self._connections
        if connections is not None:
            connections.ceiling = descriptor_ceiling(SPARE)
            loop = asyncio.get_running_loop()
            # Look only once everything that has come is read: it may be this process that stood still, and not its clients.
            loop.call_soon(loop.call_soon, connections.sweep, monotonic(), self._draining)
        return SWEEP_DRAINING if self._draining else SWEEP


_WHY_NOT_PLAIN = b"this port speaks TLS: use a secure channel\n"
_NOT_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_WHY_NOT_PLAIN), _WHY_NOT_PLAIN)
)
"""Answer to a client without TLS. An answer in HTTP/2 would make it come back at once, again and again."""


def _refuse_plain(connection: CallConnection) -> None:
    connection.write(_NOT_PLAIN)
    connection.close()
