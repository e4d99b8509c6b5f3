"""Pending requests of a gateway, and what belongs to them.

The table holds all pending requests. A lane takes in many alike requests. A sink is given the answer to a request. An
observer is told about each request that ends."""

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


ANY_KEY = "\0"  # Stands for any idempotency key in the options of a lane.


class Lane:
    """Decisions made once for many alike requests.

    Most requests of a connection have the same principal, options and model, and want no more than an answer in time or a kept
    outcome. A lane holds all decisions about them that can be made in advance, until the facts behind these change. All other
    requests go through `Gateway.submit` into the same queue.

    Attributes:
        facts: see `Gateway.facts`. A lane with an older token is closed.
        open: True if the requests may take this lane. Otherwise they go through `submit`.
        keeps: True if tasks and requests with an idempotency key may take it. Their outcomes are kept for `keep` seconds.
        named: beginning of the hashed data of their digest; see `headway.core.dedup.digest`.
        rows: True if only single rows of tensors may take it; see `ServedModel.takes_unweighed`.
        asker: principal as the caller gave it.
        asked: model that the requests name; None or empty for the default.
        principal: the principal with its limits for the model.
        pattern: entry of the requests, without id, input, parameters and nonce.
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
CLOSED = Lane(None, Principal(user="", tenant="", tier=0), RequestOptions(0.0), None)  # Lane that no request takes.


def asks_nothing_rare(options: RequestOptions) -> bool:
    """Return True if requests with these options want no more than an answer in time or a kept outcome."""
    wants = options.chosen or options.version or options.whole or (options.key and options.task)
    return not (wants or options.trace or options.replays) and options.count == 1


Key = tuple[str, str]  # Tenant and id of a request.
PART = "\x01"  # Separator between a client's idempotency key and a part's number.


class ReplySink(Protocol):
    """Destination of an answer."""

    def answer(self, reply: Reply) -> None:
        """Take the answer. Called once, in a later turn of the event loop than `submit`."""

    def admitted(self) -> None:
        """Note that the broker has accepted the request, so it will keep a task's outcome. Does nothing by default. Called at
        most once, before the answer, for tasks and for parts of a request with an idempotency key."""
        return


class FutureSink(ReplySink):
    """Sink of a coroutine that awaits `replies`: one reply, or a reply for each of several inputs."""

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


NOBODY = _Nobody()  # Sink of requests for which no client waits.


class Ending(enum.Enum):
    """Ways in which a request ends."""

    REPLIED = "replied"  # The broker brought the outcome.
    ANSWERED = "answered"  # The broker brought the plain outputs of a whole batch, whose requests took lanes.
    TIMED_OUT = "timed out"  # The deadline passed, or the process ends.
    REFUSED = "refused"  # The broker, or a function of the input policy, refused the request.
    TURNED_AWAY = "turned away"  # The gateway or port refused the request at once, so it was never pending.
    LEFT = "left"  # The client left, or deleted the request.


UNANSWERED = Reply("", "")  # Reply of a request that has none yet.


class RequestTrace(msgspec.Struct, eq=False):
    """Trace of one request."""

    context: TraceContext  # SERVER span, which has the `links`. It may be `recorded` already.
    parent: TraceContext | None  # Client's span, as named by the request.
    way: str  # See RequestOptions.
    begun: float
    missing: int  # Number of inputs that haven't ended.
    links: tuple[SpanLink, ...] = ()
    recorded: bool = False


class WholeOutcome(msgspec.Struct, eq=False):
    """Outcome of a request with several inputs, without the inputs and outputs."""

    id: str
    seconds: float = -1.0  # Seconds from the request to its outcome; negative until the outcome is known.
    failure: Failure | None = None
    ran: BatchRun | None = None  # Batch run of the failed or first input.
    shared: DedupKind | None = None  # Kind of dedup key, if all outputs came from other requests.
    failed_part: str = ""  # Id of the part that failed, if it isn't the first.

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

    For several choices of a prompt, `inputs` repeats the same object, which is processed once. Otherwise a small body could cost as
    much as a body of 128 times its size.

    Attributes:
        inspected: True once the input policy has inspected all inputs.
        judgement: verdict that all inputs wait for.
        entered: True once the first input has an entry.
        version: model version drawn for all inputs; None before the draw.
        trace: trace of the request; None if it isn't sampled.
        payer: nonce of the input that pays for all; 0 without one.
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
        """Set the inputs and parameters that the input policy has changed, and the verdict to wait for."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, queue: QueueName) -> bytes:
        """Return the SHA-256 of the whole request. `queue`: its model and requested version."""
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
        """Forget which inputs are equal, so that no input gets the outcome of another one any more."""
        for inputs in self.equal.values():
            del inputs[1:]
        self.equal.clear()

    def ends(self, failed: bool) -> bool:
        """Note the outcome of an input. Returns True once: for the first failure or the last output, which ends the request."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended


class Judgement:
    """Progress of one request through the judges.

    Arguments:
        texts: texts of the inputs. An object that is repeated in a row has a single text.
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
        session: session for the request; None if it was refused, or waits for the input policy.
        lane: lane of the request; None if it came through `submit`.
        several: the request with several inputs that this one belongs to; None if it is alone.
        unadmitted: True while its sink waits for `admitted`.
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
        """Outcome of the whole request for the first of several inputs; otherwise None."""
        several = self.several
        return several.whole if several is not None and several.count > 1 and self.entry.id == several.id else None

    @property
    def part_of(self) -> str:
        """Id of the whole request for any but the first of several inputs; otherwise empty."""
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
        """True for a follower, which waits for the outcome of a task. It isn't counted or recorded."""
        return bool(task_followed(self.entry))

    def refreshed(self, now: float) -> Entry:
        """Return the entry with the remaining time. An outage uses up its timeout, but not its time in the queue."""
        remaining = self.deadline - now
        wait = min(self.entry.queue_timeout, remaining)
        return msgspec.structs.replace(self.entry, timeout=remaining, queue_timeout=wait)


