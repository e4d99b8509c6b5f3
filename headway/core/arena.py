"""Places for large values in an arena: memory shared by a worker's process and its host. The side that writes a value allocates
its place here. The other side checks the places that it receives.

The arena holds one batch at a time: the inputs, written by the host, then the outputs, written by the worker. The next batch reuses
the same pages. A place's generation is the number of its batch, so that it is never taken for another batch's place."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

ALIGNMENT = 64  # Places start at multiples of this number of bytes, which suits arrays of numbers.


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place of one value: `length` bytes starting at `offset`, for the batch whose number is `generation`."""

    offset: int
    length: int
    generation: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Allocator:
    """Allocates places in an arena of `size` bytes for the batch whose number is `generation`."""

    __slots__ = ("_generation", "_size", "used")

    def __init__(self, size: int, generation: int, used: int = 0) -> None:
        self._size, self._generation = size, generation
        self.used = used  # Bytes in use at the beginning of the arena.

    def take(self, length: int) -> Place | None:
        """Return a place for `length` bytes, or None if there is no room."""
        offset = -(-self.used // ALIGNMENT) * ALIGNMENT
        if offset + length > self._size:
            return None
        self.used = offset + length
        return Place(offset, length, self._generation)


def sound(places: Iterable[Place], size: int, generation: int, used: int) -> bool:
    """Return True if places are valid: in order, after the `used` bytes, inside the arena, not overlapping, and of this batch."""
    for place in places:
        if place.generation != generation or place.length < 0 or not used <= place.offset <= place.end <= size:
            return False
        used = place.end
    return True
