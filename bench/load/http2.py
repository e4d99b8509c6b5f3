"""HTTP/2 frames as a hostile client writes them, without state or checks."""

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
    """Return the start of a connection, with windows so large that the server never has to wait."""
    window = frame(SETTINGS, 0, 0, b"\x00\x04" + _LARGEST.to_bytes(4, "big"))
    return PREFACE + window + frame(WINDOW, 0, 0, (_LARGEST - 65_535).to_bytes(4, "big"))


def stream_of(number: int) -> int:
    """Return the stream id of a connection's n-th stream."""
    return (2 * number + 1) & _LARGEST


def headers(number: int, method: str, more: Fields = (), *, end: bool = False) -> bytes:
    """Return the headers frame of a gRPC call."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "bench"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more,
    ]  # fmt: skip
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_of(number), block_of(fields))


def message(number: int, body: bytes, *, end: bool = True, length: int | None = None) -> bytes:
    """Return a data frame with one message. `length` is the length that it claims."""
    claimed = len(body) if length is None else length
    return frame(DATA, END_STREAM if end else 0, stream_of(number), b"\0" + claimed.to_bytes(4, "big") + body)


def reset(number: int) -> bytes:
    """Return the frame that cancels a call."""
    return frame(RESET, 0, stream_of(number), _CANCEL.to_bytes(4, "big"))
