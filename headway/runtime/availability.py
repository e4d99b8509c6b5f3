"""Outages of a broker or store, as one of its users sees them.

    answers ──a call fails──▶ unreachable ──a call succeeds──▶ answers

The user reports every call. The log says when an outage begins and ends, and reports a damaged store as an error.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.errors import HeadwayError, StoreCorrupted
from headway.runtime.logger import get_logger

log = get_logger(__name__)


class Availability:
    """State of a broker or store, as one user sees it. In the log, `what` names the broker or store, and `who` the user."""

    def __init__(self, who: str, clock: Callable[[], float], what: str = "broker") -> None:
        self._who, self._clock, self._what = who, clock, what
        self.since: float | None = None  # Start of the first failed call; None while calls succeed.
        self.outages = 0
        self.error = ""  # Text of the last failure; empty while calls succeed.
        self._damaged = False

    def failed(self, began: float, error: HeadwayError) -> None:
        """Record a failed call that started at time `began`."""
        damaged = isinstance(error, StoreCorrupted)
        if damaged and not self._damaged:
            log.error(f"the {self._what} is damaged", who=self._who, error=str(error))
        elif self.since is None:
            log.warning(f"the {self._what} is out of reach", who=self._who, error=str(error))
        if self.since is None:
            self.since = began
            self.outages += 1
        self._damaged |= damaged
        self.error = str(error)

    def over(self) -> bool:
        """Record a successful call. Return True if it ends an outage."""
        if self.since is None:
            return False
        log.info(f"the {self._what} is back", who=self._who, after=round(self._clock() - self.since, 3))
        self.since, self._damaged, self.error = None, False, ""
        return True
