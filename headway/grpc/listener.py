"""Listener of the gRPC port, and the order in which it closes.

bind     reserve the address; clients are still refused
open     accept connections, and inspect them from time to time
retire   health says NOT_SERVING, and each client has to open another connection; new connections are still accepted
drain    stop listening, retire, and wait until all connections are closed
close    cut the remaining connections
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic

from headway.doors.entrance import Entrance
from headway.doors.readiness import CachedReadiness, Readiness
from headway.grpc.call_stream import MessageTurns
from headway.grpc.calls import CallQuotas, PortContext
from headway.grpc.connection import CallConnection, PortConnections
from headway.grpc.methods import Health, methods_of
from headway.runtime.certificates import Certificates
from headway.runtime.listening import SPARE, ListeningPort, descriptor_ceiling
from headway.runtime.tls_transport import TlsPort

SWEEP = 0.5  # Seconds between two inspections of all connections.
SWEEP_DRAINING = 0.05
CLOSING_TURNS = 3  # Number of turns of the event loop that it takes to close a listening socket.


class GrpcListener(ListeningPort):
    """Listener of the gRPC port. `port` is by default the one in the settings. Without `certificates`, there is no TLS."""

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
        return 0 if self._connections is None else len(self._connections.open)

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
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
        """Set health to NOT_SERVING, and send a GOAWAY to each client. New connections are still accepted."""
        if self._health is not None:
            self._health.leaving.set()
        if self._connections is not None:
            self._connections.retire()

    async def drain(self) -> None:
        """Stop accepting, and close each connection once its calls are answered. Return once all are closed."""
        connections = self._connections
        if connections is None:
            return
        if self._health is not None:
            self._health.leaving.set()
        await self.stop_listening()
        self._draining = True
        for _ in range(CLOSING_TURNS):  # While the socket is open, a client that got a GOAWAY would come back.
            await asyncio.sleep(0)
        self.retire()
        self.look_after()
        await connections.emptied()

    async def close(self) -> None:
        await super().close()
        if self._connections is not None:
            await self._connections.close()

    def look(self) -> float:
        """Schedule an inspection of all connections, and return how many seconds remain until the next call."""
        connections = self._connections
        if connections is not None:
            connections.ceiling = descriptor_ceiling(SPARE)
            loop = asyncio.get_running_loop()
            # After this process was paused, all clients look unresponsive. So first read everything that has arrived.
            loop.call_soon(loop.call_soon, connections.sweep, monotonic(), self._draining)
        return SWEEP_DRAINING if self._draining else SWEEP


def _refuse_plain(connection: CallConnection) -> None:
    # After an answer in HTTP/2, the client would come back immediately, again and again.
    connection.refuse(b"this port speaks TLS: use a secure channel\n")
