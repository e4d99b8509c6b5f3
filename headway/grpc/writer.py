"""Writer of one HTTP/2 connection (RFC 9113): frames out, within the client's windows. It does no I/O and reads no clock.

Frames gather until `take`. Messages that the client has no room for stay with their streams until `take` asks for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

from headway.grpc.burden import CANCELLED, Burden

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS = 4
FRAME_HEADER = 9
"""Bytes of a frame before its payload."""
LARGEST = (1 << 31) - 1
"""Largest window, and largest stream number."""
LARGEST_FRAME = 1 << 14
"""Maximum size in bytes of a frame's payload, except for received data. Clients may allow more, which nobody needs."""
DEFAULT_WINDOW = 65_535
"""Bytes that may be sent ahead on each stream, and on all together, until the other side says otherwise."""

_TABLE, _PUSHES, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADERS = range(1, 7)
"""Numbers of settings."""
_DEFAULT_TABLE = 4096
"""Default size of a table of header fields in bytes."""
_NO_TABLE = b"\x20"
"""Beginning of a block of header fields that says that the table is not used."""
_pack_head = struct.Struct(">HBBBI").pack
"""Pack a frame's header: its length in two parts, type, flags and stream."""

_FLUSH = 1 << 17
"""Bytes of answers to put into frames before they go to the socket."""
_DRIBBLE = 1024
"""Size in bytes of a tiny frame: one with less data that doesn't end a message. It justifies nothing that its client sends."""
_DRIBBLE_BURDEN = 10
"""Number of frames that a tiny frame counts as, because it costs as much as a full one."""
_PATIENCE = 1000
"""Burden from which a tiny frame waits for more room, or for the next sweep."""


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

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


