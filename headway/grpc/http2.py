"""HTTP/2 of a server's connection, without I/O: frames, header blocks and windows. Of the library hpack it has the decoder of header fields.

What comes is told to the connection at once, method by method; what goes is gathered until `take` hands it over.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from hpack.exceptions import HPACKError

from headway.grpc.header_blocks import HeaderReader

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = 9
"""Bytes of a frame before its payload; the first three are the payload's length."""
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_END_STREAM = _ACK = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 0x20
_MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADERS = 3, 4, 5, 6
"""Numbers of settings."""
_DEFAULT_WINDOW = 65_535
_LARGEST = (1 << 31) - 1
_LARGEST_FRAME = 1 << 14
"""Bytes of a frame's payload, both ways; clients may allow more, which nobody needs."""


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
    """What hears of the frames of a connection."""

    def requested(self, number: int, headers: list[tuple[bytes, bytes]], ended: bool) -> None: ...
    def received(self, number: int, data: bytes, amount: int, ended: bool) -> None: ...
    def was_reset(self, number: int) -> None: ...
    def windows_changed(self) -> None: ...
    def settings_changed(self) -> None: ...
    def pinged(self) -> None: ...
    def ponged(self, data: bytes) -> None: ...
    def left(self) -> None: ...
    def burdened(self) -> None: ...


