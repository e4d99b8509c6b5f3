"""One connection of the gRPC port: its calls, and what its client may do to it.

A connection lives for some minutes, so that new gateways get their part of the traffic. Then, and when the process drains, its client is
told to leave (GOAWAY), and opens another one for further calls, elsewhere or here. All those that it has sent before are answered: behind
the GOAWAY goes a PING, and the connection ends only when the client has answered that and no call is left. Another GOAWAY then names the
last call that came, so that a client can tell which one it may send again.

The connection is also where a client is cut off that takes no answers, says nothing, or sends frames that only cost time.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from headway.gateway.client_quotas import STRANGERS as UNKNOWN
from headway.grpc.header_blocks import RequestFields
from headway.grpc.http2 import DEFAULT_WINDOW, Broken, ErrorCode, Http2
from headway.grpc.statuses import StatusCode
from headway.grpc.stream import PREFIX, WINDOW, CallStream, Ended
from headway.runtime import protocol_hints
from headway.runtime.listening import descriptor_of

if TYPE_CHECKING:
    from headway.grpc.connections import PortConnections

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
        """Note that the client speaks HTTP/2, and may take more."""
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
