"""Connections of the gRPC port, and the streams of HTTP/2 that carry its calls.

A connection lives for some minutes, so that new gateways get their part of the traffic. Then, and when the process drains, its client is
told to leave (GOAWAY), and opens another one for further calls, elsewhere or here. All those that it has sent before are answered: behind
the GOAWAY goes a PING, and the connection ends only when the client has answered that and no call is left. Another GOAWAY then names the
last call that came, so that a client can tell which one it may send again.

The connection is also where a client is cut off that takes no answers, says nothing, or sends frames that only cost time.

A stream has the metadata of its call, its messages both ways, and its status. A message is a byte that says whether it is compressed, four
bytes with its length, and its content. The client may send WINDOW bytes ahead of the call, and the rest of a message once the call reads it.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from time import monotonic
from typing import Protocol, TypeVar, cast
from urllib.parse import quote_from_bytes

from headway.config import Settings
from headway.errors import DRAINING, RequestError
from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.gateway.client_quotas import Quotas
from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.http2 import DEFAULT_WINDOW, Broken, ErrorCode, Http2
from headway.grpc.message_turns import MessageTurns
from headway.grpc.statuses import Metadata, StatusCode
from headway.runtime import protocol_hints
from headway.runtime.listening import descriptor_of
from headway.runtime.memory_reuse import unfilled
from headway.runtime.protocol_hints import ProtocolHints

WINDOW = 1 << 13
"""Bytes that a client may send ahead of the call that reads, on each stream."""

PREFIX = 5
"""Bytes of a message before its content."""
_LARGE = 1 << 14
"""Bytes of a message from which it is put together once, in room of its own."""

AHEAD = 128
"""Bytes of room before the content of a large message, for the header of a packed value whose data end it."""

_KIND = ((":status", "200"), ("content-type", "application/grpc"))
_TRAILERS_ONLY = block_of(_KIND)
_HEAD = block_of((*_KIND, ("grpc-accept-encoding", "identity, deflate, gzip")))
"""Header fields of an answer with nothing but a status, and of one with messages."""
_OK = block_of((("grpc-status", "0"),))
_ENCODINGS, _NO_ENCODINGS = (b"gzip", b"deflate"), (b"", b"identity")
_ANY_WRAPPING = zlib.MAX_WBITS | 32
"""Wish that zlib finds out by itself whether a message is in the format of gzip or its own."""

_LENGTH_DIGITS = 20
"""Digits that no content-length has."""
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters that the details of a status have as they are."""


