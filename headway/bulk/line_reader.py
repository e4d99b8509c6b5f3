"""Lines of a file, page by page and of limited length; and sets of their numbers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headway.bulk.folder import BulkFolder

_BOM = b"\xef\xbb\xbf"
"""Mark that some editors put before the first line of UTF-8."""


class LineSplitter:
    """Splitter of pieces of text into lines without their ends. Lines that are too long are cut off.

    Arguments:
        most: length limit in bytes; a longer line is cut one byte beyond it, so that it can be told.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: list[bytes] = []
        """Pieces of the unfinished line."""
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that a piece completes."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest, self._size = [], 0
        if rest and self._size <= self._most:
            self._rest.append(rest)
            self._size += len(rest)
        return [line[: self._most + 1] for line in lines]

    def end(self) -> bytes:
        """Return what follows the last line end."""
        return b"".join(self._rest)[: self._most + 1]


async def pages(folder: BulkFolder, name: str, most: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Yield pages of the lines of a file that aren't blank, with their numbers from 1. Raises FolderUnavailable."""
    splitter, number, mark = LineSplitter(most), 0, _BOM
    async with aclosing(folder.pieces(name)) as pieces:
        async for piece in pieces:
            lines, mark = splitter.feed(piece.removeprefix(mark)), b""
            yield [(at, line) for at, line in enumerate(lines, number + 1) if line and not line.isspace()]
            number += len(lines)
    last = splitter.end()
    if last and not last.isspace():
        yield [(number + 1, last)]


class LineSet:
    """Set of numbers from 0, as a growing bit map."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> bool:
        """Add a number. Returns False if it was there."""
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits += bytes(place - len(self._bits) + 1 + len(self._bits) // 8)
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        return True
