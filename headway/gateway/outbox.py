"""Entries of a session that wait for a call to the broker: new and large ones, and those to resubmit after an outage."""

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
"""Maximum number of large entries in one call."""
MOST_BYTES = 8 << 20
"""Bytes of inputs and parameters that fill a call of large entries. The broker admits none before it has stored them all."""
MOST_COPIED = 1 << 19
"""Bytes of inputs and parameters that fill a call of small entries, which the broker copies."""
SPREAD = 0.25
"""Seconds within which gateways start to resubmit, spread by random delays, because all notice the broker's return at once."""
REST = 1.0
"""Minimum time in seconds between two resubmissions, in case the broker comes and goes."""
CHUNK = 64
"""Maximum number of entries in one call of a resubmission, and of submissions in one withdrawal."""
_INPUT, _PARAMETERS = attrgetter("input"), attrgetter("parameters")


class Outbox:
    """Waiting entries by nonce. Each tenant's entries stay in order."""

    __slots__ = ("_lines", "fresh", "later")

    def __init__(self) -> None:
        self.fresh: dict[int, Entry] = {}
        """Entries since the last `take`. Callers add an entry here, under its nonce."""
        self.later = 0
        """Number of entries that the last `take` left."""
        self._lines: dict[str, OrderedDict[int, Entry]] = {}
        """Entries that the last `take` left, by tenant. The first tenant has the next turn."""

    def __len__(self) -> int:
        return len(self.fresh) + self.later

    def __iter__(self) -> Iterator[Entry]:
        return chain(*(line.values() for line in self._lines.values()), self.fresh.values())

    def take(self, most: int) -> list[Entry]:
        """Remove and return the entries of the next call, at most `most`, one from each tenant in turn."""
        if not self.later and len(self.fresh) <= most:  # The common case.
            taken, self.fresh = list(self.fresh.values()), {}
            return taken
        for entry in self.fresh.values():
            self._line(entry.tenant)[entry.nonce] = entry
        self.later += len(self.fresh)
        taken, self.fresh = [], {}
        while self._lines and len(taken) < most:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            taken.append(line.popitem(last=False)[1])
            if line:
                self._lines[tenant] = line  # behind the other tenants
        self.later -= len(taken)
        return taken

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Put entries back, ahead of their tenants' other entries."""
        for entry in reversed(entries):
            line = self._line(entry.tenant)
            self.later += entry.nonce not in line
            line[entry.nonce] = entry
            line.move_to_end(entry.nonce, last=False)

    def drop(self, submission: Submission) -> bool:
        """Drop the entry of a submission. Returns False if the outbox doesn't hold it."""
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
        """Drop all entries except the wanted ones."""
        kept = list(filter(wanted, self))
        self.fresh, self._lines, self.later = {}, {}, 0
        self.put_back(kept)

    def _line(self, tenant: str) -> OrderedDict[int, Entry]:
        return self._lines.setdefault(tenant, OrderedDict())


class LargeEntries:
    """Large entries, and the loop that offers them.

    `offer` offers entries. If it raises BrokerUnavailable, it has put them into the outbox.
    """

    def __init__(self, offer: Callable[[Sequence[Entry]], Awaitable[None]]) -> None:
        self.waiting = TenantTurns[Entry]()
        self._offer = offer
        self._work = asyncio.Event()
        self._offering: list[Entry] = []

    def split(self, entries: list[Entry], most: float) -> tuple[list[Entry], list[Entry]]:
        """Keep the entries of more than `most` bytes, and the followers of tasks that wait here.

        Returns the small entries for the next call, and the small entries for later calls.
        """
        together = sum(map(len, map(_INPUT, entries))) + sum(map(len, map(_PARAMETERS, entries)))
        if together <= min(most, MOST_COPIED) and not (self.waiting or self._offering):  # The common case.
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
        waiting = (*self._offering, *self.waiting)
        return bool(id) and any(entry.id == id and entry.tenant == tenant for entry in waiting)

    async def run(self) -> None:
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
        chosen, size = list[Entry](), 0
        while self.waiting and len(chosen) < AT_ONCE and size < MOST_BYTES:
            entry = self.waiting.take()
            chosen.append(entry)
            size += len(entry.input) + len(entry.parameters)
        return chosen


class Resubmitter:
    """Loop that offers pending entries again after the broker may have lost them.

    Offering is idempotent by (tenant, id), so entries that the broker still has don't change. `held` returns the entries that
    were offered and still have no answer. `open` is True from `ask` until all of them have been offered.
    """

    def __init__(
        self,
        held: Callable[[], Sequence[Entry]],
        offer: Callable[[Sequence[Entry]], Awaitable[None]],
        rng: Callable[[], float],
    ) -> None:
        self._held, self._offer, self._rng = held, offer, rng
        self._due = asyncio.Event()
        self.open = False

    def ask(self) -> None:
        """Have all entries offered again soon."""
        self.open = True
        self._due.set()

    async def run(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(self._rng() * SPREAD)
            self._due.clear()
            held = self._held()
            for start in range(0, len(held), CHUNK):
                try:
                    await self._offer(held[start : start + CHUNK])
                except BrokerUnavailable:
                    break  # The session asks again when the broker is back.
            else:
                self.open = self._due.is_set()
            await asyncio.sleep(REST)
