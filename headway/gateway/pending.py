"""A gateway's pending requests, and what they consist of.

The table holds all pending requests. A lane is a fast path for many similar requests. A sink receives the answer to a request.
Observers are notified of each request that ends."""

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
from headway.core.throttle import Throttle
from headway.gateway.broker_session import BrokerSession
from headway.gateway.judge import CallerId, Judge
from headway.model import (
    BatchRun,
    DedupKind,
    Entry,
    Failure,
    Principal,
    QueueName,
    Reply,
    RequestOptions,
    TraceContext,
    Value,
)
from headway.runtime.logger import get_logger
from headway.runtime.spans import SpanLink

log = get_logger(__name__)


ANY_KEY = "\0"  # Represents any idempotency key in the options of a lane.


class Lane:
    """Decisions made once for many similar requests.

    Most requests on a connection have the same principal, options and model, and ask for nothing more than an answer in time or a
    kept outcome. A lane holds all decisions about them that can be made in advance, until the facts that they are based on change.
    All other requests reach the same queue through `Gateway.submit`.

    Attributes:
        facts: see `Gateway.facts`. A lane with an older token is closed.
        open: True if the requests may take this lane. Otherwise they go through `submit`.
        keeps: True if tasks and requests with an idempotency key may take it. Their outcomes are kept for `keep` seconds.
        named: beginning of the data that their digest hashes; see `headway.core.dedup.digest`.
        rows: True if only single rows of tensors may take it; see `ServedModel.takes_unweighed`.
        asker: the principal as the caller passed it.
        asked: model that the requests name; None or empty for the default.
        principal: the principal with its limits for the model.
        pattern: template for their entries, without id, input, parameters and nonce.
        throttle, throttled: throttle of the model's lowest tier, and True if the requests are of that tier.
        usual: True if the requests have the usual timeout; see `Deadlines`.
    """

    __slots__ = (
        "asked", "asker", "facts", "keep", "keeps", "model", "named", "open", "options", "pattern", "principal", "rows", "throttle", "throttled", "usual",
    )  # fmt: skip

    def __init__(self, facts: object, asker: Principal, options: RequestOptions, asked: str | None) -> None:
        self.facts, self.asker, self.options, self.asked = facts, asker, options, asked
        self.open = self.rows = self.keeps = self.throttled = self.usual = False
        self.principal, self.model, self.pattern = asker, "", _NO_ENTRY
        self.keep, self.named = 0.0, b""
        self.throttle = _OPEN_THROTTLE


_OPEN_THROTTLE, _NO_ENTRY = Throttle(), Entry("", "", "", 0, "", "", 0.0, 0.0)
CLOSED = Lane(None, Principal(user="", tenant="", tier=0), RequestOptions(0.0), None)  # A lane that is never open.


def asks_nothing_rare(options: RequestOptions) -> bool:
    """Return True if requests with these options ask for nothing more than an answer in time or a kept outcome."""
    wants = options.chosen or options.version or options.whole or (options.key and options.task)
    return not (wants or options.trace or options.replays) and options.count == 1


Key = tuple[str, str]  # Tenant and id of a request.
PART = "\x01"  # Separator between a client's idempotency key and a part's number.


class ReplySink(Protocol):
    """Destination of an answer."""

    def answer(self, reply: Reply) -> None:
        """Handle the answer. Called once, in a later turn of the event loop than `submit`."""

    def admitted(self) -> None:
        """Handle the broker's acceptance of the request, after which a task's outcome will be kept. Does nothing by default.
        Called at most once, before the answer, for tasks and for parts of a request with an idempotency key."""
        return


class FutureSink(ReplySink):
    """Sink for a coroutine that awaits `replies`: one reply, or one for each of several inputs."""

    __slots__ = ("replies",)

    def __init__(self) -> None:
        self.replies: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        self.answer_all((reply,))

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Handle the replies to several inputs, or a single failure."""
        if not self.replies.done():  # The coroutine may have been cancelled.
            self.replies.set_result(replies)


class _Nobody(ReplySink):
    def answer(self, reply: Reply) -> None:
        pass


NOBODY = _Nobody()  # Sink for requests that no client is waiting for.


class Ending(enum.Enum):
    """Way in which a request ended."""

    REPLIED = "replied"  # The broker returned the outcome.
    ANSWERED = "answered"  # The broker returned the plain outputs of a complete batch, whose requests used lanes.
    TIMED_OUT = "timed out"  # The deadline passed, or the process is ending.
    REFUSED = "refused"  # The broker, or a function of the input policy, refused the request.
    TURNED_AWAY = "turned away"  # The gateway or port refused the request immediately, so it was never pending.
    LEFT = "left"  # The client left, or deleted the request.


UNANSWERED = Reply("", "")  # Reply of a request that hasn't been answered yet.


class RequestTrace(msgspec.Struct, eq=False):
    """The trace of one request."""

    context: TraceContext  # The SERVER span. It has the `links`, and may already be `recorded`.
    parent: TraceContext | None  # Client's span, as named by the request.
    way: str  # See RequestOptions.
    begun: float
    missing: int  # Number of inputs that haven't ended.
    links: tuple[SpanLink, ...] = ()
    recorded: bool = False


class WholeOutcome(msgspec.Struct, eq=False):
    """The outcome of a request with several inputs, without the inputs and outputs."""

    id: str
    seconds: float = -1.0  # Seconds from the request's arrival to its outcome; negative until the outcome is known.
    failure: Failure | None = None
    ran: BatchRun | None = None  # Batch run of the failed or first input.
    shared: DedupKind | None = None  # Kind of dedup key, if all outputs came from other requests.
    failed_part: str = ""  # Id of the part that failed, if it isn't the first.

    @property
    def ended(self) -> bool:
        return self.seconds >= 0.0

    def end(self, reply: Reply, seconds: float, failed_part: str = "") -> None:
        """Set the outcome unless it is already known."""
        if not self.ended:
            self.seconds, self.failed_part = max(seconds, 0.0), failed_part
            self.failure, self.ran, self.shared = reply.failure, reply.ran, reply.shared


class SeveralInputs:
    """A request with several inputs. Each input is submitted and ends separately.

    If several choices are requested for a prompt, `inputs` contains the same object several times. It is processed only once, because
    otherwise a small body could cost as much as one 128 times its size.

    Attributes:
        inspected: True once the input policy has inspected all inputs.
        judgement: the verdict that all inputs are waiting for.
        entered: True once the first input has an entry.
        version: model version drawn for all inputs; None before the draw.
        trace: trace of the request; None if it isn't sampled.
        payer: nonce of the input that pays for all; 0 if there is none.
        ahead: True if the broker must accept the first input before the others are submitted.
        equal: identical inputs, by dedup key. Only the first of them is submitted; see `EqualInputs`.
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
        """Set the inputs and parameters as changed by the input policy, and the verdict to wait for."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, queue: QueueName) -> bytes:
        """Return the SHA-256 of the whole request. `queue`: its model and the requested version."""
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
        """Return the digest of an input and the parameters for dedup keys. `version`: the requested version."""
        if self._asked is None or self._asked[0] is not input:
            self._asked = input, dedup.digest(model, version, input, self.parameters)
        return self._asked[1]

    def forget_equal(self) -> None:
        """Forget which inputs are identical, so that no input gets the outcome of another one any more."""
        for inputs in self.equal.values():
            del inputs[1:]
        self.equal.clear()

    def ends(self, failed: bool) -> bool:
        """Record the outcome of an input. Returns True once, for the first failure or the last output, which ends the request."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended


