"""HTTP/2 bytes that reach the gRPC port in pieces of any size."""

from __future__ import annotations

from typing import Any

from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.reader import PREFACE, Http2Reader
from headway.grpc.writer import Broken, Burden, Http2Writer

_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
_END, _ACK, _WHOLE, _PADDED = 1, 1, 4, 8
_PIECES = 1, 5, 13
"""Sizes of pieces in bytes."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


_HEAD = b"\x83\x86\x84" + block_of((("content-type", "application/grpc"), ("te", "trailers")))
"""Fields of a request to `/`."""
_TABLED = _HEAD + b"\x40\x03x-a\x01b"
"""The same, and one that goes into the client's table."""
_CALL = (
    frame(_HEADERS, _WHOLE, 1, _TABLED)
    + frame(_DATA, 0, 1, b"\0\0\0\0\5hel")
    + frame(_DATA, _END | _PADDED, 1, b"\2lo\0\0")
    + frame(_HEADERS, _WHOLE | _END, 3, _HEAD + b"\xbe")
    + frame(_RESET, 0, 3, b"\0\0\0\x08")
)
FRAMES = (
    PREFACE + frame(_SETTINGS) + _CALL,
    PREFACE + frame(_SETTINGS, 0, 0, b"\0\4\0\0\1\0") + frame(_SETTINGS, _ACK) + _CALL + frame(_PING, 0, 0, b"12345678"),
    PREFACE + frame(_SETTINGS) + frame(_HEADERS, 0, 5, _HEAD[:9]) + frame(_CONTINUATION, _WHOLE, 5, _HEAD[9:]) + frame(_DATA, 0, 5, b"a")
    + frame(_HEADERS, _WHOLE | _END, 5, block_of((("x", "y"),))) + frame(_GOAWAY, 0, 0, b"\0" * 8),
    PREFACE + frame(_SETTINGS) + frame(_HEADERS, _WHOLE, 1, _TABLED + b"\xbe" * 120) + _CALL + frame(_HEADERS, _WHOLE, 7, _HEAD),
)  # fmt: skip
FRAME_WORDS = (
    frame(_DATA), frame(_DATA, _END, 1), frame(_HEADERS, _WHOLE, 7, _HEAD), frame(_HEADERS, 5, 1, _TABLED), frame(_RESET, 0, 1, b"\0" * 4),
    frame(_PING, 0, 0, b"x" * 8), frame(_PING, _ACK, 0, b"x" * 8), frame(_WINDOW, 0, 1, b"\x7f\xff\xff\xff"), frame(_WINDOW, 0, 0, b"\0\0\0\1"),
    frame(_PRIORITY, 0, 3, b"\0\0\0\1\0"), frame(_CONTINUATION, _WHOLE, 1, b"\xbe"), b"\xff\xff\xff", b"\0\0\0", b"\xff" * 9, b"\0" * 9,
    frame(_SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff"), b"\x3f\xe1\x1f", b"\xbe",
)  # fmt: skip


class _Log:
    """Records a connection's events."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.data: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.heard.append((name, *what))

    def requested(self, number: int, head: RequestFields, ended: bool) -> None:
        self.heard.append((number, tuple(head.headers), head.size, head.illegal, ended))

    def received(self, number: int, data: bytes | memoryview, amount: int, ended: bool) -> None:
        """Record data. The parts of a large frame are joined, as their number doesn't matter."""
        name, *what = self.heard[-1] if self.heard else ("",)
        if name == "received" and what[0] == number and not what[3]:
            self.heard.pop()
            data, amount = what[1] + bytes(data), what[2] + amount
        self.heard.append(("received", number, bytes(data), amount, ended))


def check_frames(data: bytes) -> None:
    """Check that events and replies are the same however the bytes are split."""
    known = _read(data, max(1, len(data)))
    assert all(_read(data, size) == known for size in _PIECES)


def _read(data: bytes, size: int) -> tuple[list[tuple[Any, ...]], bytes, str]:
    log = _Log()
    writer = Http2Writer(Burden(), lambda: None)
    reader = Http2Reader(log, writer, streams=10, window=1 << 13, most_header=2048)
    end = ""
    try:
        for begin in range(0, len(data), size):
            piece = data[begin : begin + size]
            while piece:
                piece = piece[reader.receive(piece) :]
    except Broken as broken:
        end = broken.code.name
    assert len(writer.windows) <= 10
    return log.heard, writer.take(), end
