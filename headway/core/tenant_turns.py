"""Tenants that take turns, each with items in order. Queue entries use `fair_queue.py` instead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantTurns(Generic[T]):
    """Waiting items by tenant. Truthy if there are any."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # Non-empty deques, starting with that of the tenant whose turn it is.
        self.count = 0  # Number of items.

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item in line)

    def add(self, tenant: str, item: T) -> None:
        self._lines.setdefault(tenant, deque()).append(item)
        self.count += 1

    def take(self) -> T:
        tenant, line = next(iter(self._lines.items()))
        item = line.popleft()
        del self._lines[tenant]
        if line:
            self._lines[tenant] = line  # Behind the other tenants.
        self.count -= 1
        return item

    def keep(self, wanted: Callable[[T], bool]) -> None:
        self._lines = {tenant: kept for tenant, line in self._lines.items() if (kept := deque(filter(wanted, line)))}
        self.count = sum(map(len, self._lines.values()))
