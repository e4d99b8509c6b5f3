"""Places of large values in an arena, which is memory that a worker's process and its host share. The owners of the memory ask here
where a value goes, and check the places that the other side names.

One batch at a time has the arena. Its values lie in a row from the start: first the inputs, placed by the host, then the outputs,
placed by the worker. The next batch starts over, so that memory that was touched once is used again. The generation of a place is
the number of its batch, so that a place never refers to another batch's value."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

ALIGNMENT = 64  # Offsets of places are multiples of this number of bytes, which suits arrays of numbers.


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place of one value: `length` bytes from `offset` on, for the batch whose number is `generation`."""

    offset: int
    length: int
    generation: int

    @property
    def end(self) -> int:
        """Offset just after the last byte."""
        return self.offset + self.length


class Allocator:
    """Places of the batch whose number is `generation`, in an arena of `size` bytes."""

    __slots__ = ("_generation", "_size", "used")

    def __init__(self, size: int, generation: int, used: int = 0) -> None:
        self._size, self._generation = size, generation
        self.used = used  # Bytes taken at the beginning of the arena.

    def take(self, length: int) -> Place | None:
        """Return a place for `length` bytes; None if there is no room."""
        offset = -(-self.used // ALIGNMENT) * ALIGNMENT
        if offset + length > self._size:
            return None
        self.used = offset + length
        return Place(offset, length, self._generation)


def sound(places: Iterable[Place], size: int, generation: int, used: int) -> bool:
    """Return True if places are valid: in order, inside the arena behind the `used` bytes, without overlap, and of this batch."""
    for place in places:
        if place.generation != generation or place.length < 0 or not used <= place.offset <= place.end <= size:
            return False
        used = place.end
    return True
