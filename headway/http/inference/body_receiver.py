"""Bodies that do not come at once, apart from the connection that they come on, which only sees them whole.

A large one whose length is known is gathered in one place, where the system writes it, rather than into a buffer that is copied twice.
Its receiver stands between the transport and the connection while it comes. Should it be refused meanwhile, as when its time is over,
the connection lets go of its room, and ends: what still comes is thrown away.
"""

from __future__ import annotations

import asyncio
from typing import cast

from headway.http.server.connection import Connection
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
