"""Bytes of HTTP/2 as they pass the gRPC port, in pieces of any size."""

from __future__ import annotations

from headway.grpc.frame_tracker import PING, PREFACE, FrameTracker

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _CONTINUATION = 0, 1, 3, 4, 6, 9
_END = 1
_PONG = PING[:4] + b"\1" + PING[5:]
_PIECES = 1, 5, 13
"""Sizes of pieces in bytes."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


_CALL = (
    frame(_HEADERS, 4, 1, b"\x82\x86" * 8)
    + frame(_DATA, _END, 1, b"\0\0\0\0\5hello")
    + frame(_HEADERS, 5, 3, b"\x88")
    + frame(_RESET, 0, 3, b"\0\0\0\x08")
)
FRAMES = (
    bytes(PREFACE) + frame(_SETTINGS) + _CALL,
    frame(_SETTINGS) + frame(_SETTINGS, 1) + _CALL + PING,
    _PONG + frame(_HEADERS, 0, 5) + frame(_CONTINUATION, 4, 5, b"\x82") + frame(_PING, 0, 0, b"12345678") + _CALL,
)
FRAME_WORDS = (
    frame(_DATA), frame(_DATA, _END, 1), frame(_HEADERS, 4, 7), frame(_HEADERS, 5, 1), frame(_RESET, 0, 1, b"\0" * 4), PING, _PONG, PING[:9],
    _PONG[:12], b"\xff\xff\xff", b"\0\0\0", b"\xff" * 9, b"\0" * 9, frame(_PING, 1), frame(_PING, 1, 0, b"x" * 30),
)  # fmt: skip


def check_frames(data: bytes) -> None:
    """What is known of the streams is the same however the bytes come in pieces."""
    for begins in (True, False):
        known = _track(data, begins, max(1, len(data)))
        assert all(_track(data, begins, size) == known for size in _PIECES)


def _track(data: bytes, begins: bool, size: int) -> tuple[set[int], int, bool, bool]:
    streams = set() if begins else {1, 3, 5}
    tracker = FrameTracker(streams, begins)
    for begin in range(0, len(data), size):
        tracker.pass_on(data[begin : begin + size])
    return streams, tracker.last, tracker.whole, tracker.answered
