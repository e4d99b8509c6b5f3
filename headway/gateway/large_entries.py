"""Large entries of a session, which go to the broker in calls of their own, and the bytes of a call with small ones.

Nobody waits for the bytes of another's: small entries go by, and tenants take turns. Whoever follows a large task goes behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter

from headway.core.dedup import task_followed
from headway.core.tenant_turns import TenantTurns
from headway.errors import BrokerUnavailable
from headway.model import Entry

AT_ONCE = 8
"""Most entries in one call."""
MOST_BYTES = 8 << 20
"""Bytes of inputs and parameters from which no further entry joins a call: an entry is admitted when all of its call are stored."""
MOST_COPIED = 1 << 19
"""Bytes of inputs and parameters of small entries from which no further one joins a call, as the broker copies them."""

_INPUT, _PARAMETERS = attrgetter("input"), attrgetter("parameters")


class LargeEntries:
    """Line of entries that are large for the broker.

    Arguments:
        offer: offers entries; after BrokerUnavailable they are the outbox's.

    Attributes:
        waiting: entries not offered yet.
    """

    def __init__(self, offer: Callable[[Sequence[Entry]], Awaitable[None]]) -> None:
        self.waiting = TenantTurns[Entry]()
        self._offer = offer
        self._work = asyncio.Event()
        self._offering: list[Entry] = []

    def split(self, entries: list[Entry], most: float) -> tuple[list[Entry], list[Entry]]:
        """Take the entries whose inputs and parameters are longer than `most`, and those that follow such.

        Of the others returns those of the next call, and the rest.
        """
        together = sum(map(len, map(_INPUT, entries))) + sum(map(len, map(_PARAMETERS, entries)))
        if together <= min(most, MOST_COPIED) and not (self.waiting or self._offering):  # Mostly.
            return entries, []
        others = []
        for entry in entries:
            if len(entry.input) + len(entry.parameters) > most or self._has(entry.tenant, task_followed(entry)):
                self.waiting.add(entry.tenant, entry)
                self._work.set()
            else:
                others.append(entry)
        entries = others
        if len(entries) * most > MOST_COPIED:
            left = MOST_COPIED
            for position, entry in enumerate(entries):
                if left <= 0:
                    return entries[:position], entries[position:]
                left -= len(entry.input) + len(entry.parameters)
        return entries, []

    def _has(self, tenant: str, id: str) -> bool:
        """Whether an entry waits here or is on its way."""
        return bool(id) and any(one.id == id and one.tenant == tenant for one in (*self._offering, *self.waiting))

    async def run(self) -> None:
        """Offer what waits, again and again."""
        while True:
            await self._work.wait()
            self._offering = self._next()
            if not self.waiting:
                self._work.clear()
            try:
                await self._offer(self._offering)
            except BrokerUnavailable:
                pass
            finally:
                self._offering = []

    def _next(self) -> list[Entry]:
        """Take the entries of the next call."""
        chosen, size = list[Entry](), 0
        while self.waiting and len(chosen) < AT_ONCE and size < MOST_BYTES:
            entry = self.waiting.take()
            chosen.append(entry)
            size += len(entry.input) + len(entry.parameters)
        return chosen