class Judgement:
    """The progress of one request through the judges.

    Arguments:
        texts: texts of the inputs. If consecutive inputs are the same object, they have a single text.
        judges: judges still to be asked, including those of rules in shadow mode.
        places: for each text, the position of its first input.

    Attributes:
        pending: the requests that are waiting for the verdict: the request itself, or each of its inputs.
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
        since, deadline: its time of arrival and its deadline, in seconds.
        session: session for the request; None if it was refused, or is waiting for the input policy.
        lane: lane of the request; None if it was passed to `submit`.
        several: the request with several inputs that this one is part of; None if it has a single input.
        unadmitted: True while its sink is waiting for `admitted`.
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
        """For all but the first of several inputs, the id of the whole request; otherwise empty."""
        several = self.several
        return several.id if several is not None and several.count > 1 and self.entry.id != several.id else ""

    @property
    def ended(self) -> bool:
        return self.reply is not UNANSWERED

    @property
    def left(self) -> bool:
        return self.reply.failure is not None and self.reply.failure.code == errors.CANCELLED

    @property
    def task(self) -> bool:
        """True for a task, whose outcome the broker keeps until it is fetched."""
        return is_task(self.entry)

    @property
    def follows(self) -> bool:
        """True for a follower, which waits for a task's outcome. Followers aren't counted or recorded."""
        return bool(task_followed(self.entry))

    def refreshed(self, now: float) -> Entry:
        """Return a copy of the entry for resubmission, with its timeout set to the time left until its deadline. So time lost to an outage
        is deducted from the timeout. It isn't deducted from the queue timeout, but that never exceeds the time left."""
        remaining = self.deadline - now
        wait = min(self.entry.queue_timeout, remaining)
        return msgspec.structs.replace(self.entry, timeout=remaining, queue_timeout=wait)


Decided = Callable[
    [Sequence[PendingRequest], Failure | None], None
]  # Called with the requests that waited, and their failure if they are refused.


class PendingTable(dict[Key, PendingRequest]):
    """A gateway's pending requests by tenant and id, in order of arrival. Only the gateway changes the table."""

    def of(self, entry: Entry) -> PendingRequest | None:
        """Return the pending request of an entry; None if it has ended, even if a later request has the same id."""
        pending = self.get((entry.tenant, entry.id))
        return pending if pending is not None and pending.entry.nonce == entry.nonce else None

    def newest(self, id: str, tenant: str | None) -> PendingRequest | None:
        """Return the newest pending request with this id, of one tenant or of any."""
        for pending in reversed(self.values()):
            if pending.entry.id == id and tenant in (None, pending.entry.tenant):
                return pending
        return None

    def on(self, session: BrokerSession) -> list[PendingRequest]:
        return [pending for pending in self.values() if pending.session is session]

    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Return the entries that are still waiting for an answer over a session, each with its remaining time."""
        waiting = [pending for pending in map(self.of, entries) if pending is not None and pending.session is session]
        return [pending.refreshed(now) for pending in waiting if pending.deadline > now]


class Observer(Protocol):
    """Observes all requests that end."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Handle requests that ended together at time `now`, without waiting. Their replies are set."""


def finish(observers: Sequence[Observer], ended: Sequence[PendingRequest], ending: Ending, now: float) -> None:
    """Notify observers of requests that have ended, and send the replies to their sinks. Continue if an observer or sink raises."""
    for observer in observers:
        try:
            observer.finished(ended, ending, now)
        except Exception:
            log.exception("a request observer failed", requests=len(ended))
    for pending in ended:
        sink = pending.sink
        pending.sink = NOBODY
        try:
            sink.answer(pending.reply)
        except Exception:
            log.exception("an answer could not be written", request_id=pending.reply.id)


def tell(sink: ReplySink, reply: Reply) -> None:
    """Send an answer to its sink. If the sink raises, log the error."""
    try:
        sink.answer(reply)
    except Exception:
        log.exception("an answer could not be written", request_id=reply.id)
