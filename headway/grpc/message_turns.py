"""Turns of the event loop for received frames and messages.

Reading frames takes time of the event loop. Taking in a message, from its bytes to the gateway, takes up to some milliseconds,
and a client may have a message ready on each of many streams. So in each turn of the loop, all of this together gets a
millisecond. The rest waits here: tenants take turns, and the rest of the process runs in between. Nothing more is read from a
client whose work waits, so flow control holds it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from headway.core.tenant_turns import TenantTurns
from headway.runtime.fair_turns import give_way

SHARE = 0.001
"""Seconds in one turn of the loop after which no more work begins."""

T = TypeVar("T")


class MessageTurns:
    """Queue of one port's work. Owners take turns, and the work of each owner is done in order. `clock` is in monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._waiting = TenantTurns[Callable[[], None]]()
        self._spent = 0.0
        self._asked = False
        """True if `_begin` is called in the next turn of the loop."""

    @property
    def free(self) -> bool:
        return self._spent < SHARE and not self._waiting

    def wait(self, owner: str, work: Callable[[], None]) -> None:
        """Do work, which raises nothing, in a later turn of the loop. It waits behind other work of its owner."""
        self._waiting.add(owner, work)
        self._ask()

    def add(self, seconds: float) -> None:
        """Count time that is spent in this turn of the loop, or will be in the next."""
        self._spent += seconds
        self._ask()

    def spend(self, since: float) -> float:
        """Count the time since an instant, and return the present instant in seconds."""
        now = self.clock()
        self.add(now - since)
        return now

    async def take(self, owner: str, work: Callable[[float], T]) -> T:
        """Take a message in, at once or in a later turn of the loop. `work` gets the seconds that it has waited. Return what it
        returns, and raise what it raises. If the caller is cancelled, the work may have been done or not."""
        if self.free:
            before = self.clock()
            try:
                return work(0.0)
            finally:
                self.spend(before)
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.wait(owner, partial(self._serve, turn, work, self.clock()))
        del work
        try:
            return await turn
        finally:
            del turn  # Its error holds this frame, which would hold the error.

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if self._waiting:
            give_way()
        self._asked, self._spent = False, 0.0
        for _ in range(len(self._waiting)):  # Work that is added from here on waits for the next turn.
            if self._spent >= SHARE:
                break
            self._waiting.take()()
        if self._waiting:
            self._ask()

    def _serve(self, turn: asyncio.Future[Any], work: Callable[[float], Any], since: float) -> None:
        if turn.done():  # Its call has ended.
            return
        before = self.clock()
        try:
            turn.set_result(work(before - since))
        except Exception as exc:
            turn.set_exception(exc)
        finally:
            del turn, work  # An error would hold them in a cycle.
            self.spend(before)
