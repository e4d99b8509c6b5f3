"""One call of a client: what is tried, when it is tried again, and when it is given up. No I/O happens here.

    attempt ──answer──▶ done
      ▲        │ refused, failed, or the connection was lost
      └─pause──┘ while there are retries and time left; then the last error is the call's

An answer that says `x-should-retry: false` ends the call. One that says when a retry makes sense is taken at its word,
with some spread, so that clients refused together do not come back together. The outcome of a task is asked for by long polls.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.client.errors import ApiError, ClientError, TimedOut
from headway.client.messages import Answer, Request, Result, milliseconds, poll, read_error, read_outcome

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
"""Statuses after which the same request may succeed."""
REFUSED = frozenset((429, 503))
"""Statuses of a request that the service has not begun."""
CONNECT = 5.0
"""Most seconds of one attempt to connect."""
GRACE = 0.25
"""Seconds beyond the caller's time for which an answer is waited for, so that the service's own 504 arrives."""
FIRST_PAUSE = 0.1
"""Seconds before the first retry where the service does not say; each further one waits four times as long."""
LONGEST_PAUSE = 8.0
SPREAD = 0.25
"""Most by which a pause that the service asks for is made longer, as a share of it."""

LONGEST_WAIT = 20.0
"""Most seconds for which one poll waits: proxies end silent connections, mostly after a minute."""
SPARE = 5.0
"""Seconds beyond its wait, and beyond the caller's time, that a poll may take."""
PAUSE = 1.0
"""Seconds between two polls, where the service answered early that the task is still under way."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: the header fields it adds, and the seconds for connecting and for the answer."""

    header: dict[str, str]
    connect: float
    read: float


class Call:
    """Call of a client, over all its attempts.

    Arguments:
        request: request that is sent.
        timeout: seconds from now until the call is given up.
        retries: most attempts beyond the first.
        now: instant in seconds.
        rng: uniform in [0, 1), for pauses.
        patient: whether a refusal that says when to come back is no retry, as among calls that refuse each other.
    """

    def __init__(
        self,
        request: Request,
        timeout: float,
        retries: int,
        now: float,
        rng: Callable[[], float],
        *,
        patient: bool = False,
    ) -> None:
        self.request = request
        self._timeout = timeout
        self._until = now + timeout
        self._left = retries
        self._tried = 0
        self._rng = rng
        self._patient = patient and retries > 0

    def attempt(self, now: float) -> Attempt:
        """Begin an attempt.

        Raises:
            TimedOut: the call's time is over.
        """
        left = self._until - now
        if left <= 0:
            raise self.overdue()
        self._tried += 1
        header = {"X-Request-Timeout-Ms": milliseconds(left)} if self.request.timed else {}
        return Attempt(header, min(CONNECT, left + GRACE), left + GRACE)

    def answered(self, answer: Answer, now: float) -> float | None:
        """Judge an answer: None when it is a success, else the seconds until the next attempt.

        Raises:
            ApiError: it is an error, and the call's last.
        """
        if 200 <= answer.status < 300:
            return None
        error = read_error(answer)
        if error.hopeless or answer.status not in RETRIED:
            raise error
        if self._patient and answer.status in REFUSED and error.retry_after is not None:
            self._left += 1  # What the pause takes away.
        return self._pause(error, error.retry_after, now)

    def failed(self, error: ClientError, now: float) -> float:
        """Judge an attempt without an answer: the seconds until the next one.

        Raises:
            ClientError: the attempt was the last, or the next would fail alike; `error` itself.
        """
        if error.hopeless:
            raise error
        return self._pause(error, None, now)

    def overdue(self) -> TimedOut:
        """Error of a call whose time is over."""
        return TimedOut(f"no answer within {self._timeout:g} s")

    def _pause(self, error: ClientError, asked: float | None, now: float) -> float:
        if self._left <= 0:
            raise error
        if asked is not None:
            pause = max(asked, 0.01) * (1.0 + SPREAD * self._rng())
        else:
            pause = min(FIRST_PAUSE * 4.0 ** (self._tried - 1), LONGEST_PAUSE) * (0.5 + 0.5 * self._rng())
        if now + pause >= self._until:
            if isinstance(error, ApiError):
                error.message += f"; the call's {self._timeout:g} s are over before it may be sent again"
            raise error
        self._left -= 1
        return pause


class Polling:
    """Wait of a caller for the outcome of a task.

    Arguments:
        task_id: id of the task.
        timeout: seconds until the caller gives up; None: never.
        now: instant in seconds.
    """

    def __init__(self, task_id: str, timeout: float | None, now: float) -> None:
        self._id = task_id
        self._timeout = timeout
        self._until = None if timeout is None else now + timeout
        self._wait = 0.0
        self._asked_at = now

    def next(self, now: float) -> tuple[Request, float]:
        """Next poll, and the seconds that it may take in all, its retries included."""
        left = 2 * LONGEST_WAIT if self._until is None else max(self._until - now, 0.0)
        self._wait = min(left, LONGEST_WAIT)
        self._asked_at = now
        return poll(self._id, self._wait), left + SPARE

    def answered(self, answer: Answer, now: float) -> Result | float:
        """Result that an answer brings, or the seconds until the next poll.

        Raises:
            ApiError: the task failed.
            TimedOut: the caller's time is over, and the task still under way.
        """
        _, outcome = read_outcome(answer)
        if isinstance(outcome, Result):
            return outcome
        if isinstance(outcome, ApiError):
            raise outcome
        if self._until is not None and now >= self._until:
            raise TimedOut(f"task {self._id} has no outcome after {self._timeout:g} s; it goes on")
        early = now - self._asked_at < self._wait / 2
        pause = PAUSE if early else 0.0
        return pause if self._until is None else min(pause, max(self._until - now, 0.0))
