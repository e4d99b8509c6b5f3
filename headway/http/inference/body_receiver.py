"""Receiver of a large body: the system writes it where it stays, rather than into a buffer that is copied twice.

It stands between the transport and the connection while such a body comes. Should the body be refused meanwhile, as when its time is
over, the connection lets go of its room, and ends: what still comes is thrown away.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.http.inference.fast_path import FastPathConnection

_WASTE = 1 << 16
"""Bytes that are read at a time to be thrown away."""


class BodyReceiver(asyncio.BufferedProtocol):
    """Protocol of a connection's transport while a large body comes.

    Arguments:
        connection: the connection, which has made room for its body.
    """

    def __init__(self, connection: FastPathConnection) -> None:
        self._connection = connection

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
        return self._connection.pieces.room() or bytearray(_WASTE)

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was written there."""
        connection = self._connection
        if connection.pieces.room() is None:
            connection.drop()
            return
        connection.pieces.fill(nbytes)
        connection.missing -= nbytes
        if not connection.missing:
            connection.open = False
            self._receive_by(connection)
            try:
                connection.complete()
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