class Http2Writer:
    """Writer of one connection. It calls `wake` when there is something to take, and not again before `take`.

    `blocked` is the monotonic instant since which the transport takes nothing, or 0 while it does. `stuck` has each stream whose
    message waits for room, with a function that sends what there is room for, and returns True at the end of the message.
    `windows` has each stream whose answer hasn't ended, with the bytes that may be sent beyond the client's initial window.
    """

    __slots__ = (
        "_initial", "_no_table", "_out", "_roomy", "_sweeping", "_unflushed", "_wake", "_waking", "_window", "blocked", "burden", "stuck", "windows",
    )  # fmt: skip

    def __init__(self, burden: Burden, wake: Callable[[], object]) -> None:
        self.burden, self._wake = burden, wake
        self.windows: dict[int, int] = {}
        self.stuck: dict[int, Callable[[], bool]] = {}
        self.blocked = 0.0
        self._window = self._initial = DEFAULT_WINDOW
        self._no_table = False
        """True if the next block has to say that the table is not used, because the client has shrunk its own."""
        self._out: list[bytes] = []
        self._unflushed = 0
        self._waking = self._sweeping = self._roomy = False
        """`_roomy`: messages of any stream may use new room. Otherwise a client could have all of them tried by single bytes."""

    def take(self) -> bytes:
        """Return the bytes to send, including what there is room for of waiting messages."""
        if self._roomy:
            self._roomy = False
            self.pump()
        self._waking = False
        data = b"".join(self._out)
        self._out.clear()
        if self._unflushed >= _FLUSH and self.stuck:
            self._send_on()
        self._unflushed = 0
        return data

    def flush_soon(self) -> None:
        """Arrange for `take` to be called soon."""
        if not self._waking:
            self._waking = True
            self._wake()

    def resume(self) -> None:
        """Continue to send, because the transport accepts data again."""
        self.blocked = 0.0
        self._send_on()

    def _send_on(self) -> None:
        self._roomy = True
        self.flush_soon()

    def pump(self, *, sweep: bool = False) -> None:
        """Send what there is room for of waiting messages. In a sweep, send it however little it is."""
        self._sweeping = sweep
        for number, send in list(self.stuck.items()):
            if self.blocked or self._unflushed >= _FLUSH or self._window <= 0:
                break
            del self.stuck[number]
            if not send():
                self.stuck[number] = send
        self._sweeping = False

    def headers(self, number: int, block: bytes, *, end: bool) -> None:
        """Send a block of header fields. If `end`, nothing follows on the stream."""
        if self._no_table:
            self._no_table, block = False, _NO_TABLE + block
        self._out.append(_frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), number, block))
        if end:
            self.windows.pop(number, None)
        self.burden.explain(CANCELLED)
        self.flush_soon()

    def answer(self, number: int, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole answer: header fields, data that there is `room` for, and fields that end the stream."""
        if self._no_table:
            self._no_table, block = False, _NO_TABLE + block
        size = len(data)
        self._window -= size
        self._unflushed += size
        del self.windows[number]
        self._out += (
            _pack_head(len(block) >> 8, len(block) & 0xFF, HEADERS, END_HEADERS, number), block,
            _pack_head(size >> 8, size & 0xFF, DATA, 0, number), data,
            _pack_head(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, END_HEADERS | END_STREAM, number), trailers,
        )  # fmt: skip
        self.burden.explain(3 * CANCELLED)
        self.flush_soon()

    def room(self, number: int) -> int:
        """Return how many bytes of data may be sent on a stream in one frame now; below 0 if the client has shrunk its window."""
        beyond = self.windows.get(number)
        if beyond is None or self.blocked or self._unflushed >= _FLUSH:
            return 0
        return min(self._initial + beyond, self._window, LARGEST_FRAME)

    def send(self, number: int, data: bytes | memoryview) -> int:
        """Send the beginning of data, as far as there is room. Return the number of bytes sent."""
        size = self.room(number)
        if size <= 0:
            return 0
        dribble = size < _DRIBBLE and size < len(data)
        if dribble:
            if self.burden.frames > _PATIENCE and not self._sweeping:
                return 0
            self.burden.frames += _DRIBBLE_BURDEN
        size = min(size, len(data))
        self.windows[number] -= size
        self._window -= size
        self._unflushed += size
        self._out += (_pack_head(size >> 8, size & 0xFF, DATA, 0, number), bytes(data[:size]))
        if not dribble:
            self.burden.explain(CANCELLED)
        self.flush_soon()
        return size

    def reset(self, number: int, code: ErrorCode) -> None:
        self.windows.pop(number, None)
        self._out.append(_frame(RESET, 0, number, code.to_bytes(4, "big")))
        self.flush_soon()

    def grant(self, number: int, amount: int) -> None:
        """Let the client send more bytes on a stream, or on all together if the number is 0."""
        self._out.append(_frame(WINDOW_UPDATE, 0, number, amount.to_bytes(4, "big")))
        self.flush_soon()

    def widen(self, number: int, amount: int) -> ErrorCode:
        """Widen the window of a stream, or of all together if the number is 0, and continue to send. Return the error, if any."""
        if not number:
            self._window += amount
            room = self._window
        elif number in self.windows:
            self.windows[number] += amount
            room = self._initial + self.windows[number]
        else:
            return ErrorCode.NO_ERROR
        if not amount or room > LARGEST:
            return ErrorCode.FLOW_CONTROL_ERROR if amount else ErrorCode.PROTOCOL_ERROR
        if number in self.stuck:
            if self.stuck[number]():
                del self.stuck[number]
        elif not number and self.stuck:
            self._send_on()
        return ErrorCode.NO_ERROR

    def announce(self, *, streams: int, window: int, largest_data: int, most_header: int) -> None:
        settings = (
            (_MAX_STREAMS, streams),
            (_INITIAL_WINDOW, window),
            (_MAX_FRAME, largest_data),
            (_MAX_HEADERS, most_header),
        )
        own = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings)
        self._out.append(_frame(SETTINGS, 0, 0, own))

    def heed(self, settings: bytes) -> None:
        """Apply the client's settings, and acknowledge them. Raises Broken if one is out of range."""
        for at in range(0, len(settings), 6):
            name, value = int.from_bytes(settings[at : at + 2], "big"), int.from_bytes(settings[at + 2 : at + 6], "big")
            if name == _INITIAL_WINDOW:
                if value > LARGEST:
                    raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
                self._initial = value
            elif name == _TABLE:
                self._no_table = self._no_table or value < _DEFAULT_TABLE
            elif (name == _PUSHES and value > 1) or (name == _MAX_FRAME and not LARGEST_FRAME <= value < 1 << 24):
                raise Broken(ErrorCode.PROTOCOL_ERROR)
        if self._initial + max(self.windows.values(), default=0) > LARGEST:
            raise Broken(ErrorCode.FLOW_CONTROL_ERROR)
        self._out.append(_frame(SETTINGS, ACK, 0, b""))
        self._send_on()

    def ping(self, data: bytes, *, answer: bool = False) -> None:
        self._out.append(_frame(PING, ACK if answer else 0, 0, data))

    def leave(self, last: int, code: ErrorCode, why: bytes = b"") -> None:
        """Tell the client to leave. `last` is the last stream that is answered."""
        self._out.append(_frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why))


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return (len(payload) << 48 | kind << 40 | flags << 32 | number).to_bytes(FRAME_HEADER, "big") + payload
