"""Pending requests of a gateway: their table, the sinks that get their answers, and the observers that hear of their end."""

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
from headway.model import BatchRun, DedupKind, Entry, Failure, Principal, QueueName, Reply, TraceContext, Value
from headway.runtime.logger import get_logger
from headway.runtime.spans import SpanLink

log = get_logger(__name__)

Key = tuple[str, str]
"""Tenant and id of a request."""
PART = "\x01"
"""Separates the client's idempotency key from a part's number, in the keys of all parts but the first."""


class ReplySink(Protocol):
    """Destination of an answer."""

    def answer(self, reply: Reply) -> None:
        """Take the answer. Called once, on a later turn of the event loop than `submit`."""

    def admitted(self) -> None:
        """Note that the broker has accepted the request, so a task's outcome will be kept. Does nothing by default.

        Called at most once, before the answer, for tasks and for parts of a request with an idempotency key.
        """
        return


class FutureSink(ReplySink):
    """Sink of a coroutine that awaits `replies`: one reply, or one for each of several inputs."""

    __slots__ = ("replies",)

    def __init__(self) -> None:
        self.replies: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        self.answer_all((reply,))

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to several inputs, or a single failure."""
        if not self.replies.done():  # The coroutine may have been cancelled.
            self.replies.set_result(replies)


class _Nobody(ReplySink):
    def answer(self, reply: Reply) -> None:
        pass


NOBODY = _Nobody()
"""Sink of requests for which no client waits."""


class Ending(enum.Enum):
    """Ways in which a request ends."""

    REPLIED = "replied"
    """The broker brought the outcome."""
    ANSWERED = "answered"
    """The broker brought the plain outputs of a whole batch, for requests that took lanes."""
    TIMED_OUT = "timed out"
    """The deadline passed, or the process ends."""
    REFUSED = "refused"
    """The broker, or a function of the input policy, refused the request."""
    TURNED_AWAY = "turned away"
    """The gateway or the port refused the request at once, so it was never pending."""
    LEFT = "left"
    """The client left, or deleted the request."""


UNANSWERED = Reply("", "")
"""Reply of a request that has none yet."""


class RequestTrace(msgspec.Struct, eq=False):
    """Trace of one request."""

    context: TraceContext
    """SERVER span, to which `links` and `recorded` belong."""
    parent: TraceContext | None
    """Client's span that the request names."""
    way: str
    """See RequestOptions."""
    begun: float
    missing: int
    """Number of inputs that haven't ended."""
    links: tuple[SpanLink, ...] = ()
    recorded: bool = False


class WholeOutcome(msgspec.Struct, eq=False):
    """Outcome of a request with several inputs, without the inputs and outputs."""

    id: str
    seconds: float = -1.0
    """Seconds from the request to its outcome; negative until the outcome is known."""
    failure: Failure | None = None
    ran: BatchRun | None = None
    """Batch run of the failed or first input."""
    shared: DedupKind | None = None
    """Kind of dedup key by which all outputs came from other requests."""
    failed_part: str = ""
    """Id of the part that failed, if it isn't the first."""

    @property
    def ended(self) -> bool:
        return self.seconds >= 0.0

    def end(self, reply: Reply, seconds: float, failed_part: str = "") -> None:
        """Set the outcome, unless it is known already."""
        if not self.ended:
            self.seconds, self.failed_part = max(seconds, 0.0), failed_part
            self.failure, self.ran, self.shared = reply.failure, reply.ran, reply.shared


class SeveralInputs:
    """Request with several inputs. Each input is submitted, and ends, by itself.

    If several choices are wanted for a prompt, `inputs` repeats the same object, and it is processed once. Otherwise a small
    body could cost as much as one that is 128 times larger.

    Attributes:
        inspected: True once the input policy has inspected all inputs.
        judgement: verdict that all inputs wait for.
        entered: True once the first input has an entry.
        version: model version drawn for all inputs; None before the draw.
        trace: trace of the request; None if it isn't sampled.
        payer: nonce of the input that pays for all; 0 if none does.
        ahead: True if the broker must accept the first input before the others are submitted.
        equal: inputs of which only the first is submitted, by dedup key; see `EqualInputs`.
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
        """Take the inputs and parameters as the input policy leaves them."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, queue: QueueName) -> bytes:
        """Return the SHA-256 of the whole request. `queue`: its model and the version that it names."""
        hashed = hashlib.sha256()
        for part in (str(queue).encode(), canonical(self.parameters)):
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
        before, digest = None, b""
        for input in self.inputs:
            if input is not before:
                before, digest = input, hashlib.sha256(values.canonical(input)).digest()
            hashed.update(digest)
        return hashed.digest()

    def digest_of(self, model: str, version: str, input: Value) -> bytes:
        """Return the digest of an input and the parameters for dedup keys. `version`: version that the client names."""
        if self._asked is None or self._asked[0] is not input:
            self._asked = input, dedup.digest(model, version, input, self.parameters)
        return self._asked[1]

    def forget_equal(self) -> None:
        """Forget which inputs are equal, so no further input gets another's outcome."""
        for inputs in self.equal.values():
            del inputs[1:]
        self.equal.clear()

    def ends(self, failed: bool) -> bool:
        """Note the outcome of an input. Returns True, once, if it ends the request, as the first failure or last output does."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended


class Judgement:
    """Progress of one request through the judges.

    Arguments:
        texts: texts of the inputs. An object that is repeated in a row has one text.
        judges: judges still to ask, including those of rules in shadow.
        places: for each text, position of its first input.

    Attributes:
        pending: requests that wait for the verdict: the request, or each of its inputs.
        refusal: the verdict, once `decided`; None if the request is let in.
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
        self.begun = self.decided = False
        self.refusal: Failure | None = None

    def wanted(self) -> bool:
        """Return True while the verdict matters to any request."""
        return any(not request.ended for request in self.pending)


