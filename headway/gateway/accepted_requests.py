"""Requests that a gateway has taken in, for a ledger that is to know them before they have ended.

    pending requests ──look, with each bulk of records──▶ new ──those that still wait──▶ rows ──ended──▶ removed

Nothing is done when a request comes: whoever looks finds those that have come since, at the end of the table. What ends
before it is written never has such a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headway.core.ledger_records import open_record_of
from headway.gateway.pending import PendingRequest, PendingTable
from headway.model import LedgerRecord

AT_ONCE = 500
"""Most rows that are written, and most that are removed, in one call of the ledger."""

_Key = tuple[str, str]
"""Tenant and id."""


class AcceptedRequests:
    """Requests of one gateway that have no outcome.

    Arguments:
        tiers: names of the tiers.
        clock: monotonic seconds.
        wall: Unix time in seconds.
        pending: the requests; later ones come at the end.
    """

    def __init__(
        self, tiers: Sequence[str], clock: Callable[[], float], wall: Callable[[], float], pending: PendingTable
    ) -> None:
        self._tiers, self._clock, self._wall, self._pending = tiers, clock, wall, pending
        self._looked = -math.inf
        self._new: dict[_Key, PendingRequest] = {}
        self._written: dict[_Key, tuple[PendingRequest, _Key]] = {}
        """Requests with a row, and the tenant and id in that."""
        self._taken: dict[_Key, tuple[PendingRequest, LedgerRecord]] = {}
        self._ended: list[_Key] = []

    @property
    def due(self) -> bool:
        """Whether there is something to write or to remove."""
        return bool(self._new or self._ended)

    def look(self) -> None:
        """Find the requests that have come since the last look."""
        now = self._clock()
        for key, pending in reversed(self._pending.items()):
            if pending.since < self._looked:
                break
            if (key not in self._written or self._written[key][0] is not pending) and not pending.follows:
                self._new[key] = pending
        self._looked = now

    def ended(self, request: PendingRequest) -> None:
        """Note that a request has its outcome."""
        key = request.entry.tenant, request.entry.id
        if (written := self._written.get(key)) is not None and written[0] is request:
            del self._written[key]
            self._ended.append(written[1])
        elif self._new.get(key) is request:
            del self._new[key]

    def take(self) -> tuple[Sequence[LedgerRecord], Sequence[_Key]]:
        """Rows that are written next, and tenant and id of those that are removed before. They are taken again until `done`."""
        now, wall = self._clock(), self._wall()
        self._taken = {}
        for key, one in list(self._new.items())[:AT_ONCE]:
            created, seconds = wall - (now - one.since), one.deadline - one.since
            row = open_record_of(one.principal, one.entry, created, seconds, self._tiers, one.part_of)
            self._taken[key] = one, row
        return [row for _, row in self._taken.values()], self._ended[:AT_ONCE]

    def done(self, removed: Sequence[_Key]) -> None:
        """Note that what was taken last is done. What has ended meanwhile is removed next."""
        del self._ended[: len(removed)]
        for key, (request, row) in self._taken.items():
            stored = row.tenant, row.id
            if self._new.get(key) is request:
                del self._new[key]
                self._written[key] = request, stored
            else:
                self._ended.append(stored)
        self._taken = {}
