"""One call of a client: its attempts, its pauses, and its end. No I/O.

    attempt ──answer──▶ done
      ▲        │ refused, failed, or the connection was lost
      └─pause──┘ while there are retries and time left; then the last error is the call's

An answer with `x-should-retry: false` ends the call. If an answer says when to retry, the call waits that long and a bit more, so
that clients refused at the same time don't come back at the same time. Long polls fetch the outcome of a task.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.client.errors import ApiError, ClientError, TimedOut
from headway.client.messages import Answer, Request, Result, check_seconds, milliseconds, poll, read_error, read_outcome

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
"""Statuses after which the same request may succeed."""
REFUSED = frozenset((429, 503))
"""Statuses for requests that the service has not started."""
CONNECT = 5.0
GRACE = 0.25
"""Seconds to wait beyond the caller's time, so that the service's own 504 arrives."""
FIRST_PAUSE = 0.1
"""Seconds before the first retry if the service names none. Each further pause is four times as long."""
LONGEST_PAUSE = 8.0
SPREAD = 0.25
"""Largest share by which a pause that the service asks for is stretched."""
LONGEST_WAIT = 20.0
"""Most seconds that a poll waits, as proxies cut silent connections, usually after a minute."""
SPARE = 5.0
"""Seconds that a poll may take beyond its wait and the caller's time."""
PAUSE = 1.0
"""Seconds between polls if the service didn't wait before it answered that the task is still running."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt. `header` is added to the request's. `connect` and `read` are seconds for connecting and for the answer."""

    header: dict[str, str]
    connect: float
    read: float


class Call:
    """All attempts of a call, which ends `timeout` seconds from `now`. `retries` limits the attempts beyond the first. A retry after
    a refusal that says when to come back doesn't count if the call is `patient`. `rng` is uniform in [0, 1), for pauses."""

    def __init__(
        self, request: Request, timeout: float, retries: int, now: float, rng: Callable[[], float], *, patient: bool = False,
    ) -> None:  # fmt: skip
        self.request = request
        self._timeout = timeout
        self._until = now + timeout
        self._left = retries
        self._tried = 0
        self._rng = rng
        self._patient = patient and retries > 0

    def attempt(self, now: float) -> Attempt:
        """Start an attempt. Raises TimedOut if the call's time is up."""
        left = self._until - now
        if left <= 0:
            raise self.overdue()
        self._tried += 1
        header = {"X-Request-Timeout-Ms": milliseconds(left)} if self.request.timed else {}
        return Attempt(header, min(CONNECT, left + GRACE), left + GRACE)

    def answered(self, answer: Answer, now: float) -> float | None:
        """Return None for a success, else the seconds until the next attempt. Raises ApiError if there is no next attempt."""
        if 200 <= answer.status < 300:
            return None
        error = read_error(answer)
        if error.hopeless or answer.status not in RETRIED:
            raise error
        if self._patient and answer.status in REFUSED and error.retry_after is not None:
            self._left += 1  # _pause() takes it away again.
        return self._pause(error, error.retry_after, now)

    def failed(self, error: ClientError, now: float) -> float:
        """Return the seconds until the next attempt after one without an answer. Raises `error` if there is no next attempt."""
        if error.hopeless:
            raise error
        return self._pause(error, None, now)

    def overdue(self) -> TimedOut:
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
    """A caller's wait for the outcome of a task, for `timeout` seconds from `now`, or for ever. Raises InvalidArgument."""

    def __init__(self, task_id: str, timeout: float | None, now: float) -> None:
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._id = task_id
        self._timeout = timeout
        self._until = None if timeout is None else now + timeout
        self._wait = 0.0
        self._asked_at = now

    def next(self, now: float) -> tuple[Request, float]:
        """Return the next poll, and the seconds for it and its retries."""
        left = 2 * LONGEST_WAIT if self._until is None else max(self._until - now, 0.0)
        self._wait = min(left, LONGEST_WAIT)
        self._asked_at = now
        return poll(self._id, self._wait), left + SPARE

    def answered(self, answer: Answer, now: float) -> Result | float:
        """Return the task's result, or the seconds until the next poll. Raises ApiError if the task failed, and TimedOut if it
        still runs when the caller's time is up."""
        _, outcome = read_outcome(answer)
        if isinstance(outcome, Result):
            return outcome
        if isinstance(outcome, ApiError):
            raise outcome
        if self._until is not None and now >= self._until:
            raise TimedOut(f"task {self._id} has no outcome after {self._timeout:g} s; it goes on")
        early = now - self._asked_at < self._wait / 2  # A service that doesn't wait must not be flooded.
        pause = PAUSE if early else 0.0
        return pause if self._until is None else min(pause, max(self._until - now, 0.0))
