"""Dead letters of one process, in memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headway.core.retention import KeptLimits, Retention
from headway.model import DeadLetter
from headway.ports import DeadLetters

_Key = tuple[str, str]


class DeadLetterBox(DeadLetters):
    """Dead letters in memory. If there are too many, or too many bytes, the tenant with the most loses its oldest letter."""

    def __init__(self, capacity: int = 10_000, capacity_bytes: int = 64 << 20) -> None:
        self._letters: dict[_Key, DeadLetter] = {}
        self._totals = Counter[str]()
        self._numbers, self._sizes = _budget(capacity), _budget(capacity_bytes)

    async def add(self, letter: DeadLetter) -> None:
        key = _key(letter)
        self._drop(key)
        self._letters[key] = letter
        self._totals[letter.entry.model] += 1
        for budget, size in ((self._numbers, 1), (self._sizes, _letter_bytes(letter))):
            if key in self._letters:
                for gone in budget.add(key, letter.entry.tenant, size, math.inf, spare=False):
                    self._drop(gone)

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        newest = itertools.islice(reversed(self._letters.values()), limit)
        return [letter.without_input() for letter in newest]

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]:
        if tenant is not None:
            letter = self._letters.get((tenant, id))
            return () if letter is None else (letter,)
        return [letter for (_, known), letter in self._letters.items() if known == id]

    async def remove(self, id: str, tenant: str | None = None) -> int:
        letters = await self.find(id, tenant)
        for letter in letters:
            self._drop(_key(letter))
        return len(letters)

    async def count(self) -> int:
        return len(self._letters)

    async def counts(self) -> Mapping[str, int]:
        return Counter(letter.entry.model for letter in self._letters.values())

    async def totals(self) -> Mapping[str, int]:
        return self._totals

    def _drop(self, key: _Key) -> None:
        self._letters.pop(key, None)
        self._numbers.remove(key)
        self._sizes.remove(key)


def _budget(most: int) -> Retention[_Key]:
    return Retention(KeptLimits(most, most, most))


def _key(letter: DeadLetter) -> _Key:
    return letter.entry.tenant, letter.entry.id


def _letter_bytes(letter: DeadLetter) -> int:
    """Estimate the size of a dead letter. Each character counts as four bytes, which is Python's worst case."""
    return 1 + 4 * (len(letter.entry.input) + len(letter.error)) + len(letter.entry.parameters)
