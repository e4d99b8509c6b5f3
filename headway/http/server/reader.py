"""Reader of a connection's requests: bytes in, heads and pieces of bodies out. It does no I/O, and doesn't read the clock.

    receive(bytes) ─▶ read_head() ─▶ expect(length) ─▶ read_body() … until `open` is False ─▶ read_head() …

Each request gets new parsers, so nothing can leak from one request into the next. Bytes that a client sends after a request are
buffered here until the request has been answered.
"""

from __future__ import annotations

import re

import httptools
import msgspec

from headway.errors import HEADERS_TOO_LARGE, BadRequest, RequestError
from headway.http.server.head import END, Head, past_blank, read_head, suspect, too_large, too_long

_OPENING = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_WRAPPING = 8  # Maximum number of bytes on the wire per byte of content. A one-byte chunk needs six.

FREE_PIECES = 2_048  # Number of pieces of any size that a body may have.
PIECE_BYTES = 64  # Minimum average size in bytes of additional pieces. Real clients send hundreds of bytes or more.
_CUT_PIECES = 16  # Number of pieces that a cut at an empty line counts as.
_STRETCH = 8_192  # Number of bytes to feed to the parser between two checks. They may contain a thousand pieces.
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")


class Chunks:
    """Decoder for a chunked body with up to `limit` bytes of content. It limits the overhead on the wire, and the work caused by
    tiny pieces. A body may have `slack` bytes of chunk extensions and trailers."""

    __slots__ = ("_events", "_limit", "_parser", "_raw", "_slack", "_tail")

    def __init__(self, limit: int, slack: int) -> None:
        self._limit = limit
        self._slack = slack
        self._raw = 0
        self._tail = b""
        self._events = _BodyEvents()
        self._parser = httptools.HttpRequestParser(self._events)
        self._parser.feed_data(_OPENING)

    @property
    def done(self) -> bool:
        return self._events.complete

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Decode the next bytes of the body. Return their content, and any bytes after the end of the body. Raises RequestError if
        the body is malformed or too large, or has too much overhead or too many small pieces."""
        # A body ends with an empty line. Cut there, so that the parser never receives the next request.
        whole, events = self._tail + data, self._events
        cut = len(self._tail)
        try:
            while cut < len(whole) and not events.complete:
                self._check()
                end = min(cut + _STRETCH, len(whole))
                at = whole.find(END, max(cut - 3, 0), end)
                if at >= 0:
                    end = at + len(END)
                    events.count += _CUT_PIECES
                self._parser.feed_data(whole[cut:end])
                self._raw += end - cut
                cut = end
        except httptools.HttpParserError as exc:
            raise BadRequest(f"the chunked body is malformed: {exc}") from None
        self._check()
        if events.begun:
            self._check_announced(whole[: cut - events.begun_with])
        content = b"".join(events.pieces)
        events.pieces.clear()
        self._tail = whole[-3:]
        return content, whole[cut:]

    def _check(self) -> None:
        count, size = self._events.count, self._events.size
        if size > self._limit:
            raise too_large(self._limit)
        if self._raw > _WRAPPING * size + self._slack:
            raise RequestError("the body's chunk extensions and trailers are too large", code=HEADERS_TOO_LARGE)
        if count > FREE_PIECES + size // PIECE_BYTES:
            raise BadRequest(
                f"the first {size} bytes of the body are in too many pieces;"
                f" send chunks of {PIECE_BYTES} bytes or more on average, or a Content-Length"
            )

    def _check_announced(self, head: bytes) -> None:
        """Refuse a chunk that announces too large a size. `head` ends with the line that has the size. If the line arrived in
        pieces, its beginning may be missing."""
        events = self._events
        events.begun = False
        digits = head[max(head.rfind(b"\n", 0, -2) + 1, 0) :].partition(b";")[0].strip()
        if _SIZE.fullmatch(digits) is not None and events.size - events.begun_with + int(digits, 16) > self._limit:
            raise too_large(self._limit)


class _BodyEvents(msgspec.Struct, eq=False):
    """Parser callbacks. They don't refer to their Chunks, because such a cycle would keep a body alive.

    `pieces` has the content since the last `feed`. `size` is the total number of bytes. `count` is the number of pieces, plus
    _CUT_PIECES for each cut. `begun` is True while the announced size of the current chunk is unchecked, and `begun_with` is
    how many bytes of that chunk have arrived."""

    pieces: list[bytes] = []
    size: int = 0
    count: int = 0
    complete: bool = False
    begun: bool = False
    begun_with: int = 0

    def on_chunk_header(self) -> None:
        self.begun, self.begun_with = True, 0

    def on_chunk_complete(self) -> None:
        self.begun = False

    def on_body(self, piece: bytes) -> None:
        self.begun_with += len(piece)
        self.pieces.append(piece)
        self.size += len(piece)
        self.count += 1

    def on_message_complete(self) -> None:
        self.complete = True


MOST_BUFFERED = 65_536  # Maximum bytes of data sent ahead of an answer, and of a refused body that is still read.
CHUNKED = -1  # Placeholder for the length of a chunked body.
_END = len(END)


class HttpReader:
    """Reads one connection's requests. A head may have up to `max_header` bytes. `buffer` is read next; `ahead` has the bytes
    that arrived while `buffer` was full. `missing` is the number of unread bytes of the current body, or CHUNKED. `open` is
    True while that body is incomplete."""

    __slots__ = ("_chunks", "_max_header", "_seen", "ahead", "buffer", "missing", "open")

    def __init__(self, max_header: int) -> None:
        self._max_header = max_header
        self._chunks: Chunks | None = None
        self._seen = 0
        self.buffer = b""
        self.ahead: bytearray | None = None
        self.missing = 0
        self.open = False

    @property
    def waiting(self) -> int:
        return len(self.buffer) + (len(self.ahead) if self.ahead else 0)

    def receive(self, data: bytes, answering: bool) -> bool:
        """Buffer received bytes. Return True if they went into `buffer`, or False if they went into `ahead`. The latter happens
        if the buffer is full while the connection is `answering` a request."""
        buffer = self.buffer
        if self.ahead or (len(buffer) > MOST_BUFFERED and answering and not self.open):
            self.ahead = self.ahead or bytearray()
            self.ahead += data
            return False
        self.buffer = buffer + data if buffer else data
        return True

    def refill(self) -> bool:
        ahead = self.ahead
        if not ahead:
            return False
        self.buffer += bytes(ahead[:MOST_BUFFERED])
        del ahead[:MOST_BUFFERED]
        return True

    def read_head(self) -> tuple[Head, bytes] | None:
        """Return the next head and its bytes; None if incomplete. After a RequestError, the connection must close."""
        buffer = self.buffer
        if buffer.startswith(b"\r"):
            buffer = self.buffer = past_blank(buffer)
            if buffer in (b"", b"\r"):
                return None
        end = buffer.find(END, self._seen)
        if end < 0:
            if not buffer:
                return None
            if len(buffer) > self._max_header:
                raise too_long(self._max_header)
            if (error := suspect(buffer, self._seen)) is not None:
                raise error
            self._seen = max(len(buffer) - _END + 1, 0)
            return None
        end += _END
        if end > self._max_header:
            raise too_long(self._max_header)
        self._seen = 0
        self.buffer = buffer[end:]
        raw = buffer[:end]
        return read_head(raw), raw

    def expect(self, length: int, limit: int = 0) -> bool:
        """Prepare to read a body of `length` bytes, or a CHUNKED body of up to `limit` bytes. Return False if it is empty."""
        self.open = length != 0
        self.missing = length
        self._chunks = Chunks(limit, self._max_header) if length < 0 else None
        return self.open

    def read_body(self) -> bytes:
        """Return the next piece of the body, which may be empty. Raises RequestError; see `Chunks.feed`."""
        buffer, chunks = self.buffer, self._chunks
        if chunks is None:
            content, self.buffer = buffer[: self.missing], buffer[self.missing :]
            self.missing -= len(content)
            self.open = self.missing > 0
        else:
            content, self.buffer = chunks.feed(buffer)
            if chunks.done:
                self.open, self._chunks = False, None
        return content

    def drop(self, keep: int = 0) -> None:
        self.buffer, self.ahead = self.buffer[:keep], None

    def close(self) -> None:
        self.drop()
        self.open, self._chunks = False, None
