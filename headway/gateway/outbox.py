"""Outbox of a session: entries that wait for a call to the broker. Tenants take turns where one call does not take all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from headway.model import Entry, Submission


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
