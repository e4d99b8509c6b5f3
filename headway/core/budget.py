"""What several owners share so that the greediest leaves something for the others: connections, or bytes that are on their way.

Dynamic thresholds (Choudhury and Hahne, 1998): an owner may hold at most g times what is free. One owner alone gets
g / (1 + g) of all. Each of n greedy ones gets g / (1 + n · g), and 1 / (1 + n · g) stays free: enough for those who come with
little. So nothing is set aside while nobody is greedy, and there is no share to configure.
"""

from __future__ import annotations

GREED = 9
"""How many times what is free one owner may hold: nine tenths of all, when it is alone."""


class Budget:
    """A number of units, and who holds how many of them.

    Arguments:
        total: units that there are.
        greed: how many times what is free one owner may hold; 0: as many as there are.

    Attributes:
        free: units that nobody holds.
    """

    __slots__ = ("_greed", "_held", "free")

    def __init__(self, total: int, greed: int = GREED) -> None:
        self.free = total
        self._greed = greed
        self._held: dict[str, int] = {}

    def held(self, owner: str) -> int:
        """Units that an owner holds."""
        return self._held.get(owner, 0)

    def take(self, owner: str, amount: int, most: int = 0) -> bool:
        """Let an owner hold more; False, and nothing is taken, when that is more than it may.

        Arguments:
            owner: who. One that holds nothing yet may take the last unit.
            amount: how many units more.
            most: units that it may hold whatever is free; 0 for no such bound.
        """
        held = self._held.get(owner, 0)
        left, wanted = self.free - amount, held + amount
        if left < 0 or (most and wanted > most) or (held and self._greed and wanted > self._greed * left):
            return False
        self.free = left
        self._held[owner] = wanted
        return True

    def give(self, owner: str, amount: int) -> None:
        """Take units back from an owner."""
        held = self._held[owner] - amount
        self.free += amount
        if held:
            self._held[owner] = held
        else:
            del self._held[owner]
