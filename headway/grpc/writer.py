"""Writer of one HTTP/2 connection (RFC 9113): frames out, within the client's windows. It does no I/O and doesn't read the clock.

Frames are collected until `take`. A message that the client has no room for stays with its stream until there is room.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from enum import IntEnum

LIMIT = 10_000  # Burden at which a client is cut off. At half of this, the client is sent a GOAWAY.
RELIEF = 500  # Number of frames that each sweep subtracts from the burden.
CANCELLED = 4  # Number of frames that a cancelled call adds to the burden, and that a frame of an answer subtracts.
LEAST_PING = 9.0  # Pings this many seconds apart are always allowed: gRPC's ten, minus a margin for the network.
_EARLY_PINGS = 2  # Number of more frequent pings in a row that are allowed while nothing is sent to the client.


class Burden:
    """The burden caused by one client. `frames` counts frames that only cost time, minus those that its answers justify."""

    __slots__ = ("_early_pings", "_pinged_at", "frames")

    def __init__(self) -> None:
        self.frames = self._early_pings = 0
        self._pinged_at = -math.inf

    def explain(self, frames: int) -> None:
        """Subtract frames from the burden, and forgive earlier pings, because part of an answer is sent."""
        self.frames -= min(self.frames, frames)
        self._early_pings, self._pinged_at = 0, -math.inf

    def relieve(self) -> None:
        self.frames -= min(self.frames, RELIEF)

    def ping(self, now: float) -> bool:
        """Count a ping at the monotonic time `now`. Return False if the client pings too often."""
        early, self._pinged_at = now < self._pinged_at + LEAST_PING, now
        self._early_pings += early
        return not early or self._early_pings <= _EARLY_PINGS


DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS = 4
FRAME_HEADER = 9
LARGEST = (1 << 31) - 1  # The largest window size, and the largest stream number.
LARGEST_FRAME = 1 << 14  # Maximum payload in bytes, except for received data. More may be allowed, but isn't needed.
DEFAULT_WINDOW = 65_535  # Default window size in bytes of each stream, and of all streams together.

_TABLE, _PUSHES, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADERS = range(1, 7)
_DEFAULT_TABLE = 4096
_NO_TABLE = b"\x20"  # First octet of a header block that doesn't use the table.
_pack_head = struct.Struct(">HBBBI").pack  # Packs a frame's header: length (two parts), type, flags, stream.

_FLUSH = 1 << 17  # Maximum number of bytes of answers in frames that wait for `take`.
_DRIBBLE = 1024  # Size in bytes below which a frame that doesn't end a message is tiny, and doesn't reduce the burden.
_DRIBBLE_BURDEN = 10  # Number of frames that a tiny frame counts as, because it costs as much as a full one.
_PATIENCE = 1000  # Burden above which tiny frames wait for more room, or for the next sweep.


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
    """The client has violated the protocol, and the connection ends."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class Http2Writer:
    """Writer of one connection. Calls `wake` when there are bytes to take, but not again before `take`. `blocked` is the monotonic time
    since which the transport has been full, or 0. `stuck` has the streams whose message waits for room, each with a function that
    sends as much as possible and returns True at the end of the message. `windows` has the streams with unfinished answers,
    each with the number of bytes that may be sent in addition to the client's initial window."""

    __slots__ = (
        "_initial", "_no_table", "_out", "_roomy", "_sweeping", "_unflushed", "_wake", "_waking", "_window", "blocked", "burden", "stuck", "windows",
    )  # fmt: skip

    def __init__(self, burden: Burden, wake: Callable[[], object]) -> None:
        self.burden, self._wake = burden, wake
        self.windows: dict[int, int] = {}
        self.stuck: dict[int, Callable[[], bool]] = {}
        self.blocked = 0.0
        self._window = self._initial = DEFAULT_WINDOW
        self._no_table = False  # True if the next block must say that it uses no table: the client has shrunk it.
        self._out: list[bytes] = []
        self._unflushed = 0
        self._waking = self._sweeping = self._roomy = False
        """If `_roomy`, `take` tries to send the waiting messages of all streams, which would be too slow to do every time."""

    def take(self) -> bytes:
        """Return the bytes to send, including as much of the waiting messages as there is room for."""
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
        if not self._waking:
            self._waking = True
            self._wake()

    def resume(self) -> None:
        self.blocked = 0.0
        self._send_on()

    def _send_on(self) -> None:
        self._roomy = True
        self.flush_soon()

    def pump(self, *, sweep: bool = False) -> None:
        """Send as much of the waiting messages as there is room for. A sweep also sends tiny frames."""
        self._sweeping = sweep
        for number, send in list(self.stuck.items()):
            if self.blocked or self._unflushed >= _FLUSH or self._window <= 0:
                break
            del self.stuck[number]
            if not send():
                self.stuck[number] = send
        self._sweeping = False

    def headers(self, number: int, block: bytes, *, end: bool) -> None:
        """Send a header block. `end` ends the stream."""
        if self._no_table:
            self._no_table, block = False, _NO_TABLE + block
        self._out.append(_frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), number, block))
        if end:
            self.windows.pop(number, None)
        self.burden.explain(CANCELLED)
        self.flush_soon()

    def answer(self, number: int, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole answer: header fields, data and trailers. `room` must allow all of the data."""
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
        """Return how many bytes may be sent on a stream now. Negative if the client has shrunk its window."""
        beyond = self.windows.get(number)
        if beyond is None or self.blocked or self._unflushed >= _FLUSH:
            return 0
        return min(self._initial + beyond, self._window, LARGEST_FRAME)

    def send(self, number: int, data: bytes | memoryview) -> int:
        """Send as much of the data as there is room for. Return the number of bytes sent."""
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
        """Let the client send more bytes on a stream, or on all streams together if the number is 0."""
        self._out.append(_frame(WINDOW_UPDATE, 0, number, amount.to_bytes(4, "big")))
        self.flush_soon()

    def widen(self, number: int, amount: int) -> ErrorCode:
        """Enlarge a stream's window (that of all streams if the number is 0), and continue to send. Return an error code."""
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
        """Send a GOAWAY. `last` is the last stream that is answered."""
        self._out.append(_frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + why))


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return (len(payload) << 48 | kind << 40 | flags << 32 | number).to_bytes(FRAME_HEADER, "big") + payload
