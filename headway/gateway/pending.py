"""Requests that a gateway holds: by themselves or of several inputs; their sinks, their deadlines, and their ends.

An observer or a sink that fails harms no other.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headway import errors
from headway.core import dedup, values
from headway.core.dedup import is_task, task_followed
from headway.core.parameters import canonical
from headway.gateway.broker_session import BrokerSession
from headway.gateway.judge import CallerId, Judge
from headway.gateway.lane import Lane
from headway.model import (
    BatchRun,
    DedupKind,
    Entry,
    Failure,
    Principal,
    QueueName,
    Reply,
    TraceContext,
    Value,
)
from headway.runtime.logger import get_logger
from headway.runtime.spans import SpanLink

log = get_logger(__name__)

Key = tuple[str, str]
"""Tenant and id of a request."""
PART = "\x01"
"""Sign between the idempotency key of a request and the number of its part, in the keys of the parts but the first."""


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


class RequestTrace(msgspec.Struct, eq=False):
    """Trace of one request.

    Attributes:
        context: its SERVER span.
        parent: span of the client's that it names; None for none.
        way: see RequestOptions.
        begun: instant of its arrival.
        missing: inputs that have not ended.
        links: links of its SERVER span.
        told: whether that span is recorded.
    """

    context: TraceContext
    parent: TraceContext | None
    way: str
    begun: float
    missing: int
    links: tuple[SpanLink, ...] = ()
    told: bool = False


class WholeOutcome(msgspec.Struct, eq=False):
    """Outcome of a request with several inputs, as its client gets it; there are no inputs and outputs in it.

    Attributes:
        id: id of the request.
        seconds: seconds from the request to its outcome; negative while it has none.
        failure: why it failed; None when it did not.
        ran: run of the batch that the failure, or the first output, came from; None when it came from none.
        shared: kind of the dedup key by which all of it came from another request.
        failed_part: id of the input for which it failed, if that is another than the first.
    """

    id: str
    seconds: float = -1.0
    failure: Failure | None = None
    ran: BatchRun | None = None
    shared: DedupKind | None = None
    failed_part: str = ""

    @property
    def ended(self) -> bool:
        """Whether the request has its outcome."""
        return self.seconds >= 0.0

    def end(self, reply: Reply, seconds: float, failed_part: str = "") -> None:
        """Note the outcome, unless there is one."""
        if not self.ended:
            self.seconds, self.failed_part = max(seconds, 0.0), failed_part
            self.failure, self.ran, self.shared = reply.failure, reply.ran, reply.shared


class SeveralInputs:
    """Request with several inputs, of which each is submitted, and ends, by itself.

    Arguments:
        id: id of the request.
        inputs: values for the model, at least one.
        parameters: parameters of every input; text of a JSON object, or empty.

    Attributes:
        count: number of its inputs.
        inspected: whether the input policy has been through all of them.
        judgement: verdict that all of them wait for; None for none.
        entered: whether the first of them has been made an entry.
        version: version of the model that was drawn for all of them; None as long as none was.
        trace: trace of the request; None unless it is sampled.
        whole: outcome of the request.
        payer: nonce of the input that pays for all; 0 while none does.
        ahead: whether the first goes ahead, and the others wait until the broker has it.
        equal: inputs of which only the first is submitted, by what they have in common, until the request ends; see `EqualInputs`.

    A prompt of which several choices are asked is there as often, as the same object. It is read once, or a small body would
    cost as much as one that is 128 times larger.
    """

    __slots__ = (
        "_asked", "_missing", "ahead", "count", "entered", "equal", "id", "inputs", "inspected", "judgement", "parameters", "payer",
        "trace", "version", "whole",
    )  # fmt: skip

    def __init__(self, id: str, inputs: Sequence[Value], parameters: bytes) -> None:
        self.id, self.count = id, len(inputs)
        self.inputs, self.parameters = inputs, parameters
        self.inspected = False
        self.judgement: Judgement | None = None
        self.entered = False
        self.trace: RequestTrace | None = None
        self.version: str | None = None
        self.whole = WholeOutcome(id)
        self.payer = 0
        self.ahead = False
        self.equal: dict[str, list[PendingRequest]] = {}
        self._missing = len(inputs)
        self._asked: tuple[Value, bytes] | None = None

    def take_inspected(self, inputs: Sequence[Value], parameters: bytes, judgement: Judgement | None) -> None:
        """Take inputs and parameters as the input policy leaves them."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, queue: QueueName) -> bytes:
        """SHA-256 of the whole request, however its parameters are written. `queue` names the model, with the version that is asked for."""
        hashed = hashlib.sha256()
        for part in (str(queue).encode(), canonical(self.parameters)):
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
        before, found = None, b""
        for input in self.inputs:
            if input is not before:
                before, found = input, hashlib.sha256(values.canonical(input)).digest()
            hashed.update(found)
        return hashed.digest()

    def digest_of(self, model: str, version: str, input: Value) -> bytes:
        """SHA-256 of one of the inputs with the parameters, as dedup keys have it. `version` is what the client asks for."""
        if self._asked is None or self._asked[0] is not input:
            self._asked = input, dedup.digest(model, version, input, self.parameters)
        return self._asked[1]

    def forget_equal(self) -> None:
        """Forget which inputs are equal: none gets the outcome of another any more."""
        for those in self.equal.values():
            del those[1:]
        self.equal.clear()

    def ends(self, failed: bool) -> bool:
        """Note that an input has its outcome. True, once, when the request ends with it: the first failure or the last output."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended


class Judgement:
    """Way of one request through the judges.

    Arguments:
        caller: who asks.
        texts: text of each input; one for inputs in a row that are the same object.
        judges: judges that it has yet to pass, those in shadow too.
        places: place of the first input of each text.
        count: number of inputs.
        tell: takes the verdict.
    """

    __slots__ = ("begun", "caller", "count", "decided", "judges", "pending", "places", "refusal", "tell", "texts")

    def __init__(
        self,
        caller: CallerId,
        texts: Sequence[str],
        judges: Sequence[Judge],
        places: Sequence[int],
        count: int,
        tell: Decided,
    ) -> None:
        self.caller, self.texts, self.judges = caller, texts, list(judges)
        self.places, self.count, self.tell = places, count, tell
        self.pending: list[PendingRequest] = []
        """Requests that wait for the verdict: the request, or its several inputs."""
        self.begun = self.decided = False
        self.refusal: Failure | None = None

    def wanted(self) -> bool:
        """Whether somebody still waits."""
        return any(not one.ended for one in self.pending)


class PendingRequest(msgspec.Struct, eq=False):
    """One request from its submission to its end.

    Attributes:
        sink: sink that gets the answer.
        principal: principal of the request.
        entry: entry that was handed on.
        since: instant of its arrival, in seconds.
        deadline: instant by which it is answered, in seconds.
        session: session over which it went; None for one that was turned away, or that waits for the input policy.
        key: key under which it is in the table.
        lane: lane by which it came; None for one that came by `submit`.
        several: request with several inputs of which this is one; None for a request by itself.
        unadmitted: whether its sink waits to hear that the broker has it, which is not known yet.
        reply: its outcome, once it has ended.
    """

    sink: ReplySink
    principal: Principal
    entry: Entry
    since: float
    deadline: float
    session: BrokerSession | None
    key: Key = ("", "")
    lane: Lane | None = None
    several: SeveralInputs | None = None
    unadmitted: bool = False
    reply: Reply = UNANSWERED

    @property
    def whole(self) -> WholeOutcome | None:
        """Outcome of the request with several inputs whose id this one has, as it is the first of them; else None."""
        several = self.several
        return several.whole if several is not None and several.count > 1 and self.entry.id == several.id else None

    @property
    def part_of(self) -> str:
        """For the second and later inputs of a request with several, that request's id; otherwise empty."""
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


Decided = Callable[[Sequence[PendingRequest], Failure | None], None]
"""Function that takes the requests that waited for a verdict, and their refusal if they are refused."""


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