Decided = Callable[[Sequence[PendingRequest], Failure | None], None]  # Takes requests that waited, and a refusal.


class PendingTable(dict[Key, PendingRequest]):
    """Pending requests of a gateway, by tenant and id, in order of arrival. Only the gateway changes the table."""

    def of(self, entry: Entry) -> PendingRequest | None:
        """Return the pending request of an entry; None if it has ended, even if a later request has its id."""
        pending = self.get((entry.tenant, entry.id))
        return pending if pending is not None and pending.entry.nonce == entry.nonce else None

    def newest(self, id: str, tenant: str | None) -> PendingRequest | None:
        """Return the newest pending request with an id, of one tenant or of any."""
        for pending in reversed(self.values()):
            if pending.entry.id == id and tenant in (None, pending.entry.tenant):
                return pending
        return None

    def on(self, session: BrokerSession) -> list[PendingRequest]:
        return [pending for pending in self.values() if pending.session is session]

    def refreshed(self, session: BrokerSession, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Return the entries that still wait for an answer over a session, each with its remaining time."""
        waiting = [pending for pending in map(self.of, entries) if pending is not None and pending.session is session]
        return [pending.refreshed(now) for pending in waiting if pending.deadline > now]


class Observer(Protocol):
    """Observer of all requests that end."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Handle requests that ended together at instant `now`, without waiting. Their replies are set."""


def finish(observers: Sequence[Observer], ended: Sequence[PendingRequest], ending: Ending, now: float) -> None:
    """Tell observers about requests that have ended, and give sinks their replies. If an observer or a sink raises, go
    on."""
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
    """Give a sink its answer. If the sink raises, log that."""
    try:
        sink.answer(reply)
    except Exception:
        log.exception("an answer could not be written", request_id=reply.id)
