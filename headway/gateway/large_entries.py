"""Large entries of a session, which go to the broker in calls of their own: nobody waits for the bytes of another's.

What comes under an idempotency key while a large entry under it is in the line goes behind that one. Else a later request
under the key could take a part of it that the first has not reached yet, and each would be refused for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.errors import BrokerUnavailable
from headway.gateway.several_inputs import PART
from headway.model import DedupKind, Entry

AT_ONCE = 8
"""Most entries in one call."""


class LargeEntries:
    """Line of entries that are large for the broker.

    Arguments:
        offer: offers entries; after BrokerUnavailable they are the outbox's.
        on_offered: called after each offer.

    Attributes:
        waiting: entries not offered yet.
    """

    def __init__(self, offer: Callable[[Sequence[Entry]], Awaitable[None]], on_offered: Callable[[], None]) -> None:
        self.waiting: list[Entry] = []
        self._offer, self._on_offered = offer, on_offered
        self._work = asyncio.Event()
        self._offering: list[Entry] = []

    def has(self, tenant: str, id: str) -> bool:
        """Whether an entry waits here or is on its way."""
        return any(entry.id == id and entry.tenant == tenant for entry in (*self._offering, *self.waiting))

    def split(self, entries: list[Entry], most: float) -> list[Entry]:
        """Take the entries whose inputs are longer than `most`, and those that go behind them; returns the others."""
        line = (*self._offering, *self.waiting, *(entry for entry in entries if len(entry.input) > most))
        if not line:
            return entries
        keys = {key for entry in line if (key := _key_of(entry)) is not None}
        taken = [len(entry.input) > most or _key_of(entry) in keys for entry in entries]
        self.waiting += [entry for entry, is_taken in zip(entries, taken, strict=True) if is_taken]
        if self.waiting:
            self._work.set()
        return [entry for entry, is_taken in zip(entries, taken, strict=True) if not is_taken]

    async def run(self) -> None:
        """Offer what waits, again and again."""
        while True:
            await self._work.wait()
            self._offering, self.waiting = self.waiting[:AT_ONCE], self.waiting[AT_ONCE:]
            if not self.waiting:
                self._work.clear()
            try:
                await self._offer(self._offering)
            except BrokerUnavailable:
                pass
            finally:
                self._offering = []
            self._on_offered()


def _key_of(entry: Entry) -> tuple[str, str] | None:
    """Tenant and idempotency key of the request that an entry is, or is a part of; None where it has no key."""
    for dedup_key in entry.dedup_keys:
        if dedup_key.kind is DedupKind.KEY:
            return entry.tenant, dedup_key.key.partition(PART)[0]
    return None
