"""Random inputs that the clients of a crowd send."""

import random
from collections.abc import Callable

from tests.promises.operation import BAD
from tests.promises.ways_in import VECTOR

SEVERAL, MOST = 0.25, 6
"""Share of synchronous requests with new inputs that have several, and the maximum number."""
LARGE_BYTES = 66_000, 100_000
"""Size of a large input: it is stored apart from its entry, but a list of them still fits into a body."""


class Texts:
    """Makes inputs, each with a unique number. `poison` is the share that makes its batch raise, `large` the share that
    is large, and `spread` the maximum number of extra characters in one."""

    def __init__(
        self, rng: random.Random, begin: str, number: Callable[[], int], poison: float, large: float, spread: int = 0
    ) -> None:
        self._rng, self._begin, self._number = rng, begin, number
        self._poison, self._large, self._spread = poison, large, spread

    def some(self, slow: float = 0.04, poison: float | None = None) -> tuple[str, ...]:
        rng = self._rng
        count = rng.randint(2, MOST) if rng.random() < SEVERAL else 1
        kind = VECTOR if rng.random() < 0.1 else "caller"
        poison = (self._poison if poison is None else poison) / count
        words = [self.one(slow / count, poison, place, kind) for place in range(count)]
        return tuple(words[:-1] + words[:1] if count > 2 and rng.random() < 0.1 else words)

    def one(self, slow: float = 0.04, poison: float | None = None, place: int = 0, kind: str = "caller") -> str:
        poison = self._poison if poison is None else poison
        luck, number = self._rng.random(), f"{self._begin}-{self._number()}-{place}"
        tail = "s'il vous plait"
        tail += " x" * (self._rng.randint(0, self._spread) // 2) if self._spread else ""
        if self._large and kind == "caller" and self._rng.random() < self._large:
            tail += " x" * (self._rng.randint(*LARGE_BYTES) // 2)
        if luck < poison:
            return f"{BAD[1]} {number} {tail}"
        slow = slow if kind == "caller" else 0.0
        return f"{'slow' if luck < slow else BAD[0] if luck > 0.98 else kind} {number} {tail}"
