"""Pieces of a body that does not come at once. A large one whose length is known is gathered in one place as it comes."""

from __future__ import annotations

from typing import cast

from headway.runtime.memory_reuse import unfilled


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

    def append(self, piece: bytes) -> None:
        """Add the next piece."""
        if self._room is None:
            self._pieces.append(piece)
        else:
            end = self._taken + len(piece)
            self._room[self._taken : end] = piece
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
