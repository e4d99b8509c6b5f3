"""Frames of HTTP/2 as a client writes them that means harm: no state is kept, and nothing keeps it from what is forbidden."""

from __future__ import annotations

from collections.abc import Sequence

from headway.grpc.header_blocks import block_of

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGEST = (1 << 31) - 1
_CANCEL = 8

Fields = Sequence[tuple[str, str]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def hello() -> bytes:
    """What a connection begins with; whatever the server sends is let pass, so that it never waits for its client."""
    window = frame(SETTINGS, 0, 0, b"\x00\x04" + _LARGEST.to_bytes(4, "big"))
    return PREFACE + window + frame(WINDOW, 0, 0, (_LARGEST - 65_535).to_bytes(4, "big"))


def stream_of(number: int) -> int:
    """Number of a connection's stream in the order in which they begin."""
    return (2 * number + 1) & _LARGEST


def headers(number: int, method: str, more: Fields = (), *, end: bool = False) -> bytes:
    """Beginning of a gRPC call."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "bench"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_of(number), block_of(fields))


def message(number: int, body: bytes, *, end: bool = True, length: int | None = None) -> bytes:
    """Message of a call, in one frame; `length` is what it says that it has."""
    said = len(body) if length is None else length
    return frame(DATA, END_STREAM if end else 0, stream_of(number), b"\0" + said.to_bytes(4, "big") + body)


def reset(number: int) -> bytes:
    """End of a call that is cancelled."""
    return frame(RESET, 0, stream_of(number), _CANCEL.to_bytes(4, "big"))


def ping() -> bytes:
    """Question whether the other side is there."""
    return frame(PING, 0, 0, b"8 octets")


def settings(number: int) -> bytes:
    """Change of the connection's settings."""
    return frame(SETTINGS, 0, 0, b"\x00\x04" + (65_535 + number % 1000).to_bytes(4, "big"))
