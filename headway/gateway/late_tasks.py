"""Late tasks: their deadline has passed, nobody waits, and the broker still has an outcome to tell.

A task that runs on when its deadline passes ends with its outcome, which whoever asks by its id gets. So it is not over for
those who count and record requests, either, until that outcome comes, or will not come any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.memory_room import bytes_of
from headway.gateway.pending import PendingRequest
from headway.model import Failure, Reply
from headway.runtime.timing_wheel import TimingWheel

LATE_SECONDS = 60.0
"""Seconds after its deadline for which a task's outcome is waited for. A batch seldom takes as long."""

MOST = 10_000
"""Most late tasks of a gateway. One more ends the one that has waited the longest, as late."""
MOST_BYTES = 16 << 20
"""Most bytes of their large inputs, which are held for the ledger; what exceeds it ends the oldest, too."""

_Name = tuple[str, str, int]


class LateTasks:
    """Late tasks of one gateway. They are not among its pending requests: nothing is offered again for them.

    Arguments:
        clock: monotonic seconds.
        end: takes tasks whose outcome has not come in time, with the reply that says so.
    """

    def __init__(self, clock: Callable[[], float], end: Callable[[Sequence[PendingRequest]], None]) -> None:
        self._clock, self._end = clock, end
        self._held: dict[_Name, PendingRequest] = {}
        """Late tasks by tenant, id and nonce, the oldest first."""
        self._bytes = 0
        self._deadlines: TimingWheel[_Name] = TimingWheel(clock, self._overdue)

    def hold(self, task: PendingRequest, failure: Failure) -> None:
        """Hold a task until its outcome comes. `failure`: what it ends with if that does not come."""
        entry = task.entry
        task.reply = Reply(entry.id, entry.tenant, None, failure)
        name = (entry.tenant, entry.id, entry.nonce)
        self._held[name] = task
        self._bytes += bytes_of(entry)
        self._deadlines.watch(name, self._clock() + LATE_SECONDS)
        while self._held and (len(self._held) > MOST or self._bytes > MOST_BYTES):
            self._overdue([next(iter(self._held))])

    def take(self, reply: Reply, ended: list[PendingRequest]) -> bool:
        """Take a reply. The late task that it is for joins those that have ended; False if it is for none."""
        if not self._held:
            return False
        task = self._let_go((reply.tenant, reply.id, reply.nonce))
        if task is not None:
            task.reply = reply
            ended.append(task)
        return task is not None

    def end_all(self) -> None:
        """End all of them now, as late."""
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
