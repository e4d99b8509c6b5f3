"""Reader of one HTTP/2 connection (RFC 9113): bytes in, events out. It does no I/O and doesn't read the clock.

    receive(bytes) ─▶ frames ─▶ header blocks, decoded by hpack ─▶ Events

Each event is reported once its frame is complete. Its receiver may end streams before the next frame is read. The protocol's
own answers (settings, pings, refused streams) are sent by the writer. If an error shows that the client is faulty, the
connection ends, as the RFC allows.
"""

from __future__ import annotations

import struct
from typing import Protocol

from hpack.exceptions import HPACKError, OversizedHeaderListError

from headway.grpc.header_blocks import HeaderReader, RequestFields
from headway.grpc.writer import (
    ACK,
    CANCELLED,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    LARGEST,
    LARGEST_FRAME,
    PING,
    PRIORITY,
    PUSH,
    RESET,
    SETTINGS,
    WINDOW_UPDATE,
    Broken,
    ErrorCode,
    Http2Writer,
)  # fmt: skip

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_DATA = 1 << 20  # Maximum payload in bytes of a received DATA frame. Large frames save time per byte.
_PADDED, _PRIORITY = 8, 0x20
_SIZE = ErrorCode.FRAME_SIZE_ERROR
_read_head = struct.Struct(">HBBBI").unpack_from  # Unpacks a frame's header: length (two parts), type, flags, stream.
_IN_PIECES = 1 << 10  # Size in bytes above which a frame's data are passed on as they arrive, to be copied only once.
_MOST_SETTINGS = 32  # Maximum number of settings in one frame. HTTP/2 defines seven.
_READ_AT_ONCE = 4096  # Number of bytes of frames or decoded header fields after which `receive` stops.
_DATA_SHIFT = 4  # A byte of data counts as a sixteenth of a byte, because it is only copied.