class Ended(Exception):
    """The port ends a call by itself, by a status that says all.

    Arguments:
        status: the status.
        details: its details.
    """

    def __init__(self, status: StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class CallStream:
    """Stream of one call.

    Arguments:
        connection: connection that it is on.
        number: its number.
        head: header fields that it began with.
        window: bytes that the client may send before the call reads.
        whole: whether the client has sent all.

    Attributes:
        task: task that answers the call.
        closed: whether nothing more can be sent on it.
        sent: is done when the message in hand has left; None while there is none.
    """

    __slots__ = (
        "_begun", "_deadline", "_encoding", "_missing", "_received", "_room", "_timer", "_unsent", "_waiting", "_whole", "_window", "closed", "connection",
        "head", "number", "sent", "task",
    )  # fmt: skip

    def __init__(self, connection: CallConnection, number: int, head: RequestFields, window: int, whole: bool) -> None:
        self.connection, self.number, self.head = connection, number, head
        self.task: asyncio.Task[None] | None = None
        self.closed = False
        self._encoding = b""
        self._received = bytearray()
        self._room: memoryview | None = None
        """Room of a large message that is read, as far as it is not filled; None while none is."""
        self._whole = whole
        self._missing: int | None = None
        """Bytes that are still to come by the content-length; None where there is none."""
        self._window = window
        """Bytes that the client may still send."""
        self._waiting: asyncio.Future[None] | None = None
        self._begun = False
        """Whether the answer has begun."""
        self._unsent = memoryview(b"")
        self.sent: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, fields: Mapping[bytes, bytes]) -> None:
        """Take note of what the header fields say of the time that the call has, and of its messages.

        Raises:
            Ended: the time is malformed.
        """
        self._encoding = fields.get(b"grpc-encoding", b"")
        length, timeout = fields.get(b"content-length"), fields.get(b"grpc-timeout")
        if length is not None:
            self._missing = int(length) if length.isdigit() and len(length) < _LENGTH_DIGITS else -1
        if timeout is not None:
            found = _TIMEOUT.fullmatch(timeout)
            if found is None:
                raise Ended(StatusCode.INTERNAL, "the metadata grpc-timeout is malformed")
            seconds = int(found[1]) * _UNITS[found[2]]
            self._deadline = monotonic() + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None where it has none."""
        return None if self._deadline is None else self._deadline - monotonic()

    # What the call does.

    async def read(self, most: int, *, leaves: bool = False) -> bytes | None:
        """Return the next message; None: the client has sent all.

        Arguments:
            most: most bytes that it may have, also once it is unpacked.
            leaves: whether the call is to end when the client is to open another connection.

        Raises:
            Ended: it is too large, incomplete, or compressed in a way that is not known.
            RequestError: the client is to open another connection.
        """
        received = self._received
        while True:
            if leaves and self.connection.leaving is not None:
                raise to_be_opened_anew()
            missing = PREFIX - len(received)
            if missing <= 0:
                length = int.from_bytes(received[1:PREFIX], "big")
                if length > most:
                    raise Ended(
                        StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {most})"
                    )
                missing += length
                if length > _LARGE and missing > 0:
                    packed, body = received[0], await self._read_large(length, leaves)
                    return await self._unpack(packed, body, most) if packed else body
                if missing <= 0:
                    packed, body = received[0], self.take_message(length)
                    return await self._unpack(packed, body, most) if packed else body
            if self._whole:
                if received:
                    raise _incomplete()
                return None
            self._open(missing)
            await self.change()

    def length_there(self, most: int) -> int:
        """Bytes of the next message, if all of it is there as it was meant; -1: it is to be waited for, unpacked or refused, by `read`."""
        received = self._received
        there = len(received) - PREFIX
        if there < 0 or received[0]:
            return -1
        length = int.from_bytes(received[1:PREFIX], "big")
        return length if length <= there and length <= most else -1

    def take_message(self, length: int) -> bytes:
        """Take the next message, all of which is there."""
        received = self._received
        body = bytes(memoryview(received)[PREFIX : PREFIX + length])
        del received[: PREFIX + length]
        return body

    async def _read_large(self, length: int, leaves: bool) -> bytes:
        """Content of a large message, whose prefix is there; see `read`."""
        content, begun = memoryview(unfilled(AHEAD + length))[AHEAD:], self._received
        self._room, self._received = content, bytearray()
        self._fill(self._room, memoryview(begun)[PREFIX:])
        try:
            while self._room:
                if leaves and self.connection.leaving is not None:
                    raise to_be_opened_anew()
                if self._whole:
                    raise _incomplete()
                self._open(len(self._room))
                await self.change()
        finally:
            self._room = None
        return cast(bytes, content)  # Nobody changes it, so it serves as bytes.

    async def change(self) -> None:
        """Return as soon as more has come, or the client is to open another connection."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def send(self, body: bytes) -> None:
        """Send a message, behind the last one. What the client does not take yet leaves later: `sent` tells when."""
        if self.closed:
            return
        self._begin()
        self._unsent = memoryview(b"\0%b%b" % (len(body).to_bytes(4, "big"), body))
        if not self.pump():
            self.connection.stuck[self] = None
            self.sent = asyncio.get_running_loop().create_future()

    def answer(self, body: bytes, trailers: Metadata) -> bool:
        """End a call without an error whose only message is this, all at once; False, and nothing is sent, where it cannot be."""
        if self._begun or self.closed:
            return False
        return self.connection.send_answer(self, _HEAD, body, _OK + block_of(trailers), whole=self._whole)

    def end(self, status: StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        """End the call with a status, unless it has ended."""
        if self.closed:
            return
        if self._unsent:  # No status can pass a message that is half sent.
            self.reset()
            return
        if status is StatusCode.OK and not details:
            block = _OK + block_of(trailers)
        else:
            told = ("grpc-message", quote_from_bytes(details.encode(), _PLAIN))
            block = block_of((("grpc-status", str(int(status))), *((told,) if details else ()), *trailers))
        self.connection.send_headers(self, block if self._begun else _TRAILERS_ONLY + block, end=True)
        self.connection.finish(self, whole=self._whole)

    def refuse(self, status: bytes) -> None:
        """End the stream with a status of HTTP, as it carries no call."""
        self.connection.send_headers(self, block_of(((":status", status.decode()),)), end=True)
        self.connection.finish(self, whole=self._whole)

    def reset(self) -> None:
        """End the stream without a status."""
        if not self.closed:
            self.connection.reset(self, ErrorCode.CANCEL)

    # What the connection does.

    def take(self, data: bytes | memoryview, amount: int) -> bool:
        """Take what has come; `amount` is what it takes of the window. Returns whether the client was allowed to send it."""
        self._window -= amount
        if self._window < 0:
            return False
        size = len(data)
        if self._room:
            self._fill(self._room, data)
        else:
            self._received += data
        if self._missing is not None:
            self._missing -= size
        if amount > size:  # Padding.
            self._window += amount - size
            self.connection.grant(self, amount - size)
        if self._waiting is not None and not self._room:
            self.wake()
        return True

    def _fill(self, room: memoryview, data: bytes | memoryview) -> None:
        """Put data into the room of a large message, and what is beyond it aside."""
        own = data[: len(room)]
        room[: len(own)] = own
        self._room = room[len(own) :]
        if len(own) < len(data):
            self._received += data[len(own) :]

    def finish_reading(self) -> bool:
        """Note that the client has sent all. Returns whether that is as much as it has said."""
        self._whole = True
        if self._waiting is not None:
            self.wake()
        return not self._missing

    def narrow(self, amount: int) -> None:
        """Let the client send less ahead; it heeds that already."""
        self._window -= amount

    def wake(self) -> None:
        """Let the call look at what has changed."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def pump(self) -> bool:
        """Send as much of the message in hand as the client takes. Returns whether that is all of it."""
        unsent = self._unsent
        while unsent:
            size = self.connection.send_data(self, unsent)
            if not size:
                self._unsent = unsent
                return False
            unsent = unsent[size:]
        self._unsent = unsent
        if self.sent is not None:
            if not self.sent.done():
                self.sent.set_result(None)
            self.sent = None
        return True

    def close(self) -> None:
        """Let go of everything, and end the call if it goes on."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self.connection.stuck.pop(self, None)
            self._unsent = memoryview(b"")

    def cancel(self) -> None:
        """End the call, as its client has left or its time is over."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.connection.send_headers(self, _HEAD)

    def _open(self, missing: int) -> None:
        """Let the client send what is missing of a message, and something ahead."""
        if self._window < missing or self._window < WINDOW // 2:
            more = max(missing, WINDOW) - self._window
            self._window += more
            self.connection.grant(self, more)

    async def _unpack(self, packed: int, body: bytes, most: int) -> bytes:
        if packed > 1 or self._encoding in _NO_ENCODINGS:
            raise Ended(
                StatusCode.INTERNAL, "the message is marked as compressed in a way that grpc-encoding does not tell"
            )
        if self._encoding not in _ENCODINGS:
            if not self.closed:
                self._begin()  # Its header fields say which encodings are known.
            raise Ended(StatusCode.UNIMPLEMENTED, "the message is compressed in a way that is not known here")
        return await self.connection.in_turn(partial(_unpacked, body, most))

    def _expire(self) -> None:
        self._timer = None
        self.end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.cancel()


def _unpacked(body: bytes, most: int, waited: float) -> bytes:
    unpacker = zlib.decompressobj(_ANY_WRAPPING)
    try:
        found = unpacker.decompress(body, most + 1)
    except zlib.error:
        raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked") from None
    if len(found) > most:
        raise Ended(
            StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({most} bytes) once it is unpacked"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked")
    return found


def _incomplete() -> Ended:
    return Ended(StatusCode.INTERNAL, "the last message of the call is incomplete")


def to_be_opened_anew() -> RequestError:
    """Error that ends a call whose client is to open another connection."""
    message = "the connection is to be closed, as it is old or this process goes down; open another one"
    return RequestError(message, code=DRAINING, retry_after=0.0)


JITTER = 0.1
"""Most by which an age is longer or shorter, as a share of it, so that clients that came together leave one by one."""


class MethodCall(Protocol):
    """Call of a method."""

    async def run(self) -> None:
        """Read the request, and answer it."""


MakeCall = Callable[[CallStream], MethodCall]
"""Stream to the call that it carries."""


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


T = TypeVar("T")

LAST = (1 << 31) - 1
"""Number of a stream that stands for all streams that were begun before the client has read it."""
LEAVING = b"headway."
"""Data of the PING that goes behind a GOAWAY. A client that has answered it has read all that was sent before."""

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

SILENCE = 10.0
"""Seconds of silence after which a connection without calls is closed, though its client has not said that it will leave."""
KEEP_ALIVE = 30.0
"""Seconds of silence after which a client is asked whether it is still there."""
KEEP_ALIVE_TIMEOUT = 10.0
"""Seconds within which it has to answer."""
LEAST_PING = 9.0
"""Seconds between two pings of a client that are always right, calls or none: its ten seconds, and what a network takes from them."""
_PING_STRIKES = 2
"""Pings that may come sooner, one after the other, while nothing is sent to the client."""

STREAMS = 1000
"""Most calls at once on one connection; a client keeps further ones back."""
_CONNECTION_WINDOW = STREAMS * WINDOW
"""Bytes on all streams of a connection that may be on their way, once its client heeds the bound of each stream."""

_BEGUN = 0.000_05
"""Seconds that the beginning of a call counts for, as it takes them in the next turn of the event loop."""
_ENDED = 20
"""Calls that are ended between two looks at how long it takes; the end of one counts as its beginning does."""
_FLUSH = 1 << 17
"""Bytes of answers that are made into frames before they are handed to the socket."""

_NO_FIELDS = RequestFields(())
_DRIBBLE = 1024
"""Bytes of a message below which a frame that does not end it explains nothing that its client sends."""
BURDEN = 10_000
"""Frames that bring no message, beyond those that answers explain, after which a client is cut off. RELIEF more may come with each sweep."""
RELIEF = 500
_DRIBBLE_BURDEN = 10
"""Frames for which a beginning of a message counts that has fewer than _DRIBBLE bytes, as its client has room for no more."""
_PATIENCE = 1000
"""Frames from which on such a beginning waits for more room, or for the next sweep: each costs as much as one of 16 KiB."""
_RESET_BURDEN = 4
"""Frames for which a call counts that its client cancels, and for which a frame of an answer makes up."""


class CallConnection(asyncio.Protocol):
    """Connection of one client, which the quotas count.

    Arguments:
        port: connections that it belongs to.

    Attributes:
        address: address of the client.
        owner, reserved, unfetched: see `headway.gateway.client_quotas.CountedConnection`.
        leaves: monotonic instant at which the client is told to leave.
        leaving: monotonic instant at which it was told; None before.
        streams: streams of the calls in hand.
        stuck: streams with a message of which the client does not take more for now.
    """

    __slots__ = (
        "__weakref__",
        "_answered",
        "_backlog",
        "_begun",
        "_blocked",
        "_burden",
        "_closed_at",
        "_flushing",
        "_heard",
        "_http2",
        "_made",
        "_pinged",
        "_pinged_at",
        "_port",
        "_pumping",
        "_quiet",
        "_settled",
        "_strikes",
        "_sweeping",
        "_taken",
        "_transport",
        "_unflushed",
        "address",
        "leaves",
        "leaving",
        "owner",
        "reserved",
        "streams",
        "stuck",
        "unfetched",
    )  # fmt: skip

    def __init__(self, port: PortConnections) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._http2: Http2 | None = None
        self.address = ""
        self.owner: str | None = None
        self.reserved = self.unfetched = 0
        self.leaves = math.inf
        self.leaving: float | None = None
        self.streams: dict[int, CallStream] = {}
        self.stuck: dict[CallStream, None] = {}
        self._made = self._quiet = port.clock()
        self._begun = self._answered = self._flushing = self._pumping = self._settled = self._sweeping = False
        self._closed_at: float | None = None
        self._heard = True
        self._backlog = b""
        self._blocked = 0.0
        self._burden = self._strikes = self._taken = self._unflushed = 0
        self._pinged: float | None = None
        self._pinged_at = -math.inf

    @property
    def silent(self) -> bool:
        """Whether no call of its client is in hand."""
        return not self.streams

    @property
    def _payer(self) -> str:
        """Name of who waits in line for what this connection takes."""
        return self.address if self.owner is None or self.owner == UNKNOWN else self.owner

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, or refuse it when there are too many, in all or of its client."""
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._port.enter(self, descriptor_of(self._transport)):
            self._transport.abort()  # Without a word, so that the client takes its time before it tries again.

    def data_received(self, data: bytes) -> None:
        """Read what the client has sent, unless it begins as another protocol does."""
        self._heard = True
        if self._http2 is None and not self._begin(data):
            return
        if self._backlog:  # A transport need not heed a pause from the beginning.
            self._backlog += data
        elif self._port.turns.free:
            self._take_in(data)
        else:
            self._wait(data)

    def pause_writing(self) -> None:
        """Send and read nothing more, as the client does not take what there is."""
        self._blocked = self._port.clock()
        self._adjust()

    def resume_writing(self) -> None:
        """Send and read on."""
        self._blocked = 0.0
        self._adjust()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls, and let go of everything."""
        self._transport = None
        streams = list(self.streams.values())
        for stream in streams:
            stream.close()
        self.streams.clear()
        self._http2, self._backlog = None, b""
        self._port.leave(self)
        if streams and self._port.turns.free:
            self._cancel(streams)
        elif streams:
            self._port.turns.wait(self._payer, partial(self._cancel, streams))

    def _cancel(self, streams: list[CallStream]) -> None:
        """End calls whose client has left, some of them in each turn of the event loop."""
        turns, ended = self._port.turns, streams[:_ENDED]
        for stream in ended:
            stream.cancel()
        turns.add(_BEGUN * len(ended))
        if len(streams) > _ENDED:
            turns.wait(self._payer, partial(self._cancel, streams[_ENDED:]))

    # What its streams do.

    def send_headers(self, stream: CallStream, block: bytes, *, end: bool = False) -> None:
        """Send header fields of a stream."""
        if self._http2 is not None:
            self._http2.headers(stream.number, block, end=end)
            self._note_sent()

    def send_data(self, stream: CallStream, data: bytes | memoryview) -> int:
        """Send the beginning of data, as far as the client takes it. Returns the number of bytes that are on their way."""
        http2 = self._http2
        if http2 is None or self._blocked or self._unflushed >= _FLUSH:
            return 0
        size = http2.room(stream.number)
        if size <= 0:
            return 0
        partly = size < len(data)
        if partly:
            if size < _DRIBBLE:
                if self._burden > _PATIENCE and not self._sweeping:
                    return 0
                self._burden += _DRIBBLE_BURDEN
            data = data[:size]
        http2.data(stream.number, data)
        self._unflushed += len(data)
        if partly and size < _DRIBBLE:
            self._flush_soon()
        else:
            self._note_sent()
        return len(data)

    def send_answer(self, stream: CallStream, head: bytes, body: bytes, trailers: bytes, *, whole: bool) -> bool:
        """Send header fields, a message and those behind it, and close the stream; False, and nothing is sent: the client does not take all.

        Arguments:
            stream: the stream.
            head: block of header fields.
            body: content of the message.
            trailers: block of those behind it.
            whole: whether the client has sent all.
        """
        http2, size = self._http2, PREFIX + len(body)
        if http2 is None or self._blocked or self._unflushed >= _FLUSH or size > http2.room(stream.number):
            return False
        http2.answer(stream.number, head, b"\0%b%b" % (len(body).to_bytes(4, "big"), body), trailers)
        self._unflushed += size
        self._burden -= min(self._burden, 2 * _RESET_BURDEN)  # The last frame makes up for another.
        self._note_sent()
        self.finish(stream, whole=whole)
        return True

    async def in_turn(self, work: Callable[[float], T]) -> T:
        """Do work of a stream in its turn; see `MessageTurns.take`."""
        return await self._port.turns.take(self._payer, work)

    def grant(self, stream: CallStream, amount: int) -> None:
        """Let the client send so many bytes more on a stream."""
        if self._http2 is not None:
            self._http2.grant(stream.number, amount)
            self._flush_soon()

    def finish(self, stream: CallStream, *, whole: bool) -> None:
        """Close a stream whose answer is sent; `whole`: its client has sent all."""
        if whole:
            self.streams.pop(stream.number, None)
            stream.close()
        else:
            self.reset(stream, ErrorCode.NO_ERROR)

    def reset(self, stream: CallStream, code: ErrorCode) -> None:
        """Close a stream of which the client is to send no more."""
        self.streams.pop(stream.number, None)
        stream.close()
        if self._http2 is not None:
            self._http2.reset(stream.number, code)
            self._flush_soon()

    # What the calls and the port do.

    def write(self, data: bytes) -> None:
        """Send bytes behind all that is on its way."""
        if self._transport is not None and not self._transport.is_closing():
            self._flush()
            self._transport.write(data)

    def close(self) -> None:
        """Close, once what was written has left."""
        self._flush()
        self._closed_at = self._port.clock()
        if self._transport is not None:
            self._transport.close()

    def shutdown(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def retire(self, last: int = LAST) -> None:
        """Tell the client to open another connection for further calls.

        Arguments:
            last: number of the last stream that is answered.
        """
        if self.leaving is None:
            self.leaving = self._port.clock()
            self._tell_to_leave(last)
            for stream in list(self.streams.values()):
                stream.wake()
        elif last != LAST:
            self._tell_to_leave(last)

    def _tell_to_leave(self, last: int = LAST) -> None:
        if self._http2 is not None:
            self._http2.leave(last, ErrorCode.NO_ERROR)
            self._http2.ping(LEAVING)
            self._flush()

    def inspect(self, now: float, draining: bool) -> None:
        """Tell the client to leave when it is time to, and end what takes too long.

        Arguments:
            now: monotonic instant in seconds.
            draining: whether the port has closed.
        """
        port = self._port
        self._burden = max(0, self._burden - RELIEF)
        since = self._blocked or self._closed_at
        if since and now - since > port.unread_timeout:
            self.shutdown()
            return
        self._sweeping = True
        self._pump()
        self._sweeping = False
        heard, self._heard = self._heard or bool(self.streams and self.leaving is not None), False
        if heard:
            self._quiet, self._pinged = now, None
        if not self._begun and now - self._made > port.unread_timeout:
            self.shutdown()
        elif self.leaving is not None:
            if (self._answered and not self.streams) or now - max(self._quiet, self.leaving) > SILENCE:
                if self._http2 is not None:
                    self._http2.leave(self._http2.last, ErrorCode.NO_ERROR)
                self.close()
            elif not draining and now - self.leaving > port.grace:
                self.shutdown()
        elif now > self.leaves:
            self.retire()
        else:
            self._keep_alive(now)

    def _keep_alive(self, now: float) -> None:
        if self._pinged is not None:
            if now - self._pinged > KEEP_ALIVE_TIMEOUT:
                self.shutdown()
        elif now - self._quiet > KEEP_ALIVE and self._http2 is not None:
            self._pinged = now
            self._http2.ping(b"are you?")
            self._flush()

    # Steps.

    def _begin(self, data: bytes) -> bool:
        """Begin to speak HTTP/2; False: the client speaks something else."""
        if data.startswith(_HANDSHAKE):
            self._port.hints.tell(protocol_hints.TLS)
            self.shutdown()
            return False
        if _HTTP1.match(data) and not data.startswith(_PREFACE):
            self._port.hints.tell(protocol_hints.HTTP1)
            self.write(_NOT_HTTP1)
            self.close()
            return False
        self._http2 = Http2(self, STREAMS, WINDOW, self._port.most_header)
        if self.leaving is not None:
            self._tell_to_leave()
        return True

    def _take_in(self, data: bytes) -> None:
        """Read for a moment; what is left waits for another turn of the event loop."""
        turns, at, length = self._port.turns, 0, len(data)
        begun = turns.clock()
        while at < length:
            read = self._feed(data, at)
            if not read:
                return
            at += read
            begun = turns.spend(begun)
            if at < length and not turns.free:
                self._wait(data[at:])
                return
        self._flush_soon()

    def _wait(self, data: bytes) -> None:
        """Have bytes read when it is this connection's turn, and read nothing more before."""
        self._backlog = data
        self._adjust()
        self._port.turns.wait(self._payer, self._go_on)

    def _go_on(self) -> None:
        backlog, self._backlog = self._backlog, b""
        if self._transport is not None and not self._transport.is_closing():
            self._take_in(backlog)
            self._adjust()

    def _feed(self, data: bytes, at: int) -> int:
        """Read some bytes from a place on, and act on them. Returns how many were read; 0: the connection has ended."""
        http2 = self._http2
        if http2 is None:
            return 0
        try:
            read = http2.receive(data, at)
        except Broken as broken:
            self._cut("protocol_error", broken.code)
            return 0
        if self._burden > BURDEN // 2:
            if self._burden > BURDEN:
                self._cut("too_many_frames")
                return 0
            self.retire()  # A proxy then opens another connection, and its other clients lose no call.
        return 0 if self._transport is None or self._transport.is_closing() else read

    def _cut(self, reason: str, code: ErrorCode = ErrorCode.ENHANCE_YOUR_CALM) -> None:
        """Cut the connection of a client that sends too much of what costs time, or breaks the protocol."""
        self._port.count_cut(reason)
        if self._http2 is not None:
            self._http2.leave(self._http2.last, code, reason.encode())
        self.close()

    # What the frames say.

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        """Begin a call."""
        window = WINDOW if self._settled else DEFAULT_WINDOW
        stream = self.streams[number] = CallStream(self, number, head, window, ended)
        fields, port = head.fields, self._port
        if fields[b":method"] != b"POST" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.refuse(b"415")
            return
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
        """Refuse a call with too many metadata."""
        stream = self.streams[number] = CallStream(self, number, _NO_FIELDS, WINDOW, ended)
        stream.end(StatusCode.RESOURCE_EXHAUSTED, self._port.too_many_metadata)

    def lost(self) -> None:
        """Have the client open another connection, as no further call can begin on this one."""
        if self._http2 is not None:
            self._answered = True
            self.retire(self._http2.last)

    def received(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        """Hand data to a call."""
        self._count(amount)
        if not data:
            self._burden += 1
        stream = self.streams.get(number)
        if stream is None:
            return
        if not stream.take(data, amount):
            self._fail(stream, ErrorCode.FLOW_CONTROL_ERROR)
        elif ended and not stream.finish_reading():
            self._fail(stream, ErrorCode.PROTOCOL_ERROR)

    def unpacked(self, size: int) -> None:
        """Count header fields by the time that they take."""
        self._burden += size >> 10

    def ignored(self, amount: int) -> None:
        """Count a frame that brings nothing."""
        self._burden += 1
        self._count(amount)

    def _count(self, amount: int) -> None:
        """Let the client send on once it has sent half of what it may, if it heeds the bounds of its streams."""
        self._taken += amount
        if self._taken > _CONNECTION_WINDOW // 2 and self._settled and self._http2 is not None:
            self._http2.grant(0, self._taken)
            self._taken = 0

    def _fail(self, stream: CallStream, code: ErrorCode) -> None:
        """End a call whose client breaks the protocol on its stream alone."""
        self._burden += _RESET_BURDEN
        self.reset(stream, code)
        stream.cancel()

    def was_reset(self, number: int) -> None:
        """End a call that its client has cancelled, or whose stream it has spoilt."""
        self._burden += _RESET_BURDEN
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.close()
            stream.cancel()

    def pinged(self) -> None:
        """Cut a client that pings too often."""
        now = self._port.clock()
        if now < self._pinged_at + LEAST_PING:
            self._strikes += 1
            if self._strikes > _PING_STRIKES:
                self._cut("too_many_pings")
        self._pinged_at = now

    def ponged(self, data: bytes) -> None:
        """Note that the client has read that it is to leave."""
        self._burden += 1
        if data == LEAVING:
            self._answered = True

    def settings_changed(self) -> None:
        """Handle the client's SETTINGS: it speaks HTTP/2, and its windows may have grown."""
        self._begun = True
        self.windows_changed(0)

    def settings_read(self) -> None:
        """Bound each stream by less, and all of them together by more, as the client heeds the former now."""
        self._burden += 1
        if not self._settled and self._http2 is not None:
            self._settled = True
            self._http2.grant(0, _CONNECTION_WINDOW - DEFAULT_WINDOW)
            self._flush_soon()
            for stream in self.streams.values():
                stream.narrow(DEFAULT_WINDOW - WINDOW)
                stream.wake()  # There may be no room any more for the rest of a message.

    def windows_changed(self, number: int) -> None:
        """Send on."""
        self._burden += 1
        if not self.stuck:
            return
        if not number:
            self._pump_soon()
        else:
            stream = self.streams.get(number)
            if stream is not None and stream in self.stuck and stream.pump():
                del self.stuck[stream]

    def left(self) -> None:
        """Let the client go when its calls are answered."""
        self._burden += 1
        self._answered = True
        self.retire()

    def _pump(self) -> None:
        """Send what the client takes now of the messages that wait for it."""
        self._pumping = False
        http2 = self._http2
        for stream in list(self.stuck):
            if self._blocked or self._unflushed >= _FLUSH or http2 is None or not http2.has_room:
                return
            del self.stuck[stream]
            if not stream.pump():
                self.stuck[stream] = None

    def _pump_soon(self) -> None:
        if self.stuck and not self._blocked and not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _note_sent(self) -> None:
        self._strikes, self._pinged_at = 0, -math.inf
        self._burden -= _RESET_BURDEN if self._burden > _RESET_BURDEN else self._burden
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Hand what the library has made to the socket."""
        self._flushing = False
        http2, transport = self._http2, self._transport
        if http2 is None or transport is None or transport.is_closing():
            return
        data = http2.take()
        if data:
            self._unflushed = 0
            transport.write(data)
            self._pump_soon()

    def _adjust(self) -> None:
        """Read from the socket, or leave off."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._blocked or self._backlog:
                transport.pause_reading()
            else:
                transport.resume_reading()
