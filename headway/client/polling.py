"""Long polls for the outcome of one task: how long each waits, and what its answer means. No I/O happens here."""

from __future__ import annotations

from headway.client.errors import ApiError, TimedOut
from headway.client.messages import Answer, Request, Result, poll, read_outcome

LONGEST_WAIT = 20.0
"""Most seconds for which one poll waits: proxies end silent connections, mostly after a minute."""
SPARE = 5.0
"""Seconds beyond its wait, and beyond the caller's time, that a poll may take."""
PAUSE = 1.0
"""Seconds between two polls, where the service answered early that the task is still under way."""


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
