"""HTTP/2 of a server's connection, without I/O: frames, header blocks and windows (RFC 9113).

What comes is told to the connection at once, method by method. What goes is gathered until `take` hands it over. The library hpack
decodes header fields. An error of one stream that a heedful client never makes ends the connection, as the RFC allows.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

from hpack.exceptions import HPACKError, OversizedHeaderListError

from headway.grpc.header_blocks import HeaderReader, RequestFields

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = 9
"""Bytes of a frame before its payload; the first three are the payload's length."""
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_END_STREAM = _ACK = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 0x20
_TABLE, _PUSHES, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADERS = range(1, 7)
"""Numbers of settings."""
_DEFAULT_TABLE = 4096
"""Bytes of a table of header fields."""
_NO_TABLE = b"\x20"
"""Beginning of a block of header fields that says that no table is used."""
DEFAULT_WINDOW = 65_535
"""Bytes that a client may send ahead on each stream until it has read what it is told."""
_LARGEST = (1 << 31) - 1
_FRAME_HEAD = struct.Struct(">HBBBI")
"""Header of a frame: the length in two parts, type, flags, and stream."""
_read_head, _write_head = _FRAME_HEAD.unpack_from, _FRAME_HEAD.pack
_LARGEST_FRAME = 1 << 14
"""Most bytes of a frame's payload, but for data that come; clients may allow more, which nobody needs."""
LARGEST_DATA = 1 << 20
"""Most bytes of the payload of a frame with data that comes. Each frame takes time, however much it brings."""
_IN_PIECES = 1 << 10
"""Bytes of the payload of a frame with data above which it is handed on as it comes, so that nothing is put together twice."""
_MOST_SETTINGS = 32
"""Most settings in one frame; there are seven."""
_READ_AT_ONCE = 4096
"""Bytes of frames, or of header fields once they are unpacked, behind which `receive` stops. Data count less, as they are only copied."""
_DATA_SHIFT = 4


