"""Pending requests: their sinks, their deadlines, and their ends. An observer or a sink that fails harms no other."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headway import errors
from headway.core.dedup import is_task, task_followed
from headway.gateway.lane import Lane
from headway.gateway.several_inputs import SeveralInputs, WholeOutcome
from headway.model import Entry, Principal, Reply
from headway.runtime.logger import get_logger

if TYPE_CHECKING:
    from headway.gateway.broker_session import BrokerSession

log = get_logger(__name__)

Key = tuple[str, str]
"""Tenant and id of a request."""


class ReplySink(Protocol):
    """Destination of an answer."""

    def answer(self, reply: Reply) -> None:
        """Take the answer; called once, on a later turn of the loop than the `submit`."""

    def admitted(self) -> None:
        """Note that the broker has the request. Of a task, the outcome will be kept, whoever waits for it. By default, do nothing.

        Called, at most once, for tasks and for parts of a request under an idempotency key, unless the answer comes first.
        """
        return


class FutureSink(ReplySink):
    """Sink of a coroutine that waits.

    Attributes:
        replies: the reply, or those to several inputs.
    """

    __slots__ = ("replies",)

    def __init__(self) -> None:
        self.replies: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        """Take the answer; one that comes after the coroutine has left is dropped."""
        self.answer_all((reply,))

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to several inputs, or the failure of one."""
        if not self.replies.done():
            self.replies.set_result(replies)


class _Nobody(ReplySink):
    """Sink of a request that nobody waits for."""

    def answer(self, reply: Reply) -> None:
        pass


NOBODY = _Nobody()


class Ending(enum.Enum):
    """Ways in which a request ends."""

    REPLIED = "replied"
    """The broker brought the outcome."""
    ANSWERED = "answered"
    """The broker brought outputs and nothing beside them, all of one batch, to requests that came by lanes."""
    TIMED_OUT = "timed out"
    """The gateway answered: the deadline passed, or the process ends."""
    REFUSED = "refused"
    """The broker did not admit the request, or a function of the input policy did not."""
    TURNED_AWAY = "turned away"
    """The gateway, or the connection, refused the request at once; it was never pending."""
    LEFT = "left"
    """The client left, or deleted the request."""


UNANSWERED = Reply("", "")
"""Outcome of a request that has none yet."""


class PendingRequest(msgspec.Struct, eq=False):
    """One request from its submission to its end.

    Attributes:
        sink: sink that gets the answer.
        principal: principal of the request.
        entry: entry that was handed on.
        since: instant of its arrival, in seconds.
        deadline: instant by which it is answered, in seconds.
        session: session over which it went; None for one that was turned away, or that waits for the input policy.
        unadmitted: whether its sink waits to hear that the broker has it, which is not known yet.
        reply: its outcome, once it has ended.
        several: request with several inputs of which this is one; None for a request by itself.
        lane: lane by which it came; None for one that came by `submit`.
        key: key under which a request that came by a lane is in the table.
    """

    sink: ReplySink
    principal: Principal
    entry: Entry
    since: float
    deadline: float
    session: BrokerSession | None
    unadmitted: bool = False
    reply: Reply = UNANSWERED
    several: SeveralInputs | None = None
    lane: Lane | None = None
    key: Key = ("", "")

    @property
    def whole(self) -> WholeOutcome | None:
        """Outcome of the request with several inputs whose id this one has, as it is the first of them; else None."""
        several = self.several
        return several.whole if several is not None and several.count > 1 and self.entry.id == several.id else None

    @property
    def part_of(self) -> str:
        """Id of the request with several inputs of which this is a further one; empty for a request."""
        several = self.several
        return several.id if several is not None and several.count > 1 and self.entry.id != several.id else ""

    @property
    def ended(self) -> bool:
        """Whether it has its outcome."""
        return self.reply is not UNANSWERED

    @property
    def left(self) -> bool:
        """Whether nobody wants its outcome any more: its client left, or deleted it."""
        return self.reply.failure is not None and self.reply.failure.code == errors.CANCELLED

    @property
    def task(self) -> bool:
        """Whether its outcome is fetched by its id, so that the broker keeps it."""
        return is_task(self.entry)

    @property
    def follows(self) -> bool:
        """Whether it only waits for the outcome of a task. It is no request then: nothing is counted or recorded when it ends."""
        return bool(task_followed(self.entry))

    def refreshed(self, now: float) -> Entry:
        """Entry with what is left of its time at instant `now`."""
        left = self.deadline - now
        wait = min(self.entry.queue_timeout, left)
        return msgspec.structs.replace(self.entry, timeout=left, queue_timeout=wait)


class PendingTable(dict[Key, PendingRequest]):
    """All requests that a gateway holds, by tenant and id. The gateway changes it; its sessions read it."""

    def of(self, entry: Entry) -> PendingRequest | None:
        """Pending request of an entry, unless another submission has its id by now."""
        pending = self.get((entry.tenant, entry.id))
        return pending if pending is not None and pending.entry.nonce == entry.nonce else None

    def newest(self, id: str, tenant: str | None) -> PendingRequest | None:
        """Newest pending request of an id, of this tenant if one is named."""
        found = (one for one in reversed(self.values()) if one.entry.id == id and tenant in (None, one.entry.tenant))
        return next(found, None)

    def on(self, session: BrokerSession) -> list[PendingRequest]:
        """All requests that wait for an answer over a session."""
        return [pending for pending in self.values() if pending.session is session]

    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Entries of `entries` that still wait for an answer over a session, with what is left of their time.

        An outage counts as time, but not as time in the queue.
        """
        left = []
        for entry in entries:
            pending = self.of(entry)
            if pending is not None and pending.session is session and pending.deadline > now:
                left.append(pending.refreshed(now))
        return left


class Observer(Protocol):
    """Observer of every request that has ended."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Take note of requests that ended together; never waits.

        Arguments:
            requests: each with its reply and its principal.
            ending: way in which they ended.
            now: instant of their end, in seconds.
        """


def finish(observers: Sequence[Observer], ended: Sequence[PendingRequest], ending: Ending, now: float) -> None:
    """End requests that have their replies, each once; see Observer."""
    for observer in observers:
        try:
            observer.finished(ended, ending, now)
        except Exception:
            log.exception("an observer of requests has failed", requests=len(ended))
    for pending in ended:
        sink = pending.sink
        pending.sink = NOBODY
        try:
            sink.answer(pending.reply)
        except Exception:
            log.exception("an answer could not be written", request_id=pending.reply.id)


def tell(sink: ReplySink, reply: Reply) -> None:
    """Give a sink its answer."""
    try:
        sink.answer(reply)
    except Exception:
        log.exception("an answer could not be written", request_id=reply.id)
