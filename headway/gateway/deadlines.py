"""Deadlines of pending requests, with one timer for all that have the usual time.

A table of pending requests holds them in the order in which they came. Those that have the same time are due in that order, so
nothing is noted of them: whoever is first in the table is due first. What is noted for each request would stay in memory until its
deadline, four seconds for an answer that takes a tenth of one, and would push what the next request needs out of the caches.
A request with another time is noted in a timing wheel.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from headway.gateway.pending import Key, PendingTable
from headway.runtime.timing_wheel import DEADLINE_GRAIN, TimingWheel


class Deadlines:
    """Deadlines of the requests in a table.

    Arguments:
        clock: monotonic seconds, of the same pace as the event loop's.
        pending: table of the requests. A request joins it as it is watched, and leaves it when it ends.
        usual: seconds that most requests have in all.
        passed: takes the keys of requests whose deadlines have passed, at most DEADLINE_GRAIN seconds later. They leave the table.

    Attributes:
        usual: seconds that most requests have in all.
        runs: whether the timer of these runs, so that one more needs no `watch`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        pending: PendingTable,
        usual: float,
        passed: Callable[[Sequence[Key]], None],
    ) -> None:
        self._clock, self._pending, self.usual, self._passed = clock, pending, usual, passed
        self._others = TimingWheel(clock, passed)
        self.runs = False

    def watch(self, key: Key, deadline: float, timeout: float) -> None:
        """Have `passed` called with `key` after instant `deadline`, unless its request has left by then; `timeout`: seconds until then."""
        if timeout != self.usual:
            self._others.watch(key, deadline)
        elif not self.runs:
            self._set_timer(deadline)

    def _set_timer(self, deadline: float) -> None:
        told = (math.floor(deadline / DEADLINE_GRAIN) + 1) * DEADLINE_GRAIN
        self.runs = True
        asyncio.get_running_loop().call_later(max(told - self._clock(), 0.001), self._fire)

    def _fire(self) -> None:
        """Tell of those whose deadlines have passed, and wait for the first of those that are left."""
        self.runs, now = False, self._clock()
        due: list[Key] = []
        for key, one in self._pending.items():
            if one.entry.timeout == self.usual:
                if one.deadline > now:
                    self._set_timer(one.deadline)
                    break
                due.append(key)
        if due:
            self._passed(due)
