"""Viewers of the dashboard's stream: each with a bounded buffer of events that were encoded once for all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

BUFFER = 32
"""Most events that wait for one viewer; who is further behind is dropped."""
DROP_GRACE = 5.0
"""Seconds in which a dropped viewer can take what says so, before its connection is cut."""
TOO_SLOW = b'event: dropped\ndata: {"reason":"this page did not take its events in time"}\n\n'
"""Last event of a viewer that is dropped."""


class Viewer:
    """One open stream.

    Arguments:
        cut: closes its connection at once.
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self.ended = False

    def offer(self, event: bytes) -> None:
        """Have an event sent; a viewer with a full buffer is dropped, and told so."""
        if self.ended:
            return
        if len(self._events) >= BUFFER:
            self._events.clear()
            self._events.append(TOO_SLOW)
            self._grace = asyncio.get_running_loop().call_later(DROP_GRACE, self._cut)
            self.ended = True
        else:
            self._events.append(event)
        self._news.set()

    def end(self) -> None:
        """End the stream after what waits."""
        self.ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Next event, or all that wait as one piece; None at the end."""
        while not self._events:
            if self.ended:
                return None
            self._news.clear()
            await self._news.wait()
        found = b"".join(self._events)
        self._events.clear()
        return found

    def left(self) -> None:
        """Note that the connection has ended."""
        self.ended = True
        self._events.clear()
        if self._grace is not None:
            self._grace.cancel()
