"""Deadlines of pending requests, and of tasks that the gateway waits for even after their deadline.

Requests with the usual timeout share one timer. They expire in the order of the pending table, so their deadlines needn't
be stored. Stored deadlines would be kept forty times longer than most requests last, and fill the CPU caches. A timing
wheel stores the deadlines of requests with other timeouts."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from headway.core.queue_limits import bytes_of
from headway.gateway.pending import Key, PendingRequest, PendingTable
from headway.model import Failure, Reply

DEADLINE_GRAIN = 0.02  # How many seconds late a deadline may be reported, and the width of a TimingWheel's slots.
LATE_SECONDS = 60.0  # Seconds to wait for a task's outcome after its deadline. Few batches run that long.
MOST = 10_000  # Maximum number of late tasks at a gateway. Beyond it, the oldest is ended as timed out.
MOST_BYTES = 16 << 20  # Maximum bytes of the late tasks' large inputs. Beyond it, the oldest is ended, too.
_Name = tuple[str, str, int]  # Tenant, id and nonce.
K = TypeVar("K")


class TimingWheel(Generic[K]):
    """One timer for many deadlines, which are grouped into time slots. The timer is set for the end of the first slot, so a
    deadline costs a dictionary operation instead of a timer. When a slot has passed, `passed` is called with all its keys.
    It must ignore keys that no longer matter, because keys are never removed. `clock` must run at the pace of the event
    loop's clock."""

    def __init__(self, clock: Callable[[], float], passed: Callable[[Sequence[K]], None]) -> None:
        self._clock, self._passed = clock, passed
        self._slots: dict[int, list[K]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._newest: list[K] = []  # Keys of the last slot used. It begins at `_begins` and ends at `_ends`.
        self._begins = self._ends = 0.0

    def watch(self, key: K, deadline: float) -> None:
        """Call `passed` with `key` after `deadline`."""
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


class Deadlines:
    """Deadlines of the requests in a pending table.

    Arguments:
        clock: returns monotonic seconds, at the pace of the event loop's clock.
        usual: timeout in seconds of most requests.
        passed: called with the keys of overdue requests, up to DEADLINE_GRAIN seconds late. It must remove these requests.

    Attributes:
        runs: True while the shared timer is running. Requests with the usual timeout then don't need `watch`.
    """

    def __init__(
        self, clock: Callable[[], float], pending: PendingTable, usual: float, passed: Callable[[Sequence[Key]], None]
    ) -> None:
        self._clock, self._pending, self.usual, self._passed = clock, pending, usual, passed
        self._others = TimingWheel(clock, passed)
        self.runs = False

    def watch(self, key: Key, deadline: float, timeout: float) -> None:
        """Call `passed` after `deadline`, which is `timeout` seconds away, if the request is still in the table."""
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
    """Tasks that are still running after their deadline. No request waits for them any more.

    Clients can still poll for a late task's outcome. So the gateway waits for the outcome for a while, and only then counts
    and records the task, by calling `end`. Late tasks aren't in the pending table, because they are never resubmitted."""

    def __init__(self, clock: Callable[[], float], end: Callable[[Sequence[PendingRequest]], None]) -> None:
        self._clock, self._end = clock, end
        self._held: dict[_Name, PendingRequest] = {}  # Oldest first.
        self._bytes = 0
        self._deadlines: TimingWheel[_Name] = TimingWheel(clock, self._overdue)

    def hold(self, task: PendingRequest, failure: Failure) -> None:
        """Keep a task until its outcome arrives. If that takes too long, end it with `failure`."""
        entry = task.entry
        task.reply = Reply(entry.id, entry.tenant, None, failure)
        name = (entry.tenant, entry.id, entry.nonce)
        self._held[name] = task
        self._bytes += bytes_of(entry)
        self._deadlines.watch(name, self._clock() + LATE_SECONDS)
        while self._held and (len(self._held) > MOST or self._bytes > MOST_BYTES):
            self._overdue([next(iter(self._held))])

    def take(self, reply: Reply, ended: list[PendingRequest]) -> bool:
        """If a reply is for a late task, append the task to `ended`. Otherwise return False."""
        task = self._let_go((reply.tenant, reply.id, reply.nonce))
        if task is not None:
            task.reply = reply
            ended.append(task)
        return task is not None

    def end_all(self) -> None:
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
