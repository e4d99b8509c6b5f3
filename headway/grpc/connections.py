"""All connections of the gRPC port: who may have one, when each is looked at, and the calls that begin on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from headway.gateway.client_quotas import Quotas
from headway.grpc.connection import Connection
from headway.grpc.statuses import Status
from headway.grpc.stream import Ended, Headers
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.protocol_hints import ProtocolHints

if TYPE_CHECKING:
    from headway.grpc.methods import MakeCall

JITTER = 0.1
"""Most by which an age is longer or shorter, as a share of it, so that clients that came together leave one by one."""

_ENTRY = 32
"""Bytes that a header field counts beyond its name and value."""
_ILLEGAL = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")
"""Octets that no value of a header field may have."""


class Connections:
    """All connections of the port.

    Arguments:
        quotas: quotas that count the connections.
        most: most connections.
        most_header: most bytes of a call's metadata.
        refusals: counts of refusals, by reason, tier and model.
        clock: monotonic seconds.
        age: seconds after which a client is told to open another connection.
        grace: seconds from then on, after which its connection is cut.
        unread_timeout: seconds for which a client may take nothing of what it is sent.
        jitter: uniform in [0, 1).

    Attributes:
        hints: log lines on clients that speak another protocol.
        turns: line of the connections that have much to read.
        open: the connections.
        ceiling: first descriptor number at which a connection is refused.
        methods: what makes the call to each method.
    """

    def __init__(
        self,
        quotas: Quotas,
        most: int,
        most_header: int,
        refusals: MutableMapping[tuple[str, str, str], int],
        clock: Callable[[], float],
        *,
        age: float,
        grace: float,
        unread_timeout: float,
        jitter: Callable[[], float],
    ) -> None:
        self.quotas, self.clock = quotas, clock
        self.hints = ProtocolHints("grpc", clock)
        self.turns = FairTurns(budget=MILLISECOND, rests=False)
        self.grace, self.unread_timeout, self.most_header = grace, unread_timeout, most_header
        self.ceiling = 1 << 30
        self.open: dict[Connection, None] = {}
        self.methods: Mapping[str, MakeCall] = {}
        self._most = most
        self._refusals = refusals
        self._age, self._jitter = age, jitter
        self._left = asyncio.Event()

    def accept(self) -> Connection:
        """Make the protocol of a new connection."""
        return Connection(self)

    def enter(self, connection: Connection, descriptor: int) -> bool:
        """Take a connection in; False: there are too many, in all or of its client."""
        full = len(self.open) >= self._most or descriptor >= self.ceiling
        if full or not self.quotas.enter(connection, connection.address):
            self._refusals["connections", "none", ""] += 1
            return False
        self.open[connection] = None
        connection.leaves = self.clock() + self._age * (1.0 + JITTER * (2.0 * self._jitter() - 1.0))
        return True

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self.quotas.leave(connection)
        self.open.pop(connection, None)
        if not self.open:
            self._left.set()

    def check(self, headers: Headers) -> int:
        """Look at the header fields of a call. Returns their size in bytes.

        Raises:
            Ended: they are too many, or have characters that none may have.
        """
        size = 0
        for name, value in headers:
            size += len(name) + len(value) + _ENTRY
            if _ILLEGAL.search(value):
                raise Ended(Status.INTERNAL, "the metadata have characters that none may have")
        if size > self.most_header:
            raise Ended(Status.RESOURCE_EXHAUSTED, "")
        return size

    def find(self, method: str) -> MakeCall:
        """Maker of the calls to a method.

        Raises:
            Ended: there is none of this name.
        """
        make = self.methods.get(method)
        if make is None:
            raise Ended(Status.UNIMPLEMENTED, "Method not found!")
        return make

    def sweep(self, now: float, draining: bool) -> None:
        """Look at all connections; see `Connection.inspect`."""
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