class Events(Protocol):
    """Receives the events of a connection."""

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        """A stream has started. If `ended`, the client sends nothing more on it."""

    def oversized(self, number: int, ended: bool) -> None:
        """A stream has started with more header fields than the reader accepts."""

    def lost(self, last: int) -> None:
        """The client has sent more header fields than the reader can decode. No stream starts after `last`."""

    def received(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        """Data have arrived. They use `amount` bytes of the stream's window, including any padding. If `data` is a view, it is
        valid only until this method returns."""

    def was_reset(self, number: int) -> None:
        """A stream has ended, because the client has cancelled it or made an error."""

    def greeted(self) -> None:
        """The client has sent settings."""

    def settled(self) -> None:
        """The client has read our settings, and obeys them from now on."""

    def pinged(self) -> None:
        """The client has sent a ping, which the reader has answered."""

    def ponged(self, data: bytes) -> None:
        """The client has answered a ping."""

    def left(self) -> None:
        """The client will start no more streams."""


class Http2Reader:
    """Reader of one connection. A client may have `streams` streams open at a time. Once it has read our settings, it may send
    `window` bytes ahead on each stream. The announced limit for header fields is `most_header` bytes. If a block has more than
    twice that, decoding stops. The connection's table is then lost, so no more streams can start. `last` is the number of the
    last stream that started."""

    __slots__ = (
        "_block", "_block_ends", "_block_of", "_burden", "_events", "_fields", "_greeted", "_in", "_left", "_lost", "_most", "_most_block", "_most_in", "_open",
        "_part", "_rest", "_rest_ends", "_rest_of", "_settled", "_spent", "last", "writer",
    )  # fmt: skip

    def __init__(self, events: Events, writer: Http2Writer, streams: int, window: int, most_header: int) -> None:
        self._events, self.writer, self._burden = events, writer, writer.burden
        self._most, self._most_block = streams, 2 * most_header
        self._fields = HeaderReader(self._most_block)
        self._lost = False  # True once the decoder has lost the connection's table.
        self._greeted = self._settled = False  # True after the preface; True once the client has read our settings.
        self._part = b""
        # The frame that is being passed on in pieces: bytes still to come, stream (0 to discard them), True if it ends the stream.
        self._rest, self._rest_of, self._rest_ends = 0, 0, False
        self._spent = 0  # Bytes read in this call of `receive`, weighted by the time they take.
        self._block: bytearray | None = None  # The first part of a header block that is split over several frames.
        self._block_of, self._block_ends = 0, False
        self.last = 0
        self._open: set[int] = set()
        self._left: dict[int, None] = {}  # Latest streams that only this side has ended. Data on them are ignored.
        self._in, self._most_in = DEFAULT_WINDOW, max(DEFAULT_WINDOW, streams * window)
        """Bytes that the client may send on all streams together, now and at most."""
        writer.announce(streams=streams, window=window, largest_data=LARGEST_DATA, most_header=most_header)

    def reset(self, number: int, code: ErrorCode) -> None:
        if number in self._open:
            self._open.discard(number)
            self._left[number] = None
            if len(self._left) > self._most:
                del self._left[next(iter(self._left))]
        self.writer.reset(number, code)

    def receive(self, data: bytes, begin: int = 0) -> int:
        """Read `data`, starting at `begin`, and return the number of bytes read. May stop early to give others a turn. Raises
        Broken if the client has violated the protocol."""
        part, self._spent = len(self._part), 0
        if part:
            data, begin = self._part + data[begin:], 0
            self._part = b""
        at, length = begin, len(data)
        if not self._greeted:
            if not self._begins(data):
                self._part = data
                return length - part
            at = len(PREFACE)
        while at < length:
            if self._spent > _READ_AT_ONCE:
                return at - begin - part
            if self._rest:
                piece = memoryview(data)[at : at + self._rest]
                at += len(piece)
                self._go_on(piece)
                continue
            if at + FRAME_HEADER > length:
                break
            high, low, kind, flags, number = _read_head(data, at)
            size, number, body = high << 8 | low, number & LARGEST, at + FRAME_HEADER
            if size > _IN_PIECES and self._in_pieces(kind, flags, number, size):
                at = body
                continue
            if body + size > length:
                break
            at = body + size
            self._spent += size + FRAME_HEADER
            self._frame(kind, flags, number, data[body:at])
        self._part = data[at:]
        return length - begin - part

    def _begins(self, data: bytes) -> bool:
        """Return True once `data` has the whole preface and the start of the settings frame after it. Raises Broken if either
        is wrong."""
        size = len(PREFACE)
        kind = data[size + 3 : size + 4]
        _check(data[:size] == PREFACE[: len(data)] and kind in (b"", bytes((SETTINGS,))))
        self._greeted = bool(kind)
        return self._greeted

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None:
            _check(kind == CONTINUATION and number == self._block_of)
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RESET:
            self._reset(number, payload)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == PING:
            self._ping(flags, number, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, payload)
        elif kind == PRIORITY:  # RFC 9113 has dropped priorities.
            _check(number > 0)
            _check(len(payload) == 5, _SIZE)
            _check(_depends_on(payload) != number)
            self._ignore()
        elif kind == GOAWAY:
            _check(not number)
            _check(len(payload) >= 8, _SIZE)
            self._burden.frames += 1
            self._events.left()
        else:
            _check(kind != PUSH)
            self._ignore()

    def _ignore(self) -> None:
        self._burden.frames += 1

    def _in_pieces(self, kind: int, flags: int, number: int, size: int) -> bool:
        """Start to pass on a large frame in pieces. Return False if the frame must be complete first."""
        if self._block is not None:
            _check(kind == CONTINUATION and number == self._block_of)
        if kind == DATA and not flags & _PADDED and size <= LARGEST_DATA:
            self._take(size)
            self._rest, self._rest_of, self._rest_ends = size, number, bool(flags & END_STREAM)
            if number not in self._open:
                self._rest_of = 0
                self._unwanted(number)
            return True
        if size <= LARGEST_FRAME:
            return False
        _check(kind in (HEADERS, CONTINUATION) and size <= LARGEST_DATA, _SIZE)
        self._lose_frame(kind, flags, number, size)
        return True

    def _go_on(self, piece: memoryview) -> None:
        amount, number = len(piece), self._rest_of
        self._rest -= amount
        self._spent += amount >> _DATA_SHIFT
        if not number:
            return
        if number not in self._open:  # The stream has ended here since the start of the frame.
            self._unwanted(number)
            return
        self._hand_on(number, piece, amount, self._rest_ends and not self._rest)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        amount = len(payload)
        self._take(amount)
        if flags & _PADDED:
            payload = _unpadded(payload)
        if number in self._open:
            self._hand_on(number, payload, amount, bool(flags & END_STREAM))
        else:
            self._unwanted(number)

    def _take(self, amount: int) -> None:
        self._in -= amount
        if self._in < 0:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        if self._settled and self._in < self._most_in // 2:
            self.writer.grant(0, self._most_in - self._in)
            self._in = self._most_in

    def _hand_on(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        if ended:
            self._open.discard(number)
        if not data:
            self._burden.frames += 1
        self._events.received(number, data, amount, ended)

    def _unwanted(self, number: int) -> None:
        """Ignore data on a stream that has ended here or never started. Raises Broken if the client should have known that."""
        _check(number & 1 == 1 and (self._lost or number <= self.last))
        _check(number in self._left or number > self.last, ErrorCode.STREAM_CLOSED)
        self._ignore()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        _check(number & 1 == 1)
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _PRIORITY:
            _check(len(payload) >= 5 and _depends_on(payload) != number)
            payload = payload[5:]
        self._block_of, self._block_ends = number, bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._whole_block(payload)
        else:
            self._block = bytearray(payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        self._ignore()
        if not self._lost:
            block += payload
            if len(block) > self._most_block:
                block.clear()
                self._lose()
        if flags & END_HEADERS:
            self._block = None
            self._whole_block(bytes(block))

    def _whole_block(self, block: bytes) -> None:
        number, ended = self._block_of, self._block_ends
        if self._lost:
            self._unread()
            return
        try:
            head = self._fields.read(block)
        except OversizedHeaderListError:
            self._lose()
            return
        except HPACKError:
            raise Broken(ErrorCode.COMPRESSION_ERROR) from None
        self._spent += head.size
        self._burden.frames += head.size >> 10
        if number <= self.last:
            self._trailers(number, head, ended)
            return
        self.last, windows = number, self.writer.windows
        if not ended:
            self._open.add(number)
        if len(windows) >= self._most or head.malformed:
            self.reset(number, ErrorCode.PROTOCOL_ERROR if len(windows) < self._most else ErrorCode.REFUSED_STREAM)
            self._ignore()
        else:
            windows[number] = 0
            self._events.requested(number, head, ended)

    def _trailers(self, number: int, head: RequestFields, ended: bool) -> None:
        """Treat header fields after the data as the end of a stream. gRPC clients don't send any."""
        if number not in self._open:
            self._unwanted(number)
        elif not ended or head.pseudo or head.misnamed:
            self._fail(number, ErrorCode.PROTOCOL_ERROR)
        else:
            self._hand_on(number, b"", 0, True)

    def _lose(self) -> None:
        """Stop decoding, because a header block is too large and all later blocks are unreadable."""
        number, self._lost = self._block_of, True
        begins, self.last = number > self.last, max(number, self.last)
        self._events.lost(self.last)
        if not begins:
            self._unread()
            return
        if not self._block_ends:
            self._open.add(number)
        self.writer.windows[number] = 0
        self._events.oversized(number, self._block_ends)

    def _lose_frame(self, kind: int, flags: int, number: int, size: int) -> None:
        if kind == HEADERS:
            _check(number & 1 == 1)
            self._block_of, self._block_ends = number, bool(flags & END_STREAM)
        else:
            _check(self._block is not None)
            self._ignore()
        self._rest, self._rest_of = size, 0
        ends = bool(flags & END_HEADERS)
        self._block = None if ends else bytearray()
        if not self._lost:
            self._lose()
        elif ends:
            self._unread()

    def _unread(self) -> None:
        """Treat an unreadable block on an open stream as the end of that stream, and ignore any other block. A client that
        wants to start another stream must open another connection."""
        number = self._block_of
        self._ignore()
        if number in self._open:
            self._hand_on(number, b"", 0, True)

    def _fail(self, number: int, code: ErrorCode) -> None:
        self.reset(number, code)
        self._burden.frames += CANCELLED
        self._events.was_reset(number)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:  # `_check` isn't called here, because this frame is frequent.
            raise Broken(_SIZE)
        if number and not (number & 1 and (self._lost or number <= self.last)):
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        self._burden.frames += 1
        if code := self.writer.widen(number, int.from_bytes(payload, "big") & LARGEST):
            if not number:
                raise Broken(code)
            self._fail(number, code)

    def _reset(self, number: int, payload: bytes) -> None:
        _check(len(payload) == 4, _SIZE)
        _check(number & 1 == 1 and (self._lost or number <= self.last))
        self.writer.windows.pop(number, None)
        self._open.discard(number)
        self._left.pop(number, None)
        self._burden.frames += CANCELLED
        self._events.was_reset(number)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        _check(not number)
        self._burden.frames += 1
        if not flags & ACK:
            _check(len(payload) % 6 == 0, _SIZE)
            _check(len(payload) <= 6 * _MOST_SETTINGS, ErrorCode.ENHANCE_YOUR_CALM)
            self.writer.heed(payload)
            self._events.greeted()
            return
        _check(not payload, _SIZE)
        if not self._settled:
            self._settled = True
            if more := self._most_in - DEFAULT_WINDOW:
                self.writer.grant(0, more)
                self._in += more
            self._events.settled()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        _check(not number)
        _check(len(payload) == 8, _SIZE)
        if flags & ACK:
            self._burden.frames += 1
            self._events.ponged(payload)
        else:
            self.writer.ping(payload, answer=True)
            self._events.pinged()


def _check(holds: bool, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
    if not holds:
        raise Broken(code)


def _depends_on(payload: bytes) -> int:
    return int.from_bytes(payload[:4], "big") & LARGEST


def _unpadded(payload: bytes) -> bytes:
    _check(len(payload) > 0 and payload[0] < len(payload))
    return payload[1 : len(payload) - payload[0]]
