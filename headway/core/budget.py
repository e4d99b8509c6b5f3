"""Budgets that several owners share, such as connections or bytes in flight. The greediest leaves something for the others.

Dynamic thresholds (Choudhury and Hahne, 1998): an owner may hold at most g times what is free. So each of n greedy owners gets g / (1
+ n·g), and 1 / (1 + n·g) stays free for owners that need little. Nothing is reserved, and no share is configured."""

from __future__ import annotations

GREED = 9  # Multiple of the free units that an owner may hold. With 9, a single owner gets nine tenths of the total.


class Budget:
    """A number of units, and how many of them each owner holds. If `greed` is 0, only `total` limits an owner; see GREED."""

    __slots__ = ("_greed", "_used", "free")

    def __init__(self, total: int, greed: int = GREED) -> None:
        self.free = total  # Units that no owner holds.
        self._greed = greed
        self._used: dict[str, int] = {}

    def used(self, owner: str) -> int:
        return self._used.get(owner, 0)

    def take(self, owner: str, amount: int, most: int = 0) -> bool:
        """Take units for an owner. Takes none and returns False if the owner may not hold that many. An owner that holds none may
        take even the last units. If `most` isn't 0, an owner never holds more than that."""
        used = self._used.get(owner, 0)
        left, wanted = self.free - amount, used + amount
        if left < 0 or (most and wanted > most) or (used and self._greed and wanted > self._greed * left):
            return False
        self.free = left
        self._used[owner] = wanted
        return True

    def give(self, owner: str, amount: int) -> None:
        used = self._used[owner] - amount
        self.free += amount
        if used:
            self._used[owner] = used
        else:
            del self._used[owner]
