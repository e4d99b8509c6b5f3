"""Whether a broker answers, as one of its users sees it.

    answers ──a call fails──▶ out of reach ──a call succeeds──▶ answers

It is told of every call. What is said in the log is said once when the broker goes and once when it is back.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from headway.errors import BrokerUnavailable

log = structlog.get_logger(__name__)


class Outage:
    """Since when a broker has been out of reach.

    Arguments:
        who: the user, as the log names it.
        clock: monotonic seconds.

    Attributes:
        since: instant at which the first call began that was not answered; None while the broker answers.
    """

    def __init__(self, who: str, clock: Callable[[], float]) -> None:
        self._who = who
        self._clock = clock
        self.since: float | None = None

    def failed(self, began: float, error: BrokerUnavailable) -> None:
        """A call that began at instant `began` was not answered."""
        if self.since is None:
            self.since = began
            log.warning("the broker is out of reach", who=self._who, error=str(error))

    def over(self) -> bool:
        """A call was answered; True when that ends an outage."""
        if self.since is None:
            return False
        log.info("the broker is back", who=self._who, after=round(self._clock() - self.since, 3))
        self.since = None
        return True