class Http2:
    """HTTP/2 of one connection.

    Arguments:
        sink: hears of what comes.
        streams: most streams at once.
        window: bytes that a client may send ahead on a stream.
        connection_window: bytes that it may send ahead on all of them.
        most_header: most bytes of header fields, as the client is told.
        most_unpacked: bytes of them beyond which the connection ends.

    Attributes:
        last: number of the last stream that has begun.
        windows: bytes that each open stream may still send.
    """

    __slots__ = (
        "_block", "_block_of", "_ends", "_in", "_initial", "_most", "_most_block", "_out", "_part", "_preface", "_reader", "_sink",
        "_window", "last", "windows",
    )  # fmt: skip

    def __init__(
        self, sink: Sink, streams: int, window: int, connection_window: int, most_header: int, most_unpacked: int
    ) -> None:
        self._sink, self._most, self._most_block = sink, streams, most_unpacked
        self._reader = HeaderReader(most_unpacked)
        self._preface = PREFACE
        self._part = b""
        self._block: bytearray | None = None
        self._block_of, self._ends = 0, False
        self.last = 0
        self.windows: dict[int, int] = {}
        self._window = self._initial = _DEFAULT_WINDOW
        self._in = connection_window
        settings = (_MAX_STREAMS, streams), (_INITIAL_WINDOW, window), (_MAX_HEADERS, most_header)
        own = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings)
        more = (connection_window - _DEFAULT_WINDOW).to_bytes(4, "big")
        self._out = [_frame(SETTINGS, 0, 0, own), _frame(WINDOW_UPDATE, 0, 0, more)]

    def take(self) -> bytes:
        """Take what is to be sent."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    # What is sent.

    def headers(self, number: int, block: bytes, *, end: bool) -> None:
        """Send a block of header fields; `end`: nothing follows on the stream."""
        flags = _END_HEADERS | (_END_STREAM if end else 0)
        self._out.append(_frame(HEADERS, flags, number, block))
        if end:
            self.windows.pop(number, None)

    def room(self, number: int) -> int:
        """Bytes that may be sent on a stream in one frame now."""
        return min(self.windows.get(number, 0), self._window, _LARGEST_FRAME)

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
        self._out.append(_frame(RESET, 0, number, code.to_bytes(4, "big")))

    def ping(self, data: bytes) -> None:
        """Ask whether the client is there."""
        self._out.append(_frame(PING, 0, 0, data))

    def leave(self, last: int, code: ErrorCode, why: bytes = b"") -> None:
        """Tell the client to leave."""
        self._out.append(_frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why))

    # What comes.

    def receive(self, data: bytes) -> None:
        """Read what has come.

        Raises:
            Broken: the client has broken the protocol.
        """
        if self._preface:
            begin = min(len(self._preface), len(data))
            if data[:begin] != self._preface[:begin]:
                raise Broken(ErrorCode.PROTOCOL_ERROR)
            self._preface, data = self._preface[begin:], data[begin:]
        if self._part:
            data = self._part + data
        at, length = 0, len(data)
        while at + FRAME_HEADER <= length:
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if size > _LARGEST_FRAME:
                raise Broken(ErrorCode.FRAME_SIZE_ERROR)
            end = at + FRAME_HEADER + size
            if end > length:
                break
            number = int.from_bytes(data[at + 5 : at + 9], "big") & _LARGEST
            self._frame(data[at + 3], data[at + 4], number, data[at + FRAME_HEADER : end])
            at = end
        self._part = data[at:]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block_of):
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RESET:
            self._reset(number, payload)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == PING:
            _check(not number and len(payload) == 8)
            if flags & _ACK:
                self._sink.ponged(payload)
            else:
                self._out.append(_frame(PING, _ACK, 0, payload))
                self._sink.pinged()
        elif kind == GOAWAY:
            self._sink.left()
        elif kind == PUSH:
            raise Broken(ErrorCode.PROTOCOL_ERROR)
        else:
            self._sink.burdened()

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        amount = len(payload)
        _check(0 < number <= self.last)
        self._in -= amount
        if self._in < 0:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        if flags & _PADDED:
            payload = _unpadded(payload)
        self._sink.received(number, payload, amount, bool(flags & _END_STREAM))

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _PRIORITY:
            _check(len(payload) >= 5)
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
        block += payload
        if len(block) > self._most_block:
            raise Broken(ErrorCode.ENHANCE_YOUR_CALM)
        self._sink.burdened()
        if flags & _END_HEADERS:
            self._block = None
            self._whole_block(bytes(block))

    def _whole_block(self, block: bytes) -> None:
        number = self._block_of
        try:
            headers = self._reader.decode(block, raw=True)
        except HPACKError:
            raise Broken(ErrorCode.COMPRESSION_ERROR) from None
        if number <= self.last:  # Trailing fields, of which gRPC's clients send none.
            _check(self._ends)
            self._sink.received(number, b"", 0, True)
            return
        _check(number & 1 == 1)
        self.last = number
        if len(self.windows) >= self._most:
            self.reset(number, ErrorCode.REFUSED_STREAM)
            return
        self.windows[number] = self._initial
        self._sink.requested(number, headers, self._ends)

    def _window_update(self, number: int, payload: bytes) -> None:
        _check(len(payload) == 4)
        amount = int.from_bytes(payload, "big") & _LARGEST
        _check(amount > 0)
        if not number:
            self._window += amount
            _check(self._window <= _LARGEST)
        else:
            _check(number <= self.last)
            if number in self.windows:
                self.windows[number] += amount
                _check(self.windows[number] <= _LARGEST)
        self._sink.windows_changed()

    def _reset(self, number: int, payload: bytes) -> None:
        _check(0 < number <= self.last and len(payload) == 4)
        self.windows.pop(number, None)
        self._sink.was_reset(number)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        _check(not number)
        if flags & _ACK:
            return
        _check(len(payload) % 6 == 0)
        for at in range(0, len(payload), 6):
            name, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == _INITIAL_WINDOW:
                _check(value <= _LARGEST)
                more, self._initial = value - self._initial, value
                for stream in self.windows:
                    self.windows[stream] += more
        self._out.append(_frame(SETTINGS, _ACK, 0, b""))
        self._sink.settings_changed()


def _check(holds: bool) -> None:
    if not holds:
        raise Broken(ErrorCode.PROTOCOL_ERROR)


def _unpadded(payload: bytes) -> bytes:
    _check(len(payload) > 0 and payload[0] < len(payload))
    return payload[1 : len(payload) - payload[0]]


def _head(size: int, kind: int, flags: int, number: int) -> bytes:
    return (size << 48 | kind << 40 | flags << 32 | number).to_bytes(FRAME_HEADER, "big")


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return _head(len(payload), kind, flags, number) + payload
