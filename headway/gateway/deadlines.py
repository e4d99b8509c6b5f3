"""Deadlines of pending requests, and tasks whose outcome is still awaited after their deadline.

Requests with the usual timeout share one timer: the pending table keeps them in order of arrival, so they are due in that
order, and nothing is stored for each. Stored deadlines would outlive most requests forty times over, and push what the next
request needs out of the CPU caches. Any other timeout goes into a timing wheel.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from headway.core.memory_room import bytes_of
from headway.gateway.pending import Key, PendingRequest, PendingTable
from headway.model import Failure, Reply
from headway.runtime.timing_wheel import DEADLINE_GRAIN, TimingWheel

LATE_SECONDS = 60.0
"""Seconds to wait for a task's outcome after its deadline. Few batches run that long."""
MOST = 10_000
"""Maximum number of late tasks of a gateway. Beyond that, the oldest ends as timed out."""
MOST_BYTES = 16 << 20
"""Maximum size in bytes of the late tasks' large inputs, which the ledger may need. Beyond that, the oldest ends as well."""

_Name = tuple[str, str, int]
"""Tenant, id and nonce."""


class Deadlines:
    """Deadlines of the requests in a table.

    Arguments:
        clock: monotonic seconds, at the pace of the event loop's clock.
        pending: table of the requests. A request joins it when it is watched, and leaves it when it ends.
        usual: timeout in seconds of most requests.
        passed: called with the keys of overdue requests, up to DEADLINE_GRAIN seconds late. It removes them from the table.

    Attributes:
        usual: see the argument.
        runs: True while the shared timer runs; requests with the usual timeout then need no `watch`.
    """

    def __init__(
        self, clock: Callable[[], float], pending: PendingTable, usual: float, passed: Callable[[Sequence[Key]], None]
    ) -> None:
        self._clock, self._pending, self.usual, self._passed = clock, pending, usual, passed
        self._others = TimingWheel(clock, passed)
        self.runs = False

    def watch(self, key: Key, deadline: float, timeout: float) -> None:
        """Call `passed` with `key` after instant `deadline`, `timeout` seconds from now, if the request is still in the table."""
        if timeout != self.usual:
            self._others.watch(key, deadline)
        elif not self.runs:
            self._set_timer(deadline)

    def _set_timer(self, deadline: float) -> None:
        fires_at = (math.floor(deadline / DEADLINE_GRAIN) + 1) * DEADLINE_GRAIN
        self.runs = True
        asyncio.get_running_loop().call_later(max(fires_at - self._clock(), 0.001), self._fire)

    def _fire(self) -> None:
        self.runs, now = False, self._clock()
        due: list[Key] = []
        for key, pending in self._pending.items():
            if pending.entry.timeout == self.usual:
                if pending.deadline > now:
                    self._set_timer(pending.deadline)
                    break
                due.append(key)
        if due:
            self._passed(due)


class LateTasks:
    """Tasks that still run after their deadline, when no client waits.

    They can still be polled for their outcome. So they are counted and recorded only when it comes, or when it is given up.
    They aren't in the pending table, because nothing is resubmitted for them.

    Arguments:
        clock: monotonic seconds.
        end: called with tasks whose outcome hasn't come in time. Their reply says so.
    """

    def __init__(self, clock: Callable[[], float], end: Callable[[Sequence[PendingRequest]], None]) -> None:
        self._clock, self._end = clock, end
        self._held: dict[_Name, PendingRequest] = {}
        """Oldest first."""
        self._bytes = 0
        self._deadlines: TimingWheel[_Name] = TimingWheel(clock, self._overdue)

    def hold(self, task: PendingRequest, failure: Failure) -> None:
        """Hold a task until its outcome comes. If it doesn't come in time, the task ends with `failure`."""
        entry = task.entry
        task.reply = Reply(entry.id, entry.tenant, None, failure)
        name = (entry.tenant, entry.id, entry.nonce)
        self._held[name] = task
        self._bytes += bytes_of(entry)
        self._deadlines.watch(name, self._clock() + LATE_SECONDS)
        while self._held and (len(self._held) > MOST or self._bytes > MOST_BYTES):
            self._overdue([next(iter(self._held))])

    def take(self, reply: Reply, ended: list[PendingRequest]) -> bool:
        """Append the late task that a reply is for to `ended`. Returns False if there is none."""
        if not self._held:
            return False
        task = self._let_go((reply.tenant, reply.id, reply.nonce))
        if task is not None:
            task.reply = reply
            ended.append(task)
        return task is not None

    def end_all(self) -> None:
        """End all of them now as timed out."""
        self._overdue(list(self._held))

    def _overdue(self, names: Sequence[_Name]) -> None:
        ended = [task for name in names if (task := self._let_go(name)) is not None]
        if ended:
            self._end(ended)

    def _let_go(self, name: _Name) -> PendingRequest | None:
        task = self._held.pop(name, None)
        if task is not None:
            self._bytes -= bytes_of(task.entry)
        return task
