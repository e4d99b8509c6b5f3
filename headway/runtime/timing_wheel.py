"""Timing wheel: one timer for many deadlines.

A deadline is noted in a slot of time, and the timer is set for the first slot with any. So a deadline costs a
dictionary operation and no timer of its own. Most are never looked at again: the callback at a slot's end knows
which of its keys still matter.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")

DEADLINE_GRAIN = 0.02
"""Width of a slot in seconds: a deadline may be reported that late."""


class TimingWheel(Generic[Key]):
    """Deadlines in slots of time.

    Arguments:
        clock: monotonic seconds, of the same pace as the event loop's.
        passed: takes the keys of each slot that has ended.
    """

    def __init__(self, clock: Callable[[], float], passed: Callable[[Sequence[Key]], None]) -> None:
        self._clock = clock
        self._passed = passed
        self._slots: dict[int, list[Key]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._newest: list[Key] = []
        self._begins = self._ends = 0.0
        """Keys of the slot used last, and its first deadline and the end of its range."""

    def watch(self, key: Key, deadline: float) -> None:
        """Call `passed` with `key` after instant `deadline`."""
        if self._begins <= deadline < self._ends:
            self._newest.append(key)
            return
        slot = int(deadline / DEADLINE_GRAIN) + 1
        gathered = self._slots.get(slot)
        if gathered is None:
            gathered = self._slots[slot] = []
            heapq.heappush(self._order, slot)
            if self._order[0] == slot:
                self._set_timer()
        gathered.append(key)
        self._newest, self._begins, self._ends = gathered, (slot - 1) * DEADLINE_GRAIN, slot * DEADLINE_GRAIN

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
            gathered = self._slots.pop(heapq.heappop(self._order))
            if gathered is self._newest:
                self._ends = 0.0
            self._passed(gathered)
        self._set_timer()
