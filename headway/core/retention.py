"""Byte budgets of kept outcomes: one for each tenant, and one for all.

A tenant that keeps more than its budget loses its own oldest outcomes. If all together keep too much, the tenant that keeps most
loses its oldest. So a tenant that keeps no more than an equal part never loses anything to others (max-min fairness). Within a
tenant, outcomes of identical requests go first, as outcomes of tasks and keys are promises."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from headway.core.values import room
from headway.model import Reply, Value

OVERHEAD = 1600  # Bytes that a kept outcome takes besides its text.
FAILURE_TEXT = 2000  # Bytes that a failure's text counts as, and to which it is cut.
FAILURE_BYTES = OVERHEAD + FAILURE_TEXT  # Bytes that a kept failure counts as.
LARGEST_SHARE = 4  # Number of outcomes of the largest size that fit into a tenant's budget.
STALE = 64  # Outdated entries of a heap before they are swept.

T = TypeVar("T", bound=Hashable)


def weight(output: Value | None) -> int:
    """Return the bytes that a kept outcome counts as; None for a failure. Text beyond ASCII counts as four bytes a character."""
    if output is None:
        return FAILURE_BYTES
    return OVERHEAD + room(output)


class KeptLimits(msgspec.Struct, frozen=True):
    """Budgets of kept outcomes, in bytes."""

    total: int  # Budget of all tenants together.
    tenant: int  # Budget of one tenant.
    largest: int  # Largest outcome that is kept, see `weight`.

    @classmethod
    def of(cls, total: int, tenant: int) -> KeptLimits:
        """Return budgets in bytes. A tenant's budget is limited by the total."""
        tenant = min(total, tenant)
        return cls(total, tenant, tenant // LARGEST_SHARE)

    def within(self, bytes: int) -> KeptLimits:
        """Return the budgets scaled down to a total of `bytes` bytes."""
        return self if self.total <= bytes else KeptLimits.of(bytes, self.tenant * bytes // self.total)

    def split(self, parts: int) -> KeptLimits:
        """Return the budgets of one of several equal parts, each tenant being in one part only."""
        return KeptLimits.of(self.total // parts, self.tenant)

    def keeps(self, reply: Reply) -> bool:
        return reply.output is None or weight(reply.output) <= self.largest


KEPT = KeptLimits.of(256 << 20, 64 << 20)  # Budgets by default.


class _Item(msgspec.Struct, frozen=True):
    tenant: str
    size: int
    spare: bool
    number: int


class _Tenant(msgspec.Struct, Generic[T]):
    """Items of one tenant, oldest first. All of `spare` go before any of `rest`."""

    bytes: int = 0
    noted: int = 0  # Its bytes in the heap of the heaviest.
    spare: dict[T, None] = msgspec.field(default_factory=dict)
    rest: dict[T, None] = msgspec.field(default_factory=dict)


class Retention(Generic[T]):
    """Order in which kept items are dropped, by the budgets `limits`."""

    def __init__(self, limits: KeptLimits) -> None:
        self.limits = limits
        self.bytes = 0
        self._items: dict[T, _Item] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._ends: list[tuple[float, int]] = []  # Heap of the ends of items, with their numbers. Some are outdated.
        self._numbered: dict[int, T] = {}
        # Heap of tenants by their bytes, negated. An entry may be outdated, and then has more bytes than the tenant keeps.
        self._heaviest: list[tuple[int, str]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, tenant: str, size: int, until: float, *, spare: bool) -> list[T]:
        """Keep a new item of so many bytes until an instant, and return the items dropped for it. A `spare` item goes first."""
        kept = self._tenants.get(tenant)
        if kept is None:
            kept = self._tenants[tenant] = _Tenant()
        (kept.spare if spare else kept.rest)[item] = None
        number = next(self._numbers)
        self._items[item], self._numbered[number] = _Item(tenant, size, spare, number), item
        heapq.heappush(self._ends, (until, number))
        self.bytes += size
        kept.bytes += size
        if kept.bytes > kept.noted:
            self._note(tenant, kept)
        gone: list[T] = []
        while kept.bytes > self.limits.tenant:
            gone.append(self._pop(kept))
        while self.bytes > self.limits.total:
            gone.append(self._pop(self._tenants[self._most()]))
        return gone

    def remove(self, item: T) -> None:
        known = self._items.pop(item, None)
        if known is None:
            return
        del self._numbered[known.number]
        kept = self._tenants[known.tenant]
        del (kept.spare if known.spare else kept.rest)[item]
        self.bytes -= known.size
        kept.bytes -= known.size
        if not kept.bytes:
            del self._tenants[known.tenant]
        if len(self._ends) > 2 * len(self._items) + STALE:
            self._ends = [end for end in self._ends if end[1] in self._numbered]
            heapq.heapify(self._ends)

    def overdue(self, now: float) -> list[T]:
        gone = []
        while self._ends and self._ends[0][0] <= now:
            item = self._numbered.get(heapq.heappop(self._ends)[1])
            if item is not None:
                gone.append(item)
                self.remove(item)
        return gone

    def _pop(self, kept: _Tenant[T]) -> T:
        item = next(itertools.chain(kept.spare, kept.rest))
        self.remove(item)
        return item

    def _note(self, tenant: str, kept: _Tenant[T]) -> None:
        """Update a tenant's entry in the heap of the heaviest."""
        kept.noted = kept.bytes
        heapq.heappush(self._heaviest, (-kept.bytes, tenant))
        if len(self._heaviest) > 2 * len(self._tenants) + STALE:
            for other in self._tenants.values():
                other.noted = other.bytes
            self._heaviest = [(-other.bytes, name) for name, other in self._tenants.items()]
            heapq.heapify(self._heaviest)

    def _most(self) -> str:
        """Return the tenant that keeps most, or the first of them by name."""
        while True:
            bytes, tenant = self._heaviest[0]
            kept = self._tenants.get(tenant)
            if kept is not None and kept.bytes == -bytes:
                return tenant
            heapq.heappop(self._heaviest)
            if kept is not None and kept.noted == -bytes:
                self._note(tenant, kept)
