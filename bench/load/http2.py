"""Frames of HTTP/2 as a hostile client writes them, without any state or check."""

from collections.abc import Sequence

from headway.grpc.header_blocks import block_of

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGEST = (1 << 31) - 1
_CANCEL = 8

Fields = Sequence[tuple[str, str]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def hello() -> bytes:
    """Return the beginning of a connection, which lets all pass that the server sends, so that it never waits."""
    window = frame(SETTINGS, 0, 0, b"\x00\x04" + _LARGEST.to_bytes(4, "big"))
    return PREFACE + window + frame(WINDOW, 0, 0, (_LARGEST - 65_535).to_bytes(4, "big"))


def stream_of(number: int) -> int:
    """Return the number of a connection's stream in the order in which they begin."""
    return (2 * number + 1) & _LARGEST


def headers(number: int, method: str, more: Fields = (), *, end: bool = False) -> bytes:
    """Return the beginning of a gRPC call."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "bench"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_of(number), block_of(fields))


def message(number: int, body: bytes, *, end: bool = True, length: int | None = None) -> bytes:
    """Return a message of a call in a frame; `length` is the one that it claims."""
    claimed = len(body) if length is None else length
    return frame(DATA, END_STREAM if end else 0, stream_of(number), b"\0" + claimed.to_bytes(4, "big") + body)


def reset(number: int) -> bytes:
    """Return the cancellation of a call."""
    return frame(RESET, 0, stream_of(number), _CANCEL.to_bytes(4, "big"))