class ErrorCode(IntEnum):
    """Reasons of the end of a stream or a connection."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Broken(Exception):
    """The client has broken the protocol, and the connection ends."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class Sink(Protocol):
    """Listener of a connection's frames."""

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        """A stream has begun; `ended`: its client sends nothing further on it."""

    def oversized(self, number: int, ended: bool) -> None:
        """A stream has begun with more header fields than are read."""

    def lost(self) -> None:
        """More header fields have come than are read. From now on no stream begins."""

    def received(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        """Data have come on an open stream; `amount` is what they take of its window, with their padding. A view is good for now only."""

    def ignored(self, amount: int) -> None:
        """A frame has come that brings nothing; it takes `amount` of the connection's window."""

    def was_reset(self, number: int) -> None:
        """A stream has ended, by its client or for an error of it."""

    def windows_changed(self, number: int) -> None:
        """More may be sent on a stream; 0: on all of them."""

    def unpacked(self, size: int) -> None:
        """Header fields of so many bytes were unpacked, of a stream that begins or of another."""

    def settings_changed(self) -> None:
        """The client has told its settings."""

    def settings_read(self) -> None:
        """The client has read ours, and heeds them."""

    def pinged(self) -> None:
        """The client asks whether somebody is there; it is answered."""

    def ponged(self, data: bytes) -> None:
        """The client has answered a ping."""

    def left(self) -> None:
        """The client begins no further streams."""


class Http2:
    """HTTP/2 of one connection.

    Arguments:
        sink: hears of what comes.
        streams: most streams at once.
        window: bytes that a client may send ahead on a stream, once it has read so.
        most_header: most bytes of a request's header fields, as the client is told. What is unpacked of a block ends at twice as many.
            The decoder then knows the connection's table no more, so no further stream can begin.

    Attributes:
        last: number of the last stream that has begun.
        windows: bytes that may be sent beyond the client's initial window on each stream whose answer has not ended.
    """

    __slots__ = (
        "_begun", "_block", "_block_of", "_ends", "_in", "_initial", "_left", "_lost", "_most", "_most_block", "_no_table", "_open", "_out", "_part",
        "_reader", "_rest", "_rest_ends", "_rest_of", "_sink", "_spent", "_window", "last", "windows",
    )  # fmt: skip

    def __init__(self, sink: Sink, streams: int, window: int, most_header: int) -> None:
        self._sink, self._most, self._most_block = sink, streams, 2 * most_header
        self._reader = HeaderReader(self._most_block)
        self._lost = False
        """Whether the decoder has lost the connection's table."""
        self._begun = False
        """Whether the preface has come."""
        self._part = b""
        self._rest, self._rest_of, self._rest_ends = 0, 0, False
        """Bytes that are still to come of a frame which is handed on as it comes, its stream, and whether it ends that; stream 0: nobody wants it."""
        self._spent = 0
        """Bytes that count for the time since `receive` was called."""
        self._block: bytearray | None = None
        self._block_of, self._ends = 0, False
        self.last = 0
        self.windows: dict[int, int] = {}
        self._open: set[int] = set()
        """Streams on which the client may send."""
        self._left: dict[int, None] = {}
        """Streams that ended here while the client sent, the latest `streams` of them: what is on its way on them is let pass."""
        self._window = self._initial = DEFAULT_WINDOW
        self._no_table = False
        """Whether the client has to be told that no table is used, as it has made its own smaller."""
        self._in = DEFAULT_WINDOW
        settings = (
            (_MAX_STREAMS, streams),
            (_INITIAL_WINDOW, window),
            (_MAX_FRAME, LARGEST_DATA),
            (_MAX_HEADERS, most_header),
        )
        own = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings)
        self._out = [_frame(SETTINGS, 0, 0, own)]

    def take(self) -> bytes:
        """Take what is to be sent."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    # What is sent.

    def headers(self, number: int, block: bytes, *, end: bool) -> None:
        """Send a block of header fields; `end`: nothing follows on the stream."""
        flags = _END_HEADERS | (_END_STREAM if end else 0)
        if self._no_table:
            self._no_table, block = False, _NO_TABLE + block
        self._out.append(_frame(HEADERS, flags, number, block))
        if end:
            self.windows.pop(number, None)

    def answer(self, number: int, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a block of header fields, data for which there is room, and a block that ends the stream."""
        if self._no_table:
            self._no_table, block = False, _NO_TABLE + block
        size = len(data)
        self._window -= size
        del self.windows[number]
        self._out += (
            _write_head(len(block) >> 8, len(block) & 0xFF, HEADERS, _END_HEADERS, number), block,
            _write_head(size >> 8, size & 0xFF, DATA, 0, number), data,
            _write_head(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, _END_HEADERS | _END_STREAM, number), trailers,
        )  # fmt: skip

    @property
    def has_room(self) -> bool:
        """Whether anything may be sent on all streams together."""
        return self._window > 0

    def room(self, number: int) -> int:
        """Bytes that may be sent on a stream in one frame now."""
        beyond = self.windows.get(number)
        return 0 if beyond is None else min(self._initial + beyond, self._window, _LARGEST_FRAME)

    def data(self, number: int, data: bytes | memoryview) -> None:
        """Send data for which there is room."""
        size = len(data)
        self.windows[number] -= size
        self._window -= size
        self._out += (_head(size, DATA, 0, number), bytes(data))

    def grant(self, number: int, amount: int) -> None:
        """Let the client send so many bytes more on a stream; 0: on all of them."""
        if not number:
            self._in += amount
        self._out.append(_frame(WINDOW_UPDATE, 0, number, amount.to_bytes(4, "big")))

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream."""
        self.windows.pop(number, None)
        if number in self._open:
            self._open.discard(number)
            self._let_pass(number)
        self._out.append(_frame(RESET, 0, number, code.to_bytes(4, "big")))

    def ping(self, data: bytes) -> None:
        """Ask whether the client is there."""
        self._out.append(_frame(PING, 0, 0, data))

    def leave(self, last: int, code: ErrorCode, why: bytes = b"") -> None:
        """Tell the client to leave."""
        self._out.append(_frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why))

    # What comes.

    def receive(self, data: bytes, begin: int = 0) -> int:
        """Read what has come, from a place on, up to the end of a frame behind which the caller is to look at the time.

        Returns the number of bytes that are read.

        Raises:
            Broken: the client has broken the protocol.
        """
        part, self._spent = len(self._part), 0
        if part:
            data, begin = self._part + data[begin:], 0
            self._part = b""
        at, length = begin, len(data)
        if not self._begun:
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
            most, least, kind, flags, number = _read_head(data, at)
            size, number, body = most << 8 | least, number & _LARGEST, at + FRAME_HEADER
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
        """Whether the preface has come, and that settings follow it."""
        size = len(PREFACE)
        kind = data[size + 3 : size + 4]
        _check(data[:size] == PREFACE[: len(data)] and kind in (b"", bytes((SETTINGS,))))
        self._begun = bool(kind)
        return self._begun

    def _in_pieces(self, kind: int, flags: int, number: int, size: int) -> bool:
        """Begin with a large frame that is handed on as it comes; False: it is to be there whole."""
        if self._block is not None and (kind != CONTINUATION or number != self._block_of):
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        if kind == DATA and not flags & _PADDED and size <= LARGEST_DATA:
            self._in -= size
            if self._in < 0:
                raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
            self._rest, self._rest_of, self._rest_ends = size, number, bool(flags & _END_STREAM)
            if number not in self._open:
                self._rest_of = 0
                self._unwanted(number, size)
            return True
        if size <= _LARGEST_FRAME:
            return False
        if kind not in (HEADERS, CONTINUATION) or size > LARGEST_DATA:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR)
        self._lose_frame(kind, flags, number, size)
        return True

    def _go_on(self, piece: memoryview) -> None:
        """Hand on more of a frame that is handed on as it comes."""
        amount, number = len(piece), self._rest_of
        self._rest -= amount
        self._spent += amount >> _DATA_SHIFT
        if not number:
            return
        if number not in self._open:  # It has ended here meanwhile.
            self._unwanted(number, amount)
            return
        ended = self._rest_ends and not self._rest
        if ended:
            self._open.discard(number)
        self._sink.received(number, piece, amount, ended)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block_of):
            raise Broken(ErrorCode.PROTOCOL_ERROR)
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
        elif kind == PRIORITY:
            self._priority(number, payload)
        elif kind == GOAWAY:
            _check(not number)
            _check_size(len(payload) >= 8)
            self._sink.left()
        elif kind == PUSH:
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        else:
            self._sink.ignored(0)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        amount = len(payload)
        self._in -= amount
        if self._in < 0:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        if flags & _PADDED:
            payload = _unpadded(payload)
        if number not in self._open:
            self._unwanted(number, amount)
            return
        ended = bool(flags & _END_STREAM)
        if ended:
            self._open.discard(number)
        self._sink.received(number, payload, amount, ended)

    def _unwanted(self, number: int, amount: int) -> None:
        """Let what came on a stream pass if its client could not know that it has ended, or never begins."""
        _check(number & 1 == 1 and (self._lost or number <= self.last))
        if number not in self._left and number <= self.last:
            raise Broken(ErrorCode.STREAM_CLOSED)
        self._sink.ignored(amount)

    def _let_pass(self, number: int) -> None:
        self._left[number] = None
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        _check(number & 1 == 1)
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _PRIORITY:
            _check(len(payload) >= 5 and _depends_on(payload) != number)
            payload = payload[5:]
        self._block_of, self._ends = number, bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            self._whole_block(payload)
        else:
            self._block = bytearray(payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        self._sink.ignored(0)
        if not self._lost:
            block += payload
            if len(block) > self._most_block:
                block.clear()
                self._lose()
        if flags & _END_HEADERS:
            self._block = None
            self._whole_block(bytes(block))

    def _whole_block(self, block: bytes) -> None:
        number, ended = self._block_of, self._ends
        if self._lost:
            self._unread()
            return
        try:
            head = self._reader.read(block)
        except OversizedHeaderListError:
            self._lose()
            return
        except HPACKError:
            raise Broken(ErrorCode.COMPRESSION_ERROR) from None
        self._spent += head.size
        self._sink.unpacked(head.size)
        if number <= self.last:
            self._trailers(number, head, ended)
            return
        self.last = number
        if not ended:
            self._open.add(number)
        if len(self.windows) >= self._most:
            self.reset(number, ErrorCode.REFUSED_STREAM)
            self._sink.ignored(0)
        elif head.malformed:
            self.reset(number, ErrorCode.PROTOCOL_ERROR)
            self._sink.ignored(0)
        else:
            self.windows[number] = 0
            self._sink.requested(number, head, ended)

    def _lose(self) -> None:
        """Read no more of a block that is too large, nor of any that comes after it."""
        number, self._lost = self._block_of, True
        begins, self.last = number > self.last, max(number, self.last)
        self._sink.lost()
        if not begins:
            self._unread()
            return
        if not self._ends:
            self._open.add(number)
        self.windows[number] = 0
        self._sink.oversized(number, self._ends)

    def _lose_frame(self, kind: int, flags: int, number: int, size: int) -> None:
        """Read no header fields from now on, as a frame with some is larger than all that a client may send."""
        if kind == HEADERS:
            _check(number & 1 == 1)
            self._block_of, self._ends = number, bool(flags & _END_STREAM)
        else:
            _check(self._block is not None)
            self._sink.ignored(0)
        self._rest, self._rest_of = size, 0
        ends = bool(flags & _END_HEADERS)
        self._block = None if ends else bytearray()
        if not self._lost:
            self._lose()
        elif ends:
            self._unread()

    def _unread(self) -> None:
        """Let a block pass that cannot be read: of a stream that the client begins elsewhere, or behind the data of one."""
        number = self._block_of
        self._sink.ignored(0)
        if number in self._open:
            self._open.discard(number)
            self._sink.received(number, b"", 0, True)

    def _trailers(self, number: int, head: RequestFields, ended: bool) -> None:
        """Take fields behind the data as the end of a stream; gRPC's clients send none."""
        if number not in self._open:
            self._unwanted(number, 0)
        elif not ended or head.pseudo or head.misnamed:
            self._fail(number, ErrorCode.PROTOCOL_ERROR)
        else:
            self._open.discard(number)
            self._sink.received(number, b"", 0, True)

    def _fail(self, number: int, code: ErrorCode) -> None:
        """End a stream for an error of its client."""
        self.reset(number, code)
        self._sink.was_reset(number)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Broken(ErrorCode.FRAME_SIZE_ERROR)
        amount = int.from_bytes(payload, "big") & _LARGEST
        if not number:
            _check(amount > 0)
            self._window += amount
            if self._window > _LARGEST:
                raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        else:
            if not number & 1 or (number > self.last and not self._lost):
                raise Broken(ErrorCode.PROTOCOL_ERROR)
            if number in self.windows:
                self.windows[number] += amount
                if not amount or self._initial + self.windows[number] > _LARGEST:
                    self._fail(number, ErrorCode.FLOW_CONTROL_ERROR if amount else ErrorCode.PROTOCOL_ERROR)
        self._sink.windows_changed(number)

    def _reset(self, number: int, payload: bytes) -> None:
        _check_size(len(payload) == 4)
        _check(number & 1 == 1 and (self._lost or number <= self.last))
        self.windows.pop(number, None)
        self._open.discard(number)
        self._left.pop(number, None)
        self._sink.was_reset(number)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        _check(not number)
        if flags & _ACK:
            _check_size(not payload)
            self._sink.settings_read()
            return
        _check_size(len(payload) % 6 == 0)
        if len(payload) > 6 * _MOST_SETTINGS:
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM)
        for at in range(0, len(payload), 6):
            self._set(int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big"))
        if self._initial + max(self.windows.values(), default=0) > _LARGEST:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        self._out.append(_frame(SETTINGS, _ACK, 0, b""))
        self._sink.settings_changed()

    def _set(self, name: int, value: int) -> None:
        if name == _INITIAL_WINDOW:
            if value > _LARGEST:
                raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
            self._initial = value
        elif name == _TABLE:
            self._no_table = self._no_table or value < _DEFAULT_TABLE
        elif name == _PUSHES:
            _check(value <= 1)
        elif name == _MAX_FRAME:
            _check(_LARGEST_FRAME <= value < 1 << 24)

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        _check(not number)
        _check_size(len(payload) == 8)
        if flags & _ACK:
            self._sink.ponged(payload)
        else:
            self._out.append(_frame(PING, _ACK, 0, payload))
            self._sink.pinged()

    def _priority(self, number: int, payload: bytes) -> None:
        """Let a wish for another order pass; RFC 9113 has left them out."""
        _check(number > 0)
        _check_size(len(payload) == 5)
        _check(_depends_on(payload) != number)
        self._sink.ignored(0)


def _check(holds: bool) -> None:
    if not holds:
        raise Broken(ErrorCode.PROTOCOL_ERROR)


def _check_size(holds: bool) -> None:
    if not holds:
        raise Broken(ErrorCode.FRAME_SIZE_ERROR)


def _depends_on(payload: bytes) -> int:
    """Number of the stream on which a priority depends."""
    return int.from_bytes(payload[:4], "big") & _LARGEST


def _unpadded(payload: bytes) -> bytes:
    _check(len(payload) > 0 and payload[0] < len(payload))
    return payload[1 : len(payload) - payload[0]]


def _head(size: int, kind: int, flags: int, number: int) -> bytes:
    return (size << 48 | kind << 40 | flags << 32 | number).to_bytes(FRAME_HEADER, "big")


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return _head(len(payload), kind, flags, number) + payload
