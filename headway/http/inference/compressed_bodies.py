"""Compressed bodies: unpacked bit by bit, at a cost that the largest body bounds, whatever a client sends.

Two kilobytes may unpack to a megabyte and more. So a compressed body waits in the line of the large ones, however short it is, is unpacked
there a little in each turn of the event loop, and counts for its client by what has come out of it.
"""

from __future__ import annotations

import zlib

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.inference.inference_head import CODINGS
from headway.http.server.head import too_large

WINDOWS = dict(zip(CODINGS, (16 + zlib.MAX_WBITS, 16 + zlib.MAX_WBITS, zlib.MAX_WBITS), strict=True))
"""Window of each coding, as zlib takes it."""

STEP = 1 << 17
"""Bytes that are unpacked in one turn of the event loop."""


class Unpacker:
    """Body on its way to what it was before it was compressed.

    Arguments:
        body: compressed body.
        coding: one of WINDOWS.
        settings: settings of the largest body, which counts unpacked, too.

    Attributes:
        size: bytes that have come out of it.
    """

    def __init__(self, body: bytes, coding: str, settings: Settings) -> None:
        self._body, self._coding, self._settings = body, coding, settings
        self._unpacker = zlib.decompressobj(WINDOWS[coding])
        self._at = 0
        self._more = False
        """Whether more may come out without more going in."""
        self._pieces: list[bytes] = []
        self.size = 0

    def step(self) -> bool:
        """Unpack at most STEP bytes. True: all of it is.

        Raises:
            RequestError: the body is not compressed so, or more than the largest body comes out of it.
        """
        unpacker, coding, room = self._unpacker, self._coding, STEP
        while room and not unpacker.eof:
            data = unpacker.unconsumed_tail or self._body[self._at : self._at + STEP]
            if not unpacker.unconsumed_tail:
                self._at += len(data)
            if not data and not self._more:
                raise BadRequest(f"the {coding} body is cut off after {len(self._body)} bytes; send all of it")
            try:
                piece = unpacker.decompress(data, room)
            except zlib.error as exc:
                raise BadRequest(f"the body is not {coding}, as Content-Encoding says: {exc}") from None
            room -= len(piece)
            self._more = not room
            self.size += len(piece)
            self._pieces.append(piece)
            if self.size > self._settings.max_body_bytes:
                raise too_large(self._settings.max_body_bytes)
        if unpacker.eof and (rest := len(unpacker.unused_data) + len(self._body) - self._at):
            raise BadRequest(f"{rest} bytes follow the end of the {coding} body; send one {coding} stream")
        return unpacker.eof

    def whole(self) -> bytes:
        """Body as it was."""
        return b"".join(self._pieces)
