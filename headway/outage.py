"""Whether a broker, or a store, answers, as one of its users sees it.

    answers ──a call fails──▶ out of reach ──a call succeeds──▶ answers

It is told of every call. What is said in the log is said once when it goes and once when it is back.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from headway.errors import HeadwayError

log = structlog.get_logger(__name__)


class Outage:
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

    def failed(self, began: float, error: HeadwayError) -> None:
        """A call that began at instant `began` was not answered."""
        if self.since is None:
            self.since = began
            log.warning(f"the {self._what} is out of reach", who=self._who, error=str(error))

    def over(self) -> bool:
        """A call was answered; True when that ends an outage."""
        if self.since is None:
            return False
        log.info(f"the {self._what} is back", who=self._who, after=round(self._clock() - self.since, 3))
        self.since = None
        return True
