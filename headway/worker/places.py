"""Places of slots: which numbers are free, for one pool, or for several whose models have the same GPUs by turns."""

from __future__ import annotations

from collections.abc import Callable


class Places:
    """Places that pools take slots' numbers from.

    Arguments:
        most: number of places.

    Attributes:
        takers: called in turn when a place has become free, so that whoever waits for one takes it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._free = most, set(range(most))
        self.takers: list[Callable[[], None]] = []

    @property
    def free(self) -> int:
        """Number of free places."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """Number of places that are not free."""
        return self._most - len(self._free)

    def take(self) -> int | None:
        """Take the free place with the lowest number; None where none is free."""
        if not self._free:
            return None
        number = min(self._free)
        self._free.discard(number)
        return number

    def give(self, number: int) -> None:
        """Give a place back."""
        self._free.add(number)
        for take in self.takers:
            take()