class PendingRequest(msgspec.Struct, eq=False):
    """One request, or one of several inputs, from submission to end.

    Attributes:
        since, deadline: instants of its arrival and of its deadline, in seconds.
        session: session that the request went over; None if it was refused, or waits for the input policy.
        key: its key in the table.
        lane: lane that it took; None if it came through `submit`.
        several: list of inputs that it belongs to; None if it is alone.
        unadmitted: True while its sink waits to hear that the broker has accepted it.
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
        """For the first of several inputs, the outcome of the whole request; otherwise None."""
        several = self.several
        return several.whole if several is not None and several.count > 1 and self.entry.id == several.id else None

    @property
    def part_of(self) -> str:
        """For all but the first of several inputs, the id of the request; otherwise empty."""
        several = self.several
        return several.id if several is not None and several.count > 1 and self.entry.id != several.id else ""

    @property
    def ended(self) -> bool:
        return self.reply is not UNANSWERED

    @property
    def left(self) -> bool:
        """True if the client has left, or has deleted the request."""
        return self.reply.failure is not None and self.reply.failure.code == errors.CANCELLED

    @property
    def task(self) -> bool:
        """True for a task, whose outcome the broker keeps until it is fetched."""
        return is_task(self.entry)

    @property
    def follows(self) -> bool:
        """True for a follower, which only waits for a task's outcome, and isn't counted or recorded."""
        return bool(task_followed(self.entry))

    def refreshed(self, now: float) -> Entry:
        """Return the entry with the time that remains. An outage uses up its timeout, but not its time in the queue."""
        left = self.deadline - now
        wait = min(self.entry.queue_timeout, left)
        return msgspec.structs.replace(self.entry, timeout=left, queue_timeout=wait)


Decided = Callable[[Sequence[PendingRequest], Failure | None], None]
"""Function that takes the requests that waited for a verdict, and their refusal if there is one."""


class PendingTable(dict[Key, PendingRequest]):
    """Pending requests of a gateway, by tenant and id, in order of arrival. Only the gateway changes the table."""

    def of(self, entry: Entry) -> PendingRequest | None:
        """Return the pending request of an entry; None if it has ended, even if a later request has the same id."""
        pending = self.get((entry.tenant, entry.id))
        return pending if pending is not None and pending.entry.nonce == entry.nonce else None

    def newest(self, id: str, tenant: str | None) -> PendingRequest | None:
        """Return the newest pending request with an id, of one tenant or of any."""
        for pending in reversed(self.values()):
            if pending.entry.id == id and tenant in (None, pending.entry.tenant):
                return pending
        return None

    def on(self, session: BrokerSession) -> list[PendingRequest]:
        """Return all requests that wait for an answer over a session."""
        return [pending for pending in self.values() if pending.session is session]

    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Return the entries that still wait on a session, each with its remaining time."""
        waiting = [pending for pending in map(self.of, entries) if pending is not None and pending.session is session]
        return [pending.refreshed(now) for pending in waiting if pending.deadline > now]


class Observer(Protocol):
    """Observer of all requests that end."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Handle requests that ended together at instant `now`, without waiting. Their replies are set."""


def finish(observers: Sequence[Observer], ended: Sequence[PendingRequest], ending: Ending, now: float) -> None:
    """Tell observers of requests that have ended, and give sinks their replies. If one of them fails, the others go on."""
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
    """Give a sink its answer, and log if it fails."""
    try:
        sink.answer(reply)
    except Exception:
        log.exception("an answer could not be written", request_id=reply.id)
