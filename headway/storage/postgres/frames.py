"""Check of a PostgreSQL server's messages, before asyncpg reads them. It cuts a connection that brings nonsense.

A message begins with its kind and its length. asyncpg believes both: a length below zero sends it back to what it has
just read, for ever, and a kind that it does not know is passed over, even if it was the one that told of an error.
"""

from __future__ import annotations

import asyncio
import struct

import asyncpg.protocol

LONGEST = 1 << 30
"""Bytes of the longest message, as the server keeps no longer value."""

_KINDS = frozenset(b"123ACDEGHIKNRSTVWZcdnstv")
"""First bytes of all messages that a server sends (PostgreSQL's documentation, "Message Formats")."""
_HEAD = struct.Struct(">Bi")


class Frames:
    """Messages of one connection, from its first byte on."""

    def __init__(self) -> None:
        self._head = b""
        """Bytes so far of a message's head."""
        self._left = 0
        """Bytes of a message that have not come yet."""

    def make_sense(self, data: bytes) -> bool:
        """Whether new bytes go on as messages do."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                continue
            part = data[at : at + _HEAD.size - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == _HEAD.size:
                kind, length = _HEAD.unpack(self._head)
                if kind not in _KINDS or not 4 <= length <= LONGEST:
                    return False
                self._head, self._left = b"", length - 4
        return True


class CheckedProtocol(asyncpg.protocol.Protocol):  # type: ignore[misc]  # asyncpg has no types.
    """Protocol of asyncpg that reads only well-formed messages."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._frames = Frames()
        self._raw = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        try:
            if self._frames.make_sense(data):
                super().data_received(data)
                return
        except Exception:  # noqa: S110  asyncpg can make nothing of it either.
            pass
        self._raw.abort()
