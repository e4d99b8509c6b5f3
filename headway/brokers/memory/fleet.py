"""The fleet of a single process, and its departure board."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from headway.core.capacity import FORGOTTEN_AFTER
from headway.core.departure_board import RECENT_NOTICES, RECENT_SECONDS, WATCH_SECONDS, BoardHistory
from headway.core.health import DEPARTED_SECONDS, MOST_DEPARTED, OFFLINE_AFTER, lost
from headway.model import Capacity, Departed, Drain, ProcessInfo, Rollout
from headway.model.board import HistoryRow, News, Notice, Posted
from headway.ports import Board, Fleet


class MemoryFleet(Fleet):
    """Fleet in memory. See `headway.ports.Fleet`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, ProcessInfo] = {}
        self._capacities: dict[str, Capacity] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._drains: dict[str, Drain] = {}
        self._departed: dict[str, Departed] = {}
        self._leader = ""
        self._leads_until = 0.0
        self._loads: dict[str, tuple[str, float]] = {}  # For each model, the process that may load it, and until when.

    async def heartbeat(self, member: ProcessInfo) -> Collection[str]:
        self._members[member.id] = replace(member, last_seen=self._clock())
        return self._drains.keys()

    async def leave(self, id: str) -> None:
        self._members.pop(id, None)
        if self._leader == id:
            self._leader = ""

    async def depart(self, gone: Departed) -> None:
        self._record(replace(gone, at=self._clock()))

    async def departed(self) -> Sequence[Departed]:
        await self.members()
        since = self._clock() - DEPARTED_SECONDS
        self._departed = {id: member for id, member in self._departed.items() if member.at >= since}
        return list(self._departed.values())

    async def members(self) -> Sequence[ProcessInfo]:
        since = self._clock() - OFFLINE_AFTER
        for member in [member for member in self._members.values() if member.last_seen < since]:
            self._record(lost(self._members.pop(member.id)))
        return list(self._members.values())

    def _record(self, gone: Departed) -> None:
        self._departed[gone.id] = gone
        if len(self._departed) > MOST_DEPARTED:
            del self._departed[min(self._departed.values(), key=lambda gone: gone.at).id]

    async def acquire_leadership(self, candidate: str, seconds: float) -> float:
        now = self._clock()
        if self._leader not in ("", candidate) and now < self._leads_until:
            return self._leads_until - now
        self._leader, self._leads_until = candidate, now + seconds
        return 0.0

    async def acquire_load(self, model: str, candidate: str, seconds: float) -> bool:
        now = self._clock()
        holder, until = self._loads.get(model, (candidate, now))
        if holder != candidate and now < until:
            return False
        self._loads[model] = candidate, now + seconds
        return True

    async def publish(self, capacity: Capacity) -> None:
        self._capacities[capacity.model] = replace(capacity, measured_at=self._clock())

    async def withdraw_capacity(self, model: str) -> None:
        self._capacities.pop(model, None)

    async def capacities(self) -> Sequence[Capacity]:
        since = self._clock() - FORGOTTEN_AFTER
        self._capacities = {
            model: capacity for model, capacity in self._capacities.items() if capacity.measured_at >= since
        }
        return list(self._capacities.values())

    async def rollouts(self) -> Sequence[Rollout]:
        return list(self._rollouts.values())

    async def drains(self) -> Sequence[Drain]:
        return list(self._drains.values())

    async def drain(self, drains: Sequence[Drain], seen: Collection[str] | None = None) -> bool:
        if seen is not None and self._drains.keys() != set(seen):
            return False
        self._drains.update({drain.name: drain for drain in drains})
        return True

    async def undrain(self, names: Collection[str]) -> None:
        self._drains = {name: drain for name, drain in self._drains.items() if name not in names}

    async def keep_rollout(self, rollout: Rollout) -> bool:
        current = self._rollouts.get(rollout.model)
        if current is not None and current.revision != rollout.revision - 1:
            return False
        self._rollouts[rollout.model] = rollout
        return True


class MemoryBoard(Board):
    """Board in memory. See `headway.ports.Board`."""

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
            unread = self._after(seen)
            if unread.notices:
                return unread
            self._news = news = asyncio.Event()
            try:
                async with asyncio.timeout(WATCH_SECONDS / 2):
                    await news.wait()
            except TimeoutError:
                return unread

    def _after(self, seen: int) -> News:
        return News([notice for number, notice in self._recent if number > seen], str(self._posted))
