"""A body in chunks, as it comes: what is content, where it ends, and that the wrapping stays in proportion."""

from __future__ import annotations

import httptools

from headway.errors import HEADERS_TOO_LARGE, BadRequest, PayloadTooLarge, RequestError
from headway.http.server.head import END

_OPENING = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_WRAPPING = 8
"""Bytes on the wire per byte of content that are taken for honest: a chunk of one byte needs six."""


class Chunks:
    """Unwraps one chunked body.

    Arguments:
        most: largest content, in bytes.
        slack: bytes of chunk extensions and trailers allowed beyond the honest wrapping.
    """

    __slots__ = ("_heard", "_most", "_parser", "_raw", "_size", "_slack", "_tail")

    def __init__(self, most: int, slack: int) -> None:
        self._most = most
        self._slack = slack
        self._raw = 0
        self._size = 0
        self._tail = b""
        self._heard = _Ear()
        self._parser = httptools.HttpRequestParser(self._heard)
        self._parser.feed_data(_OPENING)

    @property
    def done(self) -> bool:
        """The body is complete."""
        return self._heard.complete

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what has come; returns the content in it, and what lies behind the end of the body.

        Raises:
            RequestError: malformed, larger than `most`, or wrapped in far more than it contains.
        """
        # A body can only end behind an empty line: cut there, so that the parser never sees the next request.
        whole = self._tail + data
        cut = len(self._tail)
        try:
            while cut < len(whole) and not self._heard.complete:
                at = whole.find(END, max(cut - 3, 0))
                end = at + len(END) if at >= 0 else len(whole)
                self._parser.feed_data(whole[cut:end])
                self._raw += end - cut
                cut = end
        except httptools.HttpParserError as exc:
            raise BadRequest(f"the chunked body is malformed: {exc}") from None
        content = b"".join(self._heard.pieces)
        self._heard.pieces.clear()
        self._size += len(content)
        self._tail = whole[-3:]
        if self._size > self._most:
            raise PayloadTooLarge(f"the body is larger than {self._most} bytes (max_body_bytes)")
        if self._raw > _WRAPPING * self._size + self._slack:
            raise RequestError("the body's chunk extensions and trailers are too large", code=HEADERS_TOO_LARGE)
        return content, whole[cut:]


class _Ear:
    """What the parser calls; it does not know its Chunks, so that no cycle keeps a body alive."""

    __slots__ = ("complete", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.complete = False

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True
