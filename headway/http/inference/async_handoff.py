"""Handover of a request that may become a task: its client gets the task's id in place of the answer.

                 admitted                     answered
    (submitted) ──────────▶ admitted ─────────────────────▶ answered as ever
        │ due                  │ due
        ▼         admitted     ▼
       due ───────────────▶ handed over

A refusal comes before it is admitted, and is answered as the error it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from headway.http.inference.inference_head import Wish
from headway.http.tasks import PATH, Result


class AsyncHandoff:
    """Handover of one request.

    Arguments:
        loop: event loop that keeps the time.
        wait: seconds for which the client waits for the answer; 0: the handover is due at once.
        tell: hands the request over; called at most once, and not after `end`.

    Attributes:
        due: whether the client has waited long enough.
    """

    __slots__ = ("_admitted", "_tell", "_timer", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, wait: float, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
        self._admitted = False
        self.due = wait <= 0.0
        self._timer = None if self.due else loop.call_later(wait, self._expire)

    def admitted(self) -> None:
        """Note that the request will be answered, whoever waits for it."""
        self._admitted = True
        if self.due:
            self._hand_over()

    def end(self) -> None:
        """Note that the request has been answered, or its client has left."""
        self._tell = None
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.due = True
        if self._admitted:
            self._hand_over()

    def _hand_over(self) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()


def task_answer(shown: str, wish: Wish, date: bytes, ending: bytes) -> bytes:
    """Whole HTTP/1.1 response with the id of the task that a request has become.

    Arguments:
        shown: the id as clients see it, `req_…`.
        wish: the client's wish.
        date: value of its Date header.
        ending: further lines of its header, each with its end.
    """
    id, body = shown.encode(), msgspec.json.encode(Result(shown, "PENDING"))
    return (
        b"HTTP/1.1 202 Accepted\r\ndate: %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
        b"location: %b/%b\r\npreference-applied: %b\r\nretry-after: 1\r\n%bcontent-length: %d\r\n\r\n%b"
        % (date, id, PATH.encode(), id, wish.applied, ending, len(body), body)
    )
