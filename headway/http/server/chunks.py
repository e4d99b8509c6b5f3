"""Reader of a chunked body: finds content and end, and keeps the wrapping and the work in proportion."""

from __future__ import annotations

import re

import httptools

from headway.errors import HEADERS_TOO_LARGE, BadRequest, RequestError
from headway.http.server.head import END, too_large

_OPENING = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_WRAPPING = 8
"""Bytes on the wire per byte of content that count as honest: a chunk of one byte needs six."""

FREE_PIECES = 2_048
"""Pieces of content that any body may have, however small they are."""
PIECE_BYTES = 64
"""Bytes of content that pay for each further piece. Clients send hundreds in a chunk, and more."""
_CUT_PIECES = 16
"""Pieces that one cut at an empty line costs."""
_STRETCH = 8_192
"""Most bytes that the parser is fed between two looks at the proportions: they may hold a thousand pieces."""


_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")


class Chunks:
    """Reader of one chunked body.

    Arguments:
        most: largest content, in bytes.
        slack: bytes of chunk extensions and trailers allowed beyond the honest wrapping.
    """

    __slots__ = ("_heard", "_most", "_parser", "_raw", "_slack", "_tail")

    def __init__(self, most: int, slack: int) -> None:
        self._most = most
        self._slack = slack
        self._raw = 0
        self._tail = b""
        self._heard = _BodyEvents()
        self._parser = httptools.HttpRequestParser(self._heard)
        self._parser.feed_data(_OPENING)

    @property
    def done(self) -> bool:
        """Whether the body is complete."""
        return self._heard.complete

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take the bytes that came. Returns their content, and the bytes behind the end of the body.

        Raises:
            RequestError: the body is malformed, larger than `most` bytes, wrapped in far more than it contains, or cut
                into far too small pieces.
        """
        # A body can only end behind an empty line: cut there, so that the parser never sees the next request.
        whole, heard = self._tail + data, self._heard
        cut = len(self._tail)
        try:
            while cut < len(whole) and not heard.complete:
                self._check()
                end = min(cut + _STRETCH, len(whole))
                at = whole.find(END, max(cut - 3, 0), end)
                if at >= 0:
                    end = at + len(END)
                    heard.count += _CUT_PIECES
                self._parser.feed_data(whole[cut:end])
                self._raw += end - cut
                cut = end
        except httptools.HttpParserError as exc:
            raise BadRequest(f"the chunked body is malformed: {exc}") from None
        self._check()
        if heard.begun:
            self._check_announced(whole[: cut - heard.begun_with])
        content = b"".join(heard.pieces)
        heard.pieces.clear()
        self._tail = whole[-3:]
        return content, whole[cut:]

    def _check(self) -> None:
        count, size = self._heard.count, self._heard.size
        if size > self._most:
            raise too_large(self._most)
        if self._raw > _WRAPPING * size + self._slack:
            raise RequestError("the body's chunk extensions and trailers are too large", code=HEADERS_TOO_LARGE)
        if count > FREE_PIECES + size // PIECE_BYTES:
            raise BadRequest(
                f"the first {size} bytes of the body are in too many pieces: beyond the first {FREE_PIECES},"
                f" let chunks have {PIECE_BYTES} bytes or more on average, or send a Content-Length"
            )

    def _check_announced(self, head: bytes) -> None:
        """Refuse a chunk that has just begun, by the size with which `head` ends, before what is too much of it has come.

        Of a size that came in several reads only the end is known here, which is less; what comes is counted in any case.
        """
        heard = self._heard
        heard.begun = False
        digits = head[max(head.rfind(b"\n", 0, -2) + 1, 0) :].partition(b";")[0].strip()
        if _SIZE.fullmatch(digits) is not None and heard.size - heard.begun_with + int(digits, 16) > self._most:
            raise too_large(self._most)


class _BodyEvents:
    """Callbacks of the parser. They do not know their Chunks, so that no cycle keeps a body alive.

    Attributes:
        pieces: content that was found since it was taken last.
        size: bytes of content, in all.
        count: the work so far, in pieces.
        complete: whether the body has ended.
        begun: whether the chunk that has begun last goes on, and has not been looked at.
        begun_with: bytes of it that have come.
    """

    __slots__ = ("begun", "begun_with", "complete", "count", "pieces", "size")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.count = 0
        self.complete = self.begun = False
        self.begun_with = 0

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
