"""Resubmitter: hands pending requests over again when the broker may have lost them.

Offering is idempotent by (tenant, id), so what the broker still has stays as it is. All gateways of a fleet learn of
the same return; each waits a random part of SPREAD first and then offers one chunk after the other, so that a broker
that has just come up is not met by everything at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.errors import BrokerUnavailable
from headway.model import Entry

SPREAD = 0.25
"""Longest random wait in seconds before the first chunk."""
REST = 1.0
"""Least seconds between the end of one pass and the next, should the broker come and go."""
CHUNK = 64
"""Most entries in one call."""


class Resubmitter:
    """Loop that offers pending entries again, once for each time it is asked.

    Arguments:
        held: returns all that have been offered before and still wait for their answer.
        offer: offers some of them again.
        rng: uniform in [0, 1).
    """

    def __init__(
        self,
        held: Callable[[], Sequence[Entry]],
        offer: Callable[[Sequence[Entry]], Awaitable[None]],
        rng: Callable[[], float],
    ) -> None:
        self._held = held
        self._offer = offer
        self._rng = rng
        self._due = asyncio.Event()
        self.open = False
        """Whether it has been asked and is not done."""

    def ask(self) -> None:
        """Ask for everything to be offered again soon."""
        self.open = True
        self._due.set()

    async def run(self) -> None:
        """Offer again whenever it is asked, for ever."""
        while True:
            await self._due.wait()
            await asyncio.sleep(self._rng() * SPREAD)
            self._due.clear()
            held = self._held()
            for start in range(0, len(held), CHUNK):
                try:
                    await self._offer(held[start : start + CHUNK])
                except BrokerUnavailable:
                    break  # It will be asked for again when the broker is back.
            else:
                self.open = self._due.is_set()
            await asyncio.sleep(REST)
