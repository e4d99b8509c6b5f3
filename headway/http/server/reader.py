"""Reader of one connection's requests: bytes in, heads and pieces of bodies out. It does no I/O and knows no clock.

    receive(bytes) ─▶ read_head() ─▶ expect(its body) ─▶ read_body() … until `open` is False ─▶ read_head() …

A head is parsed when it is complete, a counted body is only counted, a chunked one is unwrapped. No parser lives longer than one
request, so nothing of a request can reach into the next. What a client sends beyond a request stays here until that is answered.
"""

from __future__ import annotations

from headway.http.server.chunks import Chunks
from headway.http.server.head import END, Head, past_blank, read_head, suspect, too_long

MOST_BUFFERED = 65_536
"""Bytes a client may send ahead of its answers; also the most of a refused body that is read to keep a connection."""
CHUNKED = -1
"""Length of a body whose length is not announced."""
_END = len(END)


class HttpReader:
    """Reader of the requests of one connection.

    Arguments:
        most_header: most bytes of a head.

    Attributes:
        ahead: bytes that came when `buffer` was full.
        buffer: bytes that are read next.
        missing: bytes of the body in hand that have not been read; CHUNKED where nobody knows.
        open: whether more of that body is to come.
    """

    __slots__ = ("_chunks", "_most_header", "_seen", "ahead", "buffer", "missing", "open")

    def __init__(self, most_header: int) -> None:
        self._most_header = most_header
        self._chunks: Chunks | None = None
        self._seen = 0
        self.buffer = b""
        self.ahead: bytearray | None = None
        self.missing = 0
        self.open = False

    @property
    def waiting(self) -> int:
        """Number of bytes that have come and are not read yet."""
        return len(self.buffer) + (len(self.ahead) if self.ahead else 0)

    def receive(self, data: bytes, answering: bool) -> bool:
        """Take what has come. False: it is kept for later, beyond a full buffer.

        Arguments:
            data: the bytes.
            answering: whether a request is being answered, so that no head is read.
        """
        buffer = self.buffer
        if self.ahead or (len(buffer) > MOST_BUFFERED and answering and not self.open):
            self.ahead = self.ahead or bytearray()
            self.ahead += data
            return False
        self.buffer = buffer + data if buffer else data
        return True

    def refill(self) -> bool:
        """Move some of the bytes far ahead to the buffer; False when there are none."""
        ahead = self.ahead
        if not ahead:
            return False
        self.buffer += bytes(ahead[:MOST_BUFFERED])
        del ahead[:MOST_BUFFERED]
        return True

    def read_head(self) -> tuple[Head, bytes] | None:
        """Read the next request's head. Returns it, and the bytes it came as; None while it is not complete.

        Raises:
            RequestError: it is malformed, ambiguous or too long, or will be; nothing more can be read.
        """
        buffer = self.buffer
        if buffer.startswith(b"\r"):
            buffer = self.buffer = past_blank(buffer)
            if buffer in (b"", b"\r"):
                return None
        end = buffer.find(END, self._seen)
        if end < 0:
            if not buffer:
                return None
            if len(buffer) > self._most_header:
                raise too_long(self._most_header)
            if (why := suspect(buffer, self._seen)) is not None:
                raise why
            self._seen = max(len(buffer) - _END + 1, 0)
            return None
        end += _END
        if end > self._most_header:
            raise too_long(self._most_header)
        self._seen = 0
        self.buffer = buffer[end:]
        raw = buffer[:end]
        return read_head(raw), raw

    def expect(self, length: int, most: int = 0) -> bool:
        """Prepare for the body that a head announces; False when it has none.

        Arguments:
            length: its bytes, or CHUNKED.
            most: most bytes of a chunked one.
        """
        self.open = length != 0
        self.missing = length
        self._chunks = Chunks(most, self._most_header) if length < 0 else None
        return self.open

    def read_body(self) -> bytes:
        """Read the next piece of the body, which may be empty.

        Raises:
            RequestError: it is malformed, too large, or in too many pieces.
        """
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
        """Drop all that has come, but for the first `keep` bytes."""
        self.buffer, self.ahead = self.buffer[:keep], None

    def close(self) -> None:
        """Drop all that has come, and the body in hand."""
        self.drop()
        self.open, self._chunks = False, None
