"""Connections of the gRPC port: an asyncio protocol between a frame reader, the current calls, and a frame writer.

A connection lives for a few minutes, so that new gateways get their share of the traffic. After that, or when the process drains, a GOAWAY
tells the client to open another connection for further calls, here or elsewhere. A PING follows. Once the client has answered the PING,
and all earlier calls are answered, a second GOAWAY names the last received call, so that the client knows which calls it may send again.
Then the connection closes. Clients that don't read their answers, are unresponsive, or send frames that only cost time are cut off.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Protocol, cast

from headway.config import Settings
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.gateway.client_quotas import Quotas
from headway.grpc import writer
from headway.grpc.call_stream import WINDOW, CallStream, Ended, MessageTurns
from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.reader import Http2Reader
from headway.grpc.status import StatusCode
from headway.grpc.writer import CANCELLED, DEFAULT_WINDOW, LARGEST, Broken, Burden, ErrorCode, Http2Writer
from headway.runtime import protocol_hints
from headway.runtime.listening import descriptor_of
from headway.runtime.protocol_hints import ProtocolHints

JITTER = 0.1  # Maximum fraction by which a connection's age varies, so that clients don't all leave at once.
STREAMS = 1000  # Maximum number of concurrent calls on a connection. The client delays further calls.
LAST = LARGEST  # Stream number in a GOAWAY that allows all streams started before the client has read the GOAWAY.
LEAVING = b"headway."  # Data of the PING after a GOAWAY. A client that has answered it has read the GOAWAY.
SILENCE = 10.0  # Seconds of silence after a GOAWAY until the connection closes, even if the PING is never answered.
KEEP_ALIVE = 30.0  # Seconds of silence after which a client is sent a PING.
KEEP_ALIVE_TIMEOUT = 10.0  # Seconds within which the client must answer the PING.
_BEGUN = 0.000_05  # Seconds to charge for starting or ending a call, which is done in the next turn of the event loop.
_ENDED = 20  # Maximum number of calls cancelled in one turn of the event loop.
_NO_FIELDS = RequestFields(())
_NO_CALL = block_of(((":status", "415"),))

_PREFACE = b"PRI "  # First bytes of a connection in HTTP/2.
_HANDSHAKE = b"\x16\x03"  # In TLS.
_HTTP1 = re.compile(rb"[A-Z]{3,10} [/*h]")  # In HTTP/1.1: method and target.
_NOT_HTTP1 = b"this port speaks gRPC, in HTTP/2: HTTP/1.1 has a port of its own\n"
_REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"


class MethodCall(Protocol):
    """A call of a method."""

    async def run(self) -> None:
        """Read the request and answer it."""


MakeCall = Callable[[CallStream], MethodCall]


class PortConnections:
    """All connections of the port. Frames and messages are read in `turns`. `jitter` returns uniformly distributed numbers in [0, 1).
    `methods` has the functions that make calls, by path. After a GOAWAY, a client has `grace` seconds to open another connection. It
    may leave data unread for `unread_timeout` seconds. From descriptor number `ceiling` on, connections are refused."""

    def __init__(
        self, settings: Settings, quotas: Quotas, refusals: MutableMapping[tuple[str, str, str], int], turns: MessageTurns,
        clock: Callable[[], float], jitter: Callable[[], float],
    ) -> None:  # fmt: skip
        self.quotas, self.clock, self.turns = quotas, clock, turns
        self.hints = ProtocolHints("grpc", clock)
        self.most_header = settings.max_header_bytes
        self.grace = settings.drain_s
        self.unread_timeout = settings.read_timeout_ms / 1000
        self.too_many_metadata = f"the metadata have more than {self.most_header} bytes; send less metadata"
        self.ceiling = 1 << 30
        self.open: dict[CallConnection, None] = {}
        self.methods: Mapping[str, MakeCall] = {}
        self._most, self._refusals = settings.max_connections, refusals
        self._age, self._jitter = settings.grpc_max_age_s, jitter
        self._left = asyncio.Event()

    def accept(self) -> CallConnection:
        return CallConnection(self)

    def enter(self, connection: CallConnection, descriptor: int) -> bool:
        """Admit a connection. Return False if too many are open, in total or from its client."""
        full = len(self.open) >= self._most or descriptor >= self.ceiling
        if full or not self.quotas.enter(connection, connection.address):
            self._refusals["connections", "none", ""] += 1
            return False
        self.open[connection] = None
        connection.leaves = self.clock() + self._age * (1.0 + JITTER * (2.0 * self._jitter() - 1.0))
        return True

    def count_cut(self, reason: str) -> None:
        self._refusals[reason, "none", ""] += 1
        self.hints.tell(protocol_hints.CUTS[reason])

    def leave(self, connection: CallConnection) -> None:
        self.quotas.leave(connection)
        self.open.pop(connection, None)
        if not self.open:
            self._left.set()

    def find(self, head: RequestFields) -> MakeCall:
        """Return the function that makes a call. Raises Ended if its header fields are invalid, or its method is unknown."""
        if head.illegal:
            raise Ended(StatusCode.INTERNAL, "the metadata contain control characters; remove them")
        if head.size > self.most_header:
            raise Ended(StatusCode.RESOURCE_EXHAUSTED, self.too_many_metadata)
        make = self.methods.get(head.fields[b":path"].decode("latin-1"))
        if make is None:
            raise Ended(StatusCode.UNIMPLEMENTED, "Method not found!")
        return make

    def sweep(self, now: float, draining: bool) -> None:
        for connection in list(self.open):
            connection.inspect(now, draining)

    def retire(self) -> None:
        for connection in list(self.open):
            connection.retire()

    async def emptied(self) -> None:
        while self.open:
            self._left.clear()
            await self._left.wait()

    async def close(self) -> None:
        for connection in list(self.open):
            connection.shutdown()
        await self.emptied()


class CallConnection(asyncio.Protocol):
    """The connection of one client. `leaves` is the monotonic time at which to send a GOAWAY. `leaving` is the time at which
    one was sent, or None. `greeted` is True once the client has sent its settings. `answered` is True once it will start no
    more calls. For the other attributes see CountedConnection."""

    __slots__ = (
        "__weakref__", "_backlog", "_closed_at", "_heard", "_made", "_pinged", "_quiet", "_reader", "_transport", "address", "answered", "greeted", "leaves",
        "leaving", "owner", "port", "reserved", "streams", "turns", "unfetched",
    )  # fmt: skip

    def __init__(self, port: PortConnections) -> None:
        self.port, self.turns = port, port.turns
        self._transport: asyncio.Transport | None = None
        self._reader: Http2Reader | None = None  # None until the client speaks HTTP/2, and once the connection is lost.
        self.address = ""
        self.owner: str | None = None
        self.reserved = self.unfetched = 0
        self.leaves = math.inf
        self.leaving: float | None = None
        self.greeted = self.answered = False
        self.streams: dict[int, CallStream] = {}
        self._made = self._quiet = port.clock()
        self._closed_at: float | None = None
        self._heard = True
        self._pinged: float | None = None
        self._backlog = b""

    @property
    def silent(self) -> bool:
        return not self.streams

    @property
    def payer(self) -> str:
        return self.address if self.owner is None or self.owner == UNKNOWN else self.owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self.port.enter(self, descriptor_of(self._transport)):
            self._transport.abort()  # There is no answer, so that the client waits before it retries.

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._reader is None and not self._begin(data):
            return
        if self._backlog:  # A transport that is paused may still deliver some data.
            self._backlog += data
        elif self.turns.free:
            self._read(data)
        else:
            self._wait(data)

    def pause_writing(self) -> None:
        """Pause sending and reading, because the client isn't reading its answers."""
        if self._reader is not None:
            self._reader.writer.blocked = self.port.clock()
        self._adjust()

    def resume_writing(self) -> None:
        if self._reader is not None:
            self._reader.writer.resume()
        self._adjust()

    def connection_lost(self, exc: Exception | None) -> None:
        streams = list(self.streams.values())
        for stream in streams:
            stream.close()
        self.streams.clear()
        self._transport = self._reader = None
        self._backlog = b""
        self.port.leave(self)
        if streams and self.turns.free:
            self._cancel(streams)
        elif streams:
            self.turns.wait(self.payer, partial(self._cancel, streams))

    def _cancel(self, streams: list[CallStream]) -> None:
        """Cancel calls whose client has left, a few in each turn of the event loop."""
        for stream in streams[:_ENDED]:
            stream.cancel()
        self.turns.add(_BEGUN * len(streams[:_ENDED]))
        if len(streams) > _ENDED:
            self.turns.wait(self.payer, partial(self._cancel, streams[_ENDED:]))

    def _begin(self, data: bytes) -> bool:
        """Start to speak HTTP/2. Return False if the client speaks another protocol."""
        if data.startswith(_HANDSHAKE):
            self.port.hints.tell(protocol_hints.TLS)
            self.shutdown()
            return False
        if _HTTP1.match(data) and not data.startswith(_PREFACE):
            self.port.hints.tell(protocol_hints.HTTP1)
            self.refuse(_NOT_HTTP1)
            return False
        writer = Http2Writer(Burden(), partial(asyncio.get_running_loop().call_soon, self._flush))
        self._reader = Http2Reader(CallTable(self, writer), writer, STREAMS, WINDOW, self.port.most_header)
        if self.leaving is not None:
            self._tell_to_leave(LAST)
        return True

    def _read(self, data: bytes) -> None:
        """Read for a moment, and leave the remaining bytes for another turn of the event loop."""
        reader, turns, at, length = self._reader, self.turns, 0, len(data)
        if reader is None:
            return
        load = reader.writer.burden
        begun = turns.clock()
        while at < length:
            try:
                at += reader.receive(data, at)
            except Broken as broken:
                self.cut("protocol_error", broken.code)
                return
            if load.frames > writer.LIMIT // 2:
                if load.frames > writer.LIMIT:
                    self.cut("too_many_frames")
                    return
                self.retire()  # A proxy then opens another connection, so its other clients don't lose any calls.
            if self._transport is None or self._transport.is_closing():
                return
            begun = turns.spend(begun)
            if at < length and not turns.free:
                self._wait(data[at:])
                return
        reader.writer.flush_soon()

    def _wait(self, data: bytes) -> None:
        """Buffer bytes until this connection's turn, and read nothing more from the socket until then."""
        self._backlog = data
        self._adjust()
        self.turns.wait(self.payer, self._go_on)

    def _go_on(self) -> None:
        backlog, self._backlog = self._backlog, b""
        if self._transport is not None and not self._transport.is_closing():
            self._read(backlog)
            self._adjust()

    def _adjust(self) -> None:
        transport, reader = self._transport, self._reader
        if transport is not None and not transport.is_closing():
            if self._backlog or (reader is not None and reader.writer.blocked):
                transport.pause_reading()
            else:
                transport.resume_reading()

    def _flush(self) -> None:
        reader, transport = self._reader, self._transport
        if reader is None or transport is None or transport.is_closing():
            return
        data = reader.writer.take()
        if data:
            transport.write(data)

    def refuse(self, why: bytes) -> None:
        """Answer in HTTP/1.1, and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_REFUSAL % (len(why), why))
        self.close()

    def reset(self, number: int, code: ErrorCode) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.close()
        if self._reader is not None:
            self._reader.reset(number, code)

    def retire(self, last: int = LAST) -> None:
        """Send a GOAWAY: the client has to open another connection for further calls. `last` is the last stream answered here."""
        if self.leaving is None:
            self.leaving = self.port.clock()
            self._tell_to_leave(last)
            for stream in list(self.streams.values()):
                stream.wake()
        elif last != LAST:
            self._tell_to_leave(last)

    def _tell_to_leave(self, last: int) -> None:
        if self._reader is not None:
            self._reader.writer.leave(last, ErrorCode.NO_ERROR)
            self._reader.writer.ping(LEAVING)
            self._flush()

    def cut(self, reason: str, code: ErrorCode = ErrorCode.ENHANCE_YOUR_CALM) -> None:
        """Cut off a client that violates the protocol, or sends too many frames that only cost time."""
        self.port.count_cut(reason)
        if self._reader is not None:
            self._reader.writer.leave(self._reader.last, code, reason.encode())
        self.close()

    def close(self) -> None:
        self._flush()
        if self._closed_at is None:
            self._closed_at = self.port.clock()
        if self._transport is not None:
            self._transport.close()

    def shutdown(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def inspect(self, now: float, draining: bool) -> None:
        """Enforce timeouts, and tell the client to leave when it is time. `draining` is True once the port has closed."""
        port, reader = self.port, self._reader
        since = self._closed_at
        if reader is not None:
            reader.writer.burden.relieve()
            since = reader.writer.blocked or since
        if since and now - since > port.unread_timeout:
            self.shutdown()
            return
        if self._closed_at is not None:  # The connection is closing: only its last bytes are still to be sent.
            return
        if reader is not None:
            reader.writer.pump(sweep=True)
        heard, self._heard = self._heard or bool(self.streams and self.leaving is not None), False
        if heard:
            self._quiet, self._pinged = now, None
        if not self.greeted and now - self._made > port.unread_timeout:
            self.shutdown()
        elif self.leaving is not None:
            if (self.answered and not self.streams) or now - max(self._quiet, self.leaving) > SILENCE:
                if reader is not None:
                    reader.writer.leave(reader.last, ErrorCode.NO_ERROR)
                self.close()
            elif not draining and now - self.leaving > port.grace:
                self.shutdown()
        elif now > self.leaves:
            self.retire()
        elif self._pinged is not None:
            if now - self._pinged > KEEP_ALIVE_TIMEOUT:
                self.shutdown()
        elif now - self._quiet > KEEP_ALIVE and reader is not None:
            self._pinged = now
            reader.writer.ping(b"are you?")
            self._flush()


class CallTable:
    """The calls of one connection. Its reader's events start, continue and end them; see `headway.grpc.reader.Events`."""

    __slots__ = ("_connection", "_streams", "_window", "_writer")

    def __init__(self, connection: CallConnection, writer: Http2Writer) -> None:
        self._connection, self._streams, self._writer = connection, connection.streams, writer
        self._window = DEFAULT_WINDOW

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        connection, fields = self._connection, head.fields
        port = connection.port
        if fields[b":method"] != b"POST" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            self._writer.headers(number, _NO_CALL, end=True)
            if not ended:
                connection.reset(number, ErrorCode.NO_ERROR)
            return
        stream = CallStream(connection, self._writer, number, head, self._window, ended)
        self._streams[number] = stream
        port.turns.add(_BEGUN)
        try:
            make = port.find(head)
            stream.begin(fields)
        except Ended as end:
            stream.end(end.status, end.details)
            return
        if ended and not stream.finish_reading():
            self._fail(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.task = asyncio.get_running_loop().create_task(make(stream).run())

    def oversized(self, number: int, ended: bool) -> None:
        stream = self._streams[number] = CallStream(self._connection, self._writer, number, _NO_FIELDS, WINDOW, ended)
        stream.end(StatusCode.RESOURCE_EXHAUSTED, self._connection.port.too_many_metadata)

    def lost(self, last: int) -> None:
        """Send a GOAWAY, because no further calls can start on this connection."""
        self._connection.answered = True
        self._connection.retire(last)

    def received(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if not stream.take(data, amount):
            self._fail(stream, ErrorCode.FLOW_CONTROL_ERROR)
        elif ended and not stream.finish_reading():
            self._fail(stream, ErrorCode.PROTOCOL_ERROR)

    def _fail(self, stream: CallStream, code: ErrorCode) -> None:
        self._writer.burden.frames += CANCELLED
        self._connection.reset(stream.number, code)
        stream.cancel()

    def was_reset(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()
            stream.cancel()

    def greeted(self) -> None:
        self._connection.greeted = True

    def settled(self) -> None:
        """Reduce the windows of all streams. The client does the same, because it now knows our settings."""
        self._window = WINDOW
        for stream in self._streams.values():
            stream.narrow(DEFAULT_WINDOW - WINDOW)

    def pinged(self) -> None:
        if not self._writer.burden.ping(self._connection.port.clock()):
            self._connection.cut("too_many_pings")

    def ponged(self, data: bytes) -> None:
        if data == LEAVING:
            self._connection.answered = True

    def left(self) -> None:
        self._connection.answered = True
        self._connection.retire()
