"""Bodies that do not come at once, apart from the connection that they come on, which only sees them whole.

A large one whose length is known is gathered in one place, where the system writes it, rather than into a buffer that is copied twice.
Its receiver stands between the transport and the connection while it comes. Should it be refused meanwhile, as when its time is over,
the connection lets go of its room, and ends: what still comes is thrown away.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import cast

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.inference.inference_head import CODINGS
from headway.http.server.connection import Connection
from headway.http.server.head import too_large
from headway.runtime.memory_reuse import unfilled

_WASTE = 1 << 16
"""Bytes that are read at a time to be thrown away."""


class BodyPieces:
    """Pieces of the body in hand."""

    __slots__ = ("_pieces", "_room", "_taken")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._room: bytearray | None = None
        self._taken = 0

    def expect(self, length: int) -> None:
        """Make room for a body of so many bytes. The system gives memory only as far as it is filled."""
        self._room = unfilled(length)

    def append(self, piece: bytes | memoryview) -> None:
        """Add the next piece."""
        if self._room is None:
            self._pieces.append(bytes(piece))
        else:
            end = self._taken + len(piece)
            memoryview(self._room)[self._taken : end] = piece  # Put into the array itself, it would be copied twice.
            self._taken = end

    def room(self) -> memoryview | None:
        """Room that was made and is not filled yet; None where there is none."""
        return None if self._room is None else memoryview(self._room)[self._taken :]

    def fill(self, count: int) -> None:
        """Take the first bytes of the room for filled."""
        self._taken += count

    def take(self) -> bytes:
        """Return the whole body, and let go of it. Nobody changes what was gathered, so it serves as bytes."""
        body = b"".join(self._pieces) if self._room is None else cast(bytes, self._room)
        self.clear()
        return body

    def clear(self) -> None:
        """Let go of what has come."""
        self._pieces.clear()
        self._room, self._taken = None, 0


class BodyReceiver(asyncio.BufferedProtocol):
    """Protocol of a connection's transport while a large body comes.

    Arguments:
        connection: the connection.
        pieces: pieces of its body, for which there is room.
    """

    def __init__(self, connection: Connection, pieces: BodyPieces) -> None:
        self._connection, self._pieces = connection, pieces

    def begin(self) -> None:
        """Take what comes from the next read on, until the body is complete."""
        self._receive_by(self)

    def _receive_by(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self._connection.transport
        if not transport.is_closing():
            transport.pause_reading()  # It decides how it reads when it begins to.
            transport.set_protocol(protocol)
            transport.resume_reading()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        """Room of the body that is not filled yet."""
        return self._pieces.room() or bytearray(_WASTE)

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was written there."""
        connection = self._connection
        if self._pieces.room() is None:
            connection.drop()
            return
        self._pieces.fill(nbytes)
        reader = connection.reader
        reader.missing -= nbytes
        if not reader.missing:
            reader.open = False
            self._receive_by(connection)
            try:
                if connection.in_hand is not None:
                    connection.in_hand.complete()
            except Exception as exc:
                connection.fault(exc)

    def eof_received(self) -> None:
        """Take the end of what the client sends for its departure."""
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Tell the connection."""
        self._connection.resume_writing()


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
