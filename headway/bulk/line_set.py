"""Set of numbers of lines: a bit for each."""

from __future__ import annotations


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
