"""Lines of a file, page by page, none of them larger than is asked for; and sets of their numbers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headway.bulk.folder import BulkFolder

_BOM = b"\xef\xbb\xbf"
"""Mark that some editors put before the first line of UTF-8."""


class LineSplitter:
    """Splitter of what is fed bit by bit into lines without their ends. Of a line that is too long the rest is dropped.

    Arguments:
        most: bytes of the longest line; of a longer one, one byte more is given, by which it is known.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: list[bytes] = []
        """Pieces of the line that has no end yet."""
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Lines that are complete by now."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest, self._size = [], 0
        if rest and self._size <= self._most:
            self._rest.append(rest)
            self._size += len(rest)
        return [line[: self._most + 1] for line in lines]

    def end(self) -> bytes:
        """Last line, which has no end; empty where there is none."""
        return b"".join(self._rest)[: self._most + 1]


async def pages(folder: BulkFolder, name: str, most: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Lines of a file that are not blank, with their numbers from 1, some at a time. Raises FolderUnavailable."""
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
    """Set of numbers from 0, which grows as it has to."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> bool:
        """Add a number; False when it is there already."""
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits += bytes(place - len(self._bits) + 1 + len(self._bits) // 8)
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        return True
