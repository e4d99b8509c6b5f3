"""Timing wheel: one timer for many deadlines.

Deadlines are grouped into slots of time, and the timer is set for the end of the first slot. So a deadline costs a dictionary
operation instead of a timer. Deadlines aren't removed; the callback at the end of a slot must know which keys still matter.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")

DEADLINE_GRAIN = 0.02
"""Width of a slot in seconds. A deadline may be reported that late."""


class TimingWheel(Generic[Key]):
    """Deadlines in slots of time.

    Arguments:
        clock: monotonic seconds, at the pace of the event loop's clock.
        passed: called with the keys of each slot that has ended.
    """

    def __init__(self, clock: Callable[[], float], passed: Callable[[Sequence[Key]], None]) -> None:
        self._clock, self._passed = clock, passed
        self._slots: dict[int, list[Key]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._newest: list[Key] = []
        """Keys of the slot used last, which begins and ends at these instants."""
        self._begins = self._ends = 0.0

    def watch(self, key: Key, deadline: float) -> None:
        """Call `passed` with `key` after instant `deadline`."""
        if self._begins <= deadline < self._ends:
            self._newest.append(key)
            return
        slot = int(deadline / DEADLINE_GRAIN) + 1
        keys = self._slots.get(slot)
        if keys is None:
            keys = self._slots[slot] = []
            heapq.heappush(self._order, slot)
            if self._order[0] == slot:
                self._set_timer()
        keys.append(key)
        self._newest, self._begins, self._ends = keys, (slot - 1) * DEADLINE_GRAIN, slot * DEADLINE_GRAIN

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._order:
            delay = self._order[0] * DEADLINE_GRAIN - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(delay, 0.001), self._fire)

    def _fire(self) -> None:
        now = self._clock()
        while self._order and self._order[0] * DEADLINE_GRAIN <= now:
            keys = self._slots.pop(heapq.heappop(self._order))
            if keys is self._newest:
                self._ends = 0.0
            self._passed(keys)
        self._set_timer()
