"""Counts of the outcomes of single tenants, for those that have asked for statistics of their own."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from headway.gateway.outcome_counts import OutcomeCounts
from headway.gateway.pending import Ending, PendingRequest
from headway.runtime.counters import Counters

MOST_TENANTS = 256
"""Tenants that are counted by themselves. One more takes the place of the one that has not asked for the longest."""


class TenantCounts:
    """Observer that counts by tenant, from a tenant's first question on: nothing is counted for those that never ask.

    Arguments:
        tiers: names of the tiers.
        models: names of the models that are served; other names get no series.
        begin: called with these counts at the first question, from which on they are told of requests.
    """

    def __init__(self, tiers: Sequence[str], models: Container[str], begin: Callable[[TenantCounts], None]) -> None:
        self._tiers, self._models, self._begin = tiers, models, begin
        self._counts: dict[str, tuple[Counters, OutcomeCounts]] = {}
        """Counters of each tenant and what adds to them; the tenant that asked last is the last."""

    def of(self, tenant: str) -> Counters:
        """Counters of a tenant's own requests, which are counted from now on."""
        if not self._counts:
            self._begin(self)
        found = self._counts.pop(tenant, None)
        if found is None:
            counters = Counters()
            found = counters, OutcomeCounts(counters, self._tiers, self._models)
            if len(self._counts) >= MOST_TENANTS:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = found
        return found[0]

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count the requests of tenants that have asked; see `headway.gateway.pending.Observer`."""
        of_tenants: dict[str, list[PendingRequest]] = {}
        for request in requests:
            if request.entry.tenant in self._counts:
                of_tenants.setdefault(request.entry.tenant, []).append(request)
        for tenant, own in of_tenants.items():
            self._counts[tenant][1].finished(own, ending, now)

    def forget(self, model: str) -> None:
        """Forget what was counted of a model that requests no longer come for."""
        for counters, _ in self._counts.values():
            counters.forget(model)
