"""Outbox of a session: entries that wait for a call to the broker, small ones and large ones.

Nobody waits for the bytes of another's: large entries go in calls of their own, small ones go by, and tenants take turns where one
call does not take all. Whoever follows a large task goes behind it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from headway.core.dedup import task_followed
from headway.core.tenant_turns import TenantTurns
from headway.errors import BrokerUnavailable
from headway.model import Entry, Submission

AT_ONCE = 8
"""Most entries in one call."""
MOST_BYTES = 8 << 20
"""Bytes of inputs and parameters from which no further entry joins a call: an entry is admitted when all of its call are stored."""
MOST_COPIED = 1 << 19
"""Bytes of inputs and parameters of small entries from which no further one joins a call, as the broker copies them."""
_INPUT, _PARAMETERS = attrgetter("input"), attrgetter("parameters")


class Outbox:
    """Entries of one gateway that wait, by nonce, each tenant's in their order.

    Attributes:
        fresh: entries that came since the last `take`; whoever adds one puts it here under its nonce.
        later: number of entries that the last `take` left.
    """

    __slots__ = ("_lines", "fresh", "later")

    def __init__(self) -> None:
        self.fresh: dict[int, Entry] = {}
        self.later = 0
        self._lines: dict[str, OrderedDict[int, Entry]] = {}
        """Lines of those that were left, none of them empty; that of the tenant whose turn it is comes first."""

    def __len__(self) -> int:
        return len(self.fresh) + self.later

    def __iter__(self) -> Iterator[Entry]:
        return chain(*(line.values() for line in self._lines.values()), self.fresh.values())

    def take(self, most: int) -> list[Entry]:
        """Take the entries of the next call: all if they are no more than `most`, else tenant by tenant in turns."""
        if not self.later and len(self.fresh) <= most:  # Mostly.
            taken, self.fresh = list(self.fresh.values()), {}
            return taken
        for entry in self.fresh.values():
            self._line(entry.tenant)[entry.nonce] = entry
        self.later += len(self.fresh)
        self.fresh = {}
        taken = []
        while self._lines and len(taken) < most:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            taken.append(line.popitem(last=False)[1])
            if line:
                self._lines[tenant] = line  # behind the other tenants
        self.later -= len(taken)
        return taken

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Have entries wait again, ahead of the others of their tenants."""
        for entry in reversed(entries):
            line = self._line(entry.tenant)
            self.later += entry.nonce not in line
            line[entry.nonce] = entry
            line.move_to_end(entry.nonce, last=False)

    def drop(self, submission: Submission) -> bool:
        """Drop the entry of a submission. False: it does not wait here."""
        tenant, _, nonce = submission
        if self.fresh.pop(nonce, None) is not None:
            return True
        line = self._lines.get(tenant)
        if line is None or line.pop(nonce, None) is None:
            return False
        if not line:
            del self._lines[tenant]
        self.later -= 1
        return True

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        """Drop all entries but the wanted ones."""
        kept = list(filter(wanted, self))
        self.fresh, self._lines, self.later = {}, {}, 0
        self.put_back(kept)

    def _line(self, tenant: str) -> OrderedDict[int, Entry]:
        return self._lines.setdefault(tenant, OrderedDict())


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
