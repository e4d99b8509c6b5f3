"""The departure board of one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headway.core.departure_board import HISTORY_SECONDS, RECENT_NOTICES, RECENT_SECONDS, WATCH_SECONDS, coarse
from headway.model.board import Notice, Posted


class MemoryBoard:
    """Board in memory. See `headway.ports.Board`.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[tuple[int, Notice]] = deque(maxlen=RECENT_NOTICES)
        self._history: deque[Notice] = deque(maxlen=2 * HISTORY_SECONDS)
        self._posted = 0
        self._watched_until = 0.0
        self._news = asyncio.Event()

    async def post(self, notice: Notice) -> Posted:
        """See Board."""
        now = self._clock()
        if not notice.empty:
            self._posted += 1
            self._recent.append((self._posted, replace(notice, at=now)))
            if (kept := coarse(notice)) is not None:
                self._history.append(replace(kept, at=now))
            while self._recent[0][1].at < now - RECENT_SECONDS:
                self._recent.popleft()
            while self._history and self._history[0].at < now - HISTORY_SECONDS:
                self._history.popleft()
            self._news.set()
        return Posted(watched=now < self._watched_until, records=True)

    async def history(self) -> Sequence[Notice]:
        """See Board."""
        return list(self._history)

    async def read(self, after: str) -> tuple[Sequence[Notice], str]:
        """See Board."""
        seen = int(after or 0)
        while True:
            self._watched_until = self._clock() + WATCH_SECONDS
            found = [notice for number, notice in self._recent if number > seen]
            if found or not after:
                return found, str(self._posted)
            self._news = news = asyncio.Event()
            try:
                await asyncio.wait_for(news.wait(), WATCH_SECONDS / 2)
            except TimeoutError:
                return [], after
