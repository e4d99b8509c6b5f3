"""Relay between the clients' connections and the gRPC server in this process.

    client ──TCP──▶ ClientConnection ──bytes──▶ ServerSide ──local socket──▶ gRPC's own server
           ◀──────────────────────── bytes, and GOAWAY ◀──

gRPC's server tells a client to leave (GOAWAY) only while it stops, and then it cancels all calls that are still on their way to
it. So it never stops before the last connection has gone. The relay passes bytes on, follows where a frame of HTTP/2 ends, and
puts in the GOAWAY: when a connection has reached its age, so that new gateways get their part of the traffic, and when the
process drains. A client that has read it opens another connection for further calls, elsewhere or here. All those that it
has sent before are answered: behind the GOAWAY goes a PING, and the connection ends only when the client has answered that and
no call is left. Another GOAWAY then names the last call that came, so that a client can tell which one it may send again.

The relay is also where connections are counted for their owners, as on the HTTP port, and where a client that takes no
answers is cut off. The server side of a connection has a name of its own, by which a call finds its connection.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import cast

from headway.gateway.client_quotas import Quotas
from headway.grpc.frame_tracker import PING, FrameTracker
from headway.http.server.hangups import descriptor_of
from headway.runtime import protocol_hints
from headway.runtime.logger import get_logger
from headway.runtime.protocol_hints import ProtocolHints

log = get_logger(__name__)

_GOAWAY = "000008 07 00 00000000 {:08x} 00000000"
"""GOAWAY frame without an error, in hexadecimal, but for the number of the last stream that is answered."""
GOAWAY = bytes.fromhex(_GOAWAY.format((1 << 31) - 1))
"""GOAWAY frame that tells a client to leave. All streams that were begun before it arrived are answered."""

_PREFACE = b"PRI "
_HANDSHAKE = b"\x16\x03"
_HTTP1 = re.compile(rb"[A-Z]{3,10} [/*h]")
"""Beginnings of a connection in HTTP/2, in TLS, and in HTTP/1.1, the method and what it asks for."""

_WHY_NOT_HTTP1 = b"this port speaks gRPC, in HTTP/2: HTTP/1.1 has a port of its own\n"
_NOT_HTTP1 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_WHY_NOT_HTTP1), _WHY_NOT_HTTP1)
)
"""Answer to a client that speaks HTTP/1.1."""

JITTER = 0.1
"""Most by which an age is longer or shorter, as a share of it, so that clients that came together leave one by one."""

SILENCE = 10.0
"""Seconds of silence after which a connection without calls is closed, though its client has not said that it will leave."""


class _Side(asyncio.Protocol):
    """Connection of which the other side decides what is read and written."""

    __slots__ = ("_transport",)

    _transport: asyncio.Transport | None

    def write(self, data: bytes) -> None:
        """Pass on what the other side has sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause(self) -> None:
        """Read nothing more for now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close, once what was written has left."""
        if self._transport is not None:
            self._transport.close()


