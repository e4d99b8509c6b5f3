"""Byte budgets for kept outcomes: one for each tenant, and one for all tenants together.

A tenant that exceeds its budget loses its own oldest outcomes. If the total is exceeded, the tenant that keeps the most loses its oldest.
So a tenant that keeps no more than an even share never loses anything because of others (max-min fairness). Within a tenant, outcomes of
identical requests are dropped first, because clients were promised the outcomes of tasks and idempotency keys."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from headway.core.values import room
from headway.model import Reply, Value

OVERHEAD = 1600  # Bytes that a kept outcome takes in addition to its text.
FAILURE_TEXT = 2000  # Bytes that a failure's text counts as. Longer texts are cut to this.
FAILURE_BYTES = OVERHEAD + FAILURE_TEXT  # Bytes that a kept failure counts as.
LARGEST_SHARE = 4  # Number of outcomes of the largest allowed size that fit into a tenant's budget.
STALE = 64  # A heap may contain this many outdated entries before it is swept.

T = TypeVar("T", bound=Hashable)


def weight(output: Value | None) -> int:
    """Return how many bytes an output counts as. None stands for a failure. Non-ASCII text counts as four bytes a character."""
    if output is None:
        return FAILURE_BYTES
    return OVERHEAD + room(output)


class KeptLimits(msgspec.Struct, frozen=True):
    """Budgets for kept outcomes, in bytes."""

    total: int  # Budget for all tenants together.
    tenant: int  # Budget for one tenant.
    largest: int  # Largest outcome that is kept; see `weight`.

    @classmethod
    def of(cls, total: int, tenant: int) -> KeptLimits:
        """Return budgets in bytes. A tenant's budget can't exceed the total."""
        tenant = min(total, tenant)
        return cls(total, tenant, tenant // LARGEST_SHARE)

    def within(self, bytes: int) -> KeptLimits:
        """Return the budgets scaled down to a total of `bytes` bytes."""
        return self if self.total <= bytes else KeptLimits.of(bytes, self.tenant * bytes // self.total)

    def split(self, parts: int) -> KeptLimits:
        """Return the budgets for one of several equal parts, if each tenant's outcomes are in one part only."""
        return KeptLimits.of(self.total // parts, self.tenant)

    def keeps(self, reply: Reply) -> bool:
        return reply.output is None or weight(reply.output) <= self.largest


KEPT = KeptLimits.of(256 << 20, 64 << 20)  # Default budgets.


class _Item(msgspec.Struct, frozen=True):
    tenant: str
    size: int
    spare: bool
    number: int


class _Tenant(msgspec.Struct, Generic[T]):
    """Items of one tenant, oldest first. All of `spare` are dropped before any of `rest`."""

    bytes: int = 0
    noted: int = 0  # Its bytes as recorded in the heap of the heaviest.
    spare: dict[T, None] = msgspec.field(default_factory=dict)
    rest: dict[T, None] = msgspec.field(default_factory=dict)


class Retention(Generic[T]):
    """Decides which kept items to drop in order to stay within the budgets `limits`."""

    def __init__(self, limits: KeptLimits) -> None:
        self.limits = limits
        self.bytes = 0
        self._items: dict[T, _Item] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._ends: list[tuple[float, int]] = []  # Heap of expiry times with item numbers. Some are outdated.
        self._numbered: dict[int, T] = {}
        self._heaviest: list[tuple[int, str]] = []  # Heap of tenants by negated bytes. Old entries are too heavy.
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, tenant: str, size: int, until: float, *, spare: bool) -> list[T]:
        """Keep a new item of `size` bytes until a time, and return the items dropped for it. `spare` items are dropped first."""
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
        while True:
            bytes, tenant = self._heaviest[0]
            kept = self._tenants.get(tenant)
            if kept is not None and kept.bytes == -bytes:
                return tenant
            heapq.heappop(self._heaviest)
            if kept is not None and kept.noted == -bytes:
                self._note(tenant, kept)
