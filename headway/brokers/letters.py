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
        self._letters: dict[tuple[str, str], DeadLetter] = {}
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0

    async def add(self, letter: DeadLetter) -> None:
        """See DeadLetters."""
        key = _key(letter)
        if key in self._letters:
            self._drop(key)
        self._letters[key] = letter
        self._bytes += _letter_bytes(letter)
        while len(self._letters) > self._capacity or self._bytes > self._capacity_bytes:
            self._drop(next(iter(self._letters)))

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """See DeadLetters."""
        return list(itertools.islice(reversed(self._letters.values()), limit))

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]:
        """See DeadLetters."""
        if tenant is not None:
            letter = self._letters.get((tenant, id))
            return () if letter is None else (letter,)
        return [letter for (_, known), letter in self._letters.items() if known == id]

    async def remove(self, id: str, tenant: str | None = None) -> int:
        """See DeadLetters."""
        found = await self.find(id, tenant)
        for letter in found:
            self._drop(_key(letter))
        return len(found)

    async def count(self) -> int:
        """See DeadLetters."""
        return len(self._letters)

    def _drop(self, key: tuple[str, str]) -> None:
        self._bytes -= _letter_bytes(self._letters.pop(key))


def _key(letter: DeadLetter) -> tuple[str, str]:
    return letter.entry.tenant, letter.entry.id


def _letter_bytes(letter: DeadLetter) -> int:
    """About what a letter takes: text counts four bytes a character, the most that Python needs."""
    return 4 * (len(letter.entry.input) + len(letter.error)) + len(letter.entry.parameters)