class ClientConnection(_Side):
    """Connection of one client, which the quotas count.

    Arguments:
        relay: relay that it belongs to.

    Attributes:
        name: name of its server side, as the server's calls know it.
        address: address of the client.
        owner, reserved, unfetched: see `headway.gateway.client_quotas.CountedConnection`.
        calls: calls in hand.
        streams: numbers of the streams that the client has begun and the server has not ended.
        leaves: instant at which the client is to be told to leave, in seconds.
        leaving: instant at which the client was told to leave, in seconds; None before.
        retired: set from then on.
    """

    __slots__ = (
        "_begun", "_blocked", "_early", "_frames", "_heard", "_quiet", "_relay", "_server", "address", "calls", "leaves", "leaving", "name",
        "owner", "reserved", "retired", "streams", "unfetched",
    )  # fmt: skip

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self._server: ServerSide | None = None
        self.streams: set[int] = set()
        self._frames = FrameTracker(self.streams, begins=True)
        self._early: list[bytes] = []
        self._blocked = 0.0
        self._begun = self._heard = False
        self._quiet = 0.0
        self.name = self.address = ""
        self.owner: str | None = None
        self.reserved = self.unfetched = self.calls = 0
        self.leaves = math.inf
        self.leaving: float | None = None
        self.retired = asyncio.Event()

    @property
    def silent(self) -> bool:
        """Whether no call of its client is in hand."""
        return self.calls == 0

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, or refuse it when there are too many, in all or of its client."""
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._relay.enter(self, descriptor_of(self._transport)):
            self._relay.connect(self)
        else:  # Without a word, so that the client takes its time before it tries again.
            self._transport.abort()

    def joined(self, server: ServerSide) -> None:
        """Note that the server side is there."""
        if self._transport is None or self._transport.is_closing():
            server.close()
            return
        self._server = server
        if self.leaving is not None:
            server.retire()
        server.write(b"".join(self._early))
        self._early.clear()
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Pass on what the client has sent, unless it begins as another protocol does."""
        if not self._begun:
            self._begun = True
            if data.startswith(_HANDSHAKE):
                self._relay.hints.tell(protocol_hints.TLS)
                self.shutdown()
                return
            if _HTTP1.match(data) and not data.startswith(_PREFACE):
                self._relay.hints.tell(protocol_hints.HTTP1)
                self.write(_NOT_HTTP1)
                self.close()
                return
        self._heard = True
        self._frames.pass_on(data)
        if self._server is not None:
            self._server.write(data)
        else:  # A transport need not heed a pause from the beginning.
            self._early.append(data)
            self.pause()

    def pause_writing(self) -> None:
        """Take nothing more from the server, as the client does not take what there is."""
        self._blocked = self._relay.clock()
        if self._server is not None:
            self._server.pause()

    def resume_writing(self) -> None:
        """Take more from the server."""
        self._blocked = 0.0
        if self._server is not None:
            self._server.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything; the server cancels what calls there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._relay.leave(self)

    # What the other side, the calls and the relay do.

    def shutdown(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def retire(self) -> None:
        """Tell the client to open another connection for further calls."""
        if self.leaving is None:
            self.leaving = self._relay.clock()
            self.retired.set()
            if self._server is not None:
                self._server.retire()

    def inspect(self, now: float, draining: bool) -> None:
        """Tell the client to leave when it is time to, and end what takes too long.

        Arguments:
            now: monotonic instant in seconds.
            draining: whether the port has closed.
        """
        relay = self._relay
        if self._blocked and now - self._blocked > relay.unread_timeout:
            self.shutdown()
            return
        if self.leaving is None:
            if now > self.leaves:
                self.retire()
            return
        if self._heard or self.streams:
            self._heard, self._quiet = False, now
        if (self._frames.answered and not self.streams) or now - max(self._quiet, self.leaving) > SILENCE:
            if self._server is not None:
                self._server.part(self._frames.last)
            self.close()
        elif not draining and now - self.leaving > relay.grace:
            self.shutdown()


class ServerSide(_Side):
    """Connection to the server in the name of a client's."""

    __slots__ = ("_client", "_frames", "_told", "_wanted")

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._frames = FrameTracker(client.streams, begins=False)
        self._wanted = self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to pass bytes on."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on what the server has sent."""
        self._client.write(data)
        self._frames.pass_on(data)
        if self._wanted:
            self._tell()

    def pause_writing(self) -> None:
        """Take nothing more from the client, as the server does not take what there is."""
        self._client.pause()

    def resume_writing(self) -> None:
        """Take more from the client."""
        self._client.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the client's connection, as the server has ended this one."""
        self._client.close()

    def retire(self) -> None:
        """Put in a GOAWAY and a PING, now or behind the frame that is passing."""
        self._wanted = True
        self._tell()

    def part(self, last: int) -> None:
        """Put in the number of the last stream that was answered, unless the client was never told to leave."""
        if self._told and self._frames.whole:
            self._client.write(bytes.fromhex(_GOAWAY.format(last)))

    def _tell(self) -> None:
        if self._frames.whole and not self._told:
            self._told = True
            self._client.write(GOAWAY + PING)


class Relay:
    """All connections of the gRPC port.

    Arguments:
        quotas: quotas that count the connections.
        most: most connections.
        refusals: counts of refusals, by reason, tier and model.
        clock: monotonic seconds.
        age: seconds after which a client is told to open another connection.
        grace: seconds from then on, after which its connection is cut.
        unread_timeout: seconds for which a client may take nothing of what it is sent.
        jitter: uniform in [0, 1).

    Attributes:
        hints: log lines on clients that speak another protocol.
        target: address for the server to listen at, as it writes it.
        connections: connections by the name of their server side.
        ceiling: first descriptor number at which a connection is refused.
    """

    def __init__(
        self,
        quotas: Quotas,
        most: int,
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
        self.grace, self.unread_timeout = grace, unread_timeout
        self.ceiling = 1 << 30
        self.connections: dict[str, ClientConnection] = {}
        self._most = most
        self._refusals = refusals
        self._age, self._jitter = age, jitter
        self._numbers = itertools.count(1)
        self._joining: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        self._folder: Path | None = None
        if sys.platform == "linux":  # Needs no folder that can be written, and leaves nothing behind.
            self._prefix, self._scheme = f"\0headway-grpc-{secrets.token_hex(16)}", "unix-abstract:"
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="hw"))
            self._prefix, self._scheme = f"{self._folder}/s", "unix:"
        self.target = self._scheme + self._prefix.removeprefix("\0")

    def accept(self) -> ClientConnection:
        """Make the protocol of a new connection."""
        return ClientConnection(self)

    def enter(self, connection: ClientConnection, descriptor: int) -> bool:
        """Take a connection in; False: there are too many, in all or of its client."""
        full = len(self.connections) >= self._most or descriptor >= self.ceiling
        if full or not self.quotas.enter(connection, connection.address):
            self._refusals["connections", "none", ""] += 1
            return False
        connection.name = f"{self.target}-{next(self._numbers)}"
        self.connections[connection.name] = connection
        connection.leaves = self.clock() + self._age * (1.0 + JITTER * (2.0 * self._jitter() - 1.0))
        return True

    def leave(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self.quotas.leave(connection)
        self.connections.pop(connection.name, None)
        if not self.connections:
            self._left.set()

    def connect(self, connection: ClientConnection) -> None:
        """Connect a client's connection to the server."""
        task = asyncio.get_running_loop().create_task(self._join(connection))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, connection: ClientConnection) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own = self._prefix + connection.name.removeprefix(self.target)
        try:
            sock.setblocking(False)
            sock.bind(own)
            sock.connect(self._prefix)
            side = ServerSide(connection)
            await asyncio.get_running_loop().create_unix_connection(lambda: side, sock=sock)
            connection.joined(side)  # Not before: a transport that is closed while it is made leaves its socket behind.
        except OSError as exc:
            sock.close()
            log.warning("a connection cannot be passed to the gRPC server", error=str(exc))
            connection.shutdown()
        finally:
            if self._folder is not None:
                Path(own).unlink(missing_ok=True)  # noqa: ASYNC240 - of a file that only a socket had

    def sweep(self, now: float, draining: bool) -> None:
        """Look at all connections; see `ClientConnection.inspect`."""
        for connection in list(self.connections.values()):
            connection.inspect(now, draining)

    def retire(self) -> None:
        """Tell every client to open another connection for further calls."""
        for connection in list(self.connections.values()):
            connection.retire()

    async def emptied(self) -> None:
        """Return as soon as no connection is left."""
        while self.connections:
            self._left.clear()
            await self._left.wait()

    async def close(self) -> None:
        """Cut what is left."""
        for connection in list(self.connections.values()):
            connection.shutdown()
        await self.emptied()
        await asyncio.gather(*self._joining, return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
