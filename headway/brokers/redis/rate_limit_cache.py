"""What this process has heard of rate limits: until when something is owed to each."""

from __future__ import annotations

from collections.abc import Sequence

from headway.model import Limit

LEAST = 10_000
"""Limits that are remembered before those are dropped to which nothing is owed."""


class Owed:
    """Remembers it, on the event loop's clock. What is owed only grows, so what was heard is never too much."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._most = LEAST

    def learn(self, limits: Sequence[Limit], owed: Sequence[float], asked: float) -> None:
        """A call that was made at instant `asked` has told how many seconds are owed to each of these."""
        until = self._until
        for limit, seconds in zip(limits, owed, strict=True):
            until[limit.id] = max(asked + seconds, until.get(limit.id, 0.0))
        if len(until) > self._most:
            self._until = {id: end for id, end in until.items() if end > asked}
            self._most = max(LEAST, 2 * len(self._until))

    def seconds(self, id: str, now: float) -> float:
        """How many seconds are owed now."""
        return max(0.0, self._until.get(id, 0.0) - now)
