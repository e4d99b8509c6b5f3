"""Lines that are ready to run: tenants take turns, and so do a tenant's jobs. Each job run and the feeder share one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from headway.model.bulk import BulkLine

_Jobs = OrderedDict[str, deque[BulkLine]]


class Turns:
    """Lines that are ready, by model, tenant and job."""

    def __init__(self) -> None:
        self._models: dict[str, OrderedDict[str, _Jobs]] = {}

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def add(self, lines: Iterable[BulkLine]) -> None:
        """Add lines, in the order in which those of a job run."""
        for line in lines:
            tenants = self._models.setdefault(line.model, OrderedDict())
            tenants.setdefault(line.tenant, OrderedDict()).setdefault(line.job, deque()).append(line)

    def take(self, model: str, rests: Callable[[str], object]) -> BulkLine | None:
        """Take the next line of a model, of a tenant that doesn't rest; None if there is none."""
        tenants = self._models.get(model, OrderedDict())
        tenant = next((name for name in tenants if not rests(name)), None)
        if tenant is None:
            return None
        jobs = tenants[tenant]
        job, lines = next(iter(jobs.items()))
        line = lines.popleft()
        jobs.move_to_end(job)
        tenants.move_to_end(tenant)
        if not lines:
            del jobs[job]
        if not jobs:
            del tenants[tenant]
        if not tenants:
            del self._models[model]
        return line

    def drop(self, tenant: str, job: str) -> None:
        """Drop the lines of a job."""
        for model, tenants in [*self._models.items()]:
            jobs = tenants.get(tenant)
            if jobs is None or jobs.pop(job, None) is None:
                continue
            if not jobs:
                del tenants[tenant]
            if not tenants:
                del self._models[model]
