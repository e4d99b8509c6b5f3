"""A request that a gateway holds: who waits for it, until when, over which line; and who hears what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from headway.core.dedup import is_task
from headway.gateway.broker_session import BrokerSession
from headway.model import Entry, Principal, Reply


class ReplySink(Protocol):
    """Where an answer goes."""

    def answer(self, reply: Reply) -> None:
        """Take the answer; called once, on a later turn of the loop than the `submit`."""
        ...

    def admitted(self) -> None:
        """Hear that a task is in the broker: its outcome will be kept, whoever waits for it."""
        ...


class FutureSink:
    """Sink of a coroutine that waits."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        """Take the answer; one that comes after the coroutine has left is dropped."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def admitted(self) -> None:
        """Take no note of it."""


class PendingRequest(msgspec.Struct, eq=False):
    """One request whose client waits.

    Attributes:
        sink: gets the answer.
        principal: who asked; None for who only waits for another's outcome: that is no request, and not counted.
        entry: what was handed on.
        since: instant of its arrival, in seconds.
        deadline: instant by which it is answered, in seconds.
        line: over which it went.
        unadmitted: whether it is a task that the broker is not known to have.
    """

    sink: ReplySink
    principal: Principal | None
    entry: Entry
    since: float
    deadline: float
    line: BrokerSession
    unadmitted: bool = False

    def renewed(self, now: float) -> Entry:
        """The entry with what is left of its time at instant `now`."""
        left = self.deadline - now
        wait = min(self.entry.queue_timeout, left)
        return msgspec.structs.replace(self.entry, timeout=left, queue_timeout=wait)

    @property
    def task(self) -> bool:
        """Whether its outcome is asked for by its id, so that the broker keeps it."""
        return is_task(self.entry)


class _Nobody:
    """The sink of a task that nobody waits for."""

    def answer(self, reply: Reply) -> None:
        pass

    def admitted(self) -> None:
        pass


NOBODY = _Nobody()

Note = tuple[Principal, Entry, float, Reply]
"""A request that has its outcome: who asked, what, how long it took in seconds, and what came of it."""


class Journal(Protocol):
    """Is told of every request that has its outcome."""

    def add(self, notes: Sequence[Note]) -> None:
        """Take notes; never waits."""
        ...
