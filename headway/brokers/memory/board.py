"""The departure board of one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headway.core.departure_board import RECENT_NOTICES, RECENT_SECONDS, WATCH_SECONDS, BoardHistory
from headway.model.board import HistoryRow, News, Notice, Posted
from headway.ports import Board


class MemoryBoard(Board):
    """Board in memory. See `headway.ports.Board`.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[tuple[int, Notice]] = deque(maxlen=RECENT_NOTICES)
        self._history = BoardHistory()
        self._posted = 0
        self._watched_until = 0.0
        self._news = asyncio.Event()

    async def post(self, notice: Notice) -> Posted:
        now = self._clock()
        if not notice.empty:
            self._posted += 1
            stamped = replace(notice, at=now)
            self._recent.append((self._posted, stamped))
            self._history.add(stamped)
            while self._recent[0][1].at < now - RECENT_SECONDS:
                self._recent.popleft()
            self._news.set()
        return Posted(watched=now < self._watched_until, records=True)

    async def history(self) -> tuple[Sequence[HistoryRow], News]:
        self._watched_until = self._clock() + WATCH_SECONDS
        return [
            replace(row, latencies=dict(row.latencies), scalings=list(row.scalings)) for row in self._history.rows()
        ], self._after(0)

    async def read(self, after: str) -> News:
        seen = int(after)
        while True:
            self._watched_until = self._clock() + WATCH_SECONDS
            found = self._after(seen)
            if found.notices:
                return found
            self._news = news = asyncio.Event()
            try:
                async with asyncio.timeout(WATCH_SECONDS / 2):
                    await news.wait()
            except TimeoutError:
                return found

    def _after(self, seen: int) -> News:
        return News([notice for number, notice in self._recent if number > seen], str(self._posted))
