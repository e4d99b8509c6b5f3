"""Bodies that arrive in pieces, are large, or are compressed. `doors/bodies.py` decodes them.

A large body of known length is received directly into its final memory; going through buffers would copy it twice. BodyReceiver becomes
the transport's protocol until the body is complete. If the request is refused earlier, for instance because of a timeout, the memory is
freed, and the rest of the body is read and discarded.

Two kilobytes may decompress to more than a megabyte. So every compressed body is decompressed a little at a time, in turns, and
its decompressed size counts towards its client's quota.
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


class BodyPieces:
    """The pieces of a body received so far."""

    __slots__ = ("_pieces", "_room", "_taken")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._room: bytearray | None = None
        self._taken = 0

    def expect(self, length: int) -> None:
        """Reserve memory for a body of `length` bytes. It only takes up space as it is filled, because the kernel allocates a
        page when it is first written to."""
        self._room = unfilled(length)

    def append(self, piece: bytes | memoryview) -> None:
        if self._room is None:
            self._pieces.append(bytes(piece))
        else:
            end = self._taken + len(piece)
            memoryview(self._room)[self._taken : end] = piece  # Assigning to the bytearray itself would copy twice.
            self._taken = end

    def room(self) -> memoryview | None:
        return None if self._room is None else memoryview(self._room)[self._taken :]

    def fill(self, count: int) -> None:
        self._taken += count

    def take(self) -> bytes:
        """Return the whole body, and drop the reference to it. It may be a bytearray, but nobody changes it."""
        body = b"".join(self._pieces) if self._room is None else cast(bytes, self._room)
        self.clear()
        return body

    def clear(self) -> None:
        self._pieces.clear()
        self._room, self._taken = None, 0


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of a connection's transport while a large body arrives. `pieces` has reserved memory for the body."""

    def __init__(self, connection: Connection, pieces: BodyPieces) -> None:
        self._connection, self._pieces = connection, pieces

    def begin(self) -> None:
        self._receive_by(self)

    def _receive_by(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self._connection.transport
        if not transport.is_closing():
            transport.pause_reading()  # asyncio checks the protocol's type when reading resumes.
            transport.set_protocol(protocol)
            transport.resume_reading()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        return self._pieces.room() or bytearray(_WASTE)

    def buffer_updated(self, nbytes: int) -> None:
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
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


WINDOWS = dict(zip(CODINGS, (16 + zlib.MAX_WBITS, 16 + zlib.MAX_WBITS, zlib.MAX_WBITS), strict=True))

STEP = 1 << 17


class Unpacker:
    """Decompresses a body with one of the CODINGS, a little at a time. `size` is the number of bytes decompressed so far."""

    def __init__(self, body: bytes, coding: str, settings: Settings) -> None:
        self._body, self._coding, self._settings = body, coding, settings
        self._unpacker = zlib.decompressobj(WINDOWS[coding])
        self._at = 0
        self._more = False  # True if zlib may have more output without further input.
        self._pieces: list[bytes] = []
        self.size = 0

    def step(self) -> bool:
        """Decompress up to STEP bytes. Return True once the body is complete. Raises RequestError if it is corrupt or too large."""
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
                raise BadRequest(f"Content-Encoding says {coding}, but the body is not {coding}: {exc}") from None
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
        return b"".join(self._pieces)
