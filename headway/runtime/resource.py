"""Bases of a process's resources, for what they need not do; see `headway.app.lifecycle.Resource`."""

from __future__ import annotations

from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor


class BareResource:
    """Resource with nothing to open, to run or to close, but for what a subclass says."""

    async def open(self) -> None:
        """Get ready."""

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops."""

    async def close(self) -> None:
        """Finish the remaining work."""


class PeriodicResource(BareResource):
    """Resource that calls a function now and then.

    Arguments:
        periodic: caller of the function.
    """

    def __init__(self, periodic: Periodic) -> None:
        self._periodic = periodic

    def start(self, supervisor: Supervisor) -> None:
        """Start calling."""
        self._periodic.start(supervisor)
