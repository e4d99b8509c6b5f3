"""Arrivals by tenant: averages of a bounded number of tenants."""

from __future__ import annotations

import heapq

MOST = 1000
"""Most tenants that are counted one by one at a time. Any others are counted as one."""
TOLD = 16
"""Most tenants whose averages are told."""
LEAST = 0.01
"""Arrivals per second below which a tenant is forgotten."""
OTHERS = ""
"""Name under which all further tenants are counted; no tenant has it."""


class TenantRates:
    """Averages of the arrivals of each tenant."""

    __slots__ = ("_averages", "_came")

    def __init__(self) -> None:
        self._came: dict[str, int] = {}
        """Arrivals since the last average."""
        self._averages: dict[str, float] = {}

    def add(self, tenant: str, count: int) -> None:
        """Count arrivals of a tenant; a negative number takes some back."""
        came = self._came
        if tenant not in came and len(came) >= MOST:
            tenant = OTHERS
        came[tenant] = came.get(tenant, 0) + count

    def average(self, elapsed: float, weight: float) -> dict[str, float]:
        """Average the arrivals since the last call. Returns the averages of those tenants that send most, the most first.

        Arguments:
            elapsed: seconds since the last call.
            weight: part of these seconds in the new averages, 0 to 1.
        """
        came, before, self._came = self._came, self._averages, {}
        averages = {
            tenant: average
            for tenant in before.keys() | came.keys()
            if (average := (1.0 - weight) * before.get(tenant, 0.0) + weight * max(came.get(tenant, 0), 0) / elapsed)
            > LEAST
        }
        if len(averages) > MOST:
            averages = dict(heapq.nlargest(MOST, averages.items(), key=lambda one: one[1]))
        self._averages = averages
        known = ((tenant, average) for tenant, average in averages.items() if tenant != OTHERS)
        return dict(heapq.nlargest(TOLD, known, key=lambda one: one[1]))
