"""Reader of one HTTP answer in any lawful form: in pieces, chunked, ended by closing, after an interim 1xx."""

from __future__ import annotations

import httptools


class AnswerReader:
    """Reader of the bytes of one answer.

    Attributes:
        complete: whether the answer is all there.
        malformed: whether the bytes are no HTTP, so that it will never be complete.
        reusable: whether the connection may carry the next request; set when complete.
        status: HTTP status; set when complete.
        retry_after: whether it has a Retry-After header.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._framed = self._headed = False
        self.complete = self.malformed = self.reusable = self.retry_after = False
        self.status = 0

    @property
    def body(self) -> bytes:
        """The body, as far as it has come."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        """Take the bytes that came next."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # What follows a complete answer spoils the connection, not the answer.
            self.malformed = not self.complete
            self.reusable = False

    def end(self) -> None:
        """The server closed the connection: an answer without a length ends there."""
        if self._headed and not self._framed and not self.malformed:
            self.complete, self.status = True, self._parser.get_status_code()

    def on_message_begin(self) -> None:
        """Httptools': an answer begins."""
        self.reusable = False
        if not self.complete:
            self._pieces.clear()
            self._framed = self.retry_after = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools': one header."""
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lowered == b"retry-after" and not self.complete:
            self.retry_after = True

    def on_headers_complete(self) -> None:
        """Httptools': all headers are there."""
        self._headed = self._parser.get_status_code() >= 200

    def on_body(self, data: bytes) -> None:
        """Httptools': a piece of the body."""
        if not self.complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Httptools': an answer is complete. An interim one does not count, nor does one nobody asked for."""
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            return
        self.complete, self.status = True, status
        self.reusable = self._parser.should_keep_alive()
