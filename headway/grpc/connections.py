"""All connections of the gRPC port: who may have one, when each is looked at, and the calls that begin on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from headway.config import Settings
from headway.gateway.client_quotas import Quotas
from headway.grpc.connection import CallConnection
from headway.grpc.header_blocks import RequestFields
from headway.grpc.message_turns import MessageTurns
from headway.grpc.statuses import StatusCode
from headway.grpc.stream import Ended
from headway.runtime import protocol_hints
from headway.runtime.protocol_hints import ProtocolHints

if TYPE_CHECKING:
    from headway.grpc.methods import MakeCall

JITTER = 0.1
"""Most by which an age is longer or shorter, as a share of it, so that clients that came together leave one by one."""


class PortConnections:
    """All connections of the port.

    Arguments:
        settings: bounds of connections and metadata, and times.
        quotas: quotas that count the connections.
        refusals: counts of refusals, by reason, tier and model.
        turns: turns in which frames are read and messages are taken in.
        clock: monotonic seconds.
        jitter: uniform in [0, 1).

    Attributes:
        hints: log lines on clients that speak another protocol.
        turns: see the arguments.
        most_header: most bytes of a call's metadata.
        grace: seconds after which the connection of a client is cut that was told to open another.
        unread_timeout: seconds for which a client may take nothing of what it is sent.
        open: the connections.
        too_many_metadata: what a client is told that sends too many.
        ceiling: first descriptor number at which a connection is refused.
        methods: what makes the call to each method.
    """

    def __init__(
        self,
        settings: Settings,
        quotas: Quotas,
        refusals: MutableMapping[tuple[str, str, str], int],
        turns: MessageTurns,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.quotas, self.clock, self.turns = quotas, clock, turns
        self.hints = ProtocolHints("grpc", clock)
        self.most_header = settings.max_header_bytes
        self.grace = settings.drain_s
        self.unread_timeout = settings.read_timeout_ms / 1000
        self.too_many_metadata = f"the metadata have more than {self.most_header} bytes; send fewer"
        self.ceiling = 1 << 30
        self.open: dict[CallConnection, None] = {}
        self.methods: Mapping[str, MakeCall] = {}
        self._most, self._refusals = settings.max_connections, refusals
        self._age, self._jitter = settings.grpc_max_age_s, jitter
        self._left = asyncio.Event()

    def accept(self) -> CallConnection:
        """Make the protocol of a new connection."""
        return CallConnection(self)

    def enter(self, connection: CallConnection, descriptor: int) -> bool:
        """Take a connection in; False: there are too many, in all or of its client."""
        full = len(self.open) >= self._most or descriptor >= self.ceiling
        if full or not self.quotas.enter(connection, connection.address):
            self._refusals["connections", "none", ""] += 1
            return False
        self.open[connection] = None
        connection.leaves = self.clock() + self._age * (1.0 + JITTER * (2.0 * self._jitter() - 1.0))
        return True

    def count_cut(self, reason: str) -> None:
        """Count a connection that is cut for what its client sends, and log it if that is due."""
        self._refusals[reason, "none", ""] += 1
        self.hints.tell(protocol_hints.CUTS[reason])

    def leave(self, connection: CallConnection) -> None:
        """Forget a connection."""
        self.quotas.leave(connection)
        self.open.pop(connection, None)
        if not self.open:
            self._left.set()

    def find(self, head: RequestFields) -> MakeCall:
        """Maker of the call that begins with some header fields.

        Raises:
            Ended: they are too many, have octets that none may have, or name a method that there is not.
        """
        if head.illegal:
            raise Ended(StatusCode.INTERNAL, "the metadata have characters that none may have")
        if head.size > self.most_header:
            raise Ended(StatusCode.RESOURCE_EXHAUSTED, self.too_many_metadata)
        make = self.methods.get(head.fields[b":path"].decode("latin-1"))
        if make is None:
            raise Ended(StatusCode.UNIMPLEMENTED, "Method not found!")
        return make

    def sweep(self, now: float, draining: bool) -> None:
        """Look at all connections; see `CallConnection.inspect`."""
        for connection in list(self.open):
            connection.inspect(now, draining)

    def retire(self) -> None:
        """Tell every client to open another connection for further calls."""
        for connection in list(self.open):
            connection.retire()

    async def emptied(self) -> None:
        """Return as soon as no connection is left."""
        while self.open:
            self._left.clear()
            await self._left.wait()

    async def close(self) -> None:
        """Cut what is left."""
        for connection in list(self.open):
            connection.shutdown()
        await self.emptied()
