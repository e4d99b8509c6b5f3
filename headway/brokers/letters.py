"""Dead letters of one process, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from headway.model import DeadLetter


class DeadLetterBox:
    """Dead letters in memory, the oldest go first.

    Arguments:
        capacity: most letters.
        capacity_bytes: most bytes of input, parameters and error in all of them together.
    """

    def __init__(self, capacity: int = 10_000, capacity_bytes: int = 64 << 20) -> None:
        self._letters: dict[str, DeadLetter] = {}
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0

    async def add(self, letter: DeadLetter) -> None:
        """See DeadLetters."""
        await self.remove(letter.entry.id)
        self._letters[letter.entry.id] = letter
        self._bytes += _letter_bytes(letter)
        while len(self._letters) > self._capacity or self._bytes > self._capacity_bytes:
            await self.remove(next(iter(self._letters)))

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """See DeadLetters."""
        return list(itertools.islice(reversed(self._letters.values()), limit))

    async def get(self, id: str) -> DeadLetter | None:
        """See DeadLetters."""
        return self._letters.get(id)

    async def remove(self, id: str) -> bool:
        """See DeadLetters."""
        letter = self._letters.pop(id, None)
        self._bytes -= _letter_bytes(letter) if letter is not None else 0
        return letter is not None

    async def count(self) -> int:
        """See DeadLetters."""
        return len(self._letters)


def _letter_bytes(letter: DeadLetter) -> int:
    """About what a letter takes: text counts four bytes a character, the most that Python needs."""
    return 4 * (len(letter.entry.input) + len(letter.error)) + len(letter.entry.parameters)
