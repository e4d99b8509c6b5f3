"""Whether a broker, or a store, answers, as one of its users sees it.

    answers ──a call fails──▶ out of reach ──a call succeeds──▶ answers

It is told of every call. What is said in the log is said once when it goes and once when it is back; that a store is damaged
is said as an error.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from headway.errors import HeadwayError, StoreCorrupted

log = structlog.get_logger(__name__)


class Availability:
    """Since when a broker, or a store, has been out of reach.

    Arguments:
        who: the user, as the log names it.
        clock: monotonic seconds.
        what: it is that is out of reach, as the log names it.

    Attributes:
        since: instant at which the first call began that was not answered; None while it answers.
    """

    def __init__(self, who: str, clock: Callable[[], float], what: str = "broker") -> None:
        self._who = who
        self._clock = clock
        self._what = what
        self.since: float | None = None
        self._damaged = False

    def failed(self, began: float, error: HeadwayError) -> None:
        """A call that began at instant `began` was not answered."""
        damaged = isinstance(error, StoreCorrupted)
        if damaged and not self._damaged:
            log.error(f"the {self._what} is damaged", who=self._who, error=str(error))
        elif self.since is None:
            log.warning(f"the {self._what} is out of reach", who=self._who, error=str(error))
        if self.since is None:
            self.since = began
        self._damaged |= damaged

    def over(self) -> bool:
        """A call was answered; True when that ends an outage."""
        if self.since is None:
            return False
        log.info(f"the {self._what} is back", who=self._who, after=round(self._clock() - self.since, 3))
        self.since, self._damaged = None, False
        return True
