"""Requests: what a client asks, its trace, and its outcome as a reply, a status, and a row of the ledger."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState
from headway.model.identity import Principal
from headway.model.value import TokenCount, Value

SAMPLED = 1
"""Flag of a trace whose spans are recorded."""
RANDOM = 2
"""Flag of a trace whose id is random in its last 7 bytes, so that samplers may use them."""


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span of a trace, which its child spans name as their parent.

    Attributes:
        trace_id: id of the trace, 16 bytes.
        span_id: id of the span, 8 bytes.
        flags: sum of SAMPLED and RANDOM.
        state: data of other systems in the trace, as in the header field `tracestate`; empty for none.
    """

    trace_id: bytes
    span_id: bytes
    flags: int = SAMPLED
    state: str = ""

    @property
    def sampled(self) -> bool:
        """True if its spans are recorded."""
        return bool(self.flags & SAMPLED)


class CarriedTrace(msgspec.Struct, frozen=True, gc=False):
    """Part of a sampled request's trace that its entry carries.

    Attributes:
        context: span under which the entry was sent.
        sent_at: Unix time of sending, in nanoseconds.
    """

    context: TraceContext
    sent_at: int


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that a client sends with its input. One object serves all requests with the same options.

    Attributes:
        timeout: seconds until the answer is worthless.
        tier: index of the highest tier that the client asks for; its principal may be limited to a lower one.
        key: idempotency key; a request with a known key isn't run again but gets the earlier answer. Empty for none.
        task: True to keep the outcome, to be fetched by the request's id.
        fresh: True to ignore the kept answer to an identical request. Its own output is kept unless `unkept`.
        unkept: True to keep its own output from being used for later requests, too.
        chosen: True if the client chose the request's id; if a task of this id is kept, the answer is that task's.
        origin: name used instead of the user to count culprits; None: the principal's user; empty: run the request even if
            its input is known to fail.
        whole: digest of the whole request, if this is one of its several inputs and has a key; else empty. Repeating the key
            with another whole is a conflict.
        version: version of the model that must answer; empty: any.
        count: number of inputs admitted with this one. The first of a request's inputs has their number, the others have 0.
        way: route or method of the request, as `POST /v1/inference` or `grpc SERVICE/METHOD`; empty if unknown.
        trace: the client's span that the request names, if traces are recorded.
        replays: span of the request that this one replays, if it does and that request was sampled.
    """

    timeout: float
    tier: int = 0
    key: str = ""
    task: bool = False
    fresh: bool = False
    chosen: bool = False
    origin: str | None = None
    whole: bytes = b""
    count: int = 1
    version: str = ""
    way: str = ""
    trace: TraceContext | None = None
    replays: TraceContext | None = None
    unkept: bool = False


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """Request for the output of one input, as ports hand it to the gateway.

    Attributes:
        principal: who asks, with the limits that apply.
        id: UUIDv7 text, unique within the tenant while the request is pending.
        options: options of the request.
        model: name of the model; empty if the request names none, or it isn't known yet.
        input: the value for the model.
        parameters: text of a JSON object, or empty.
    """

    principal: Principal
    id: str
    options: RequestOptions
    model: str = ""
    input: Value = ""
    parameters: bytes = b""


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an entry got no output.

    Attributes:
        code: a code of `headway.errors`, for example `DEADLINE_EXCEEDED`.
        message: what happened, for the client to read.
        retry_after: seconds after which a retry makes sense; None if it doesn't, or if unknown.
        reason: short label for metrics, for example `queue` or `gpu`.
    """

    code: str
    message: str
    retry_after: float | None = None
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The final outcome of an entry, addressed to the gateway that waits for it.

    Exactly one of `output` and `failure` is set.

    Attributes:
        tenant: the entry's tenant; the gateway checks it against the pending request.
        queued: seconds from the enqueue to the last claim.
        shared: kind of the dedup key by which the outcome came from another entry, if it did.
        kept: True if that entry had finished before.
        tokens: tokens that the input used in the run of the outcome; None if unknown.
        unkept: True if the outcome should have been kept but is too large; set by the gateway.
        nonce: the entry's nonce; an earlier submission with the same id has another.
    """

    id: str
    tenant: str
    output: Value | None = None
    failure: Failure | None = None
    ran: BatchRun | None = None
    queued: float = 0.0
    attempts: int = 0
    nonce: int = 0
    shared: DedupKind | None = None
    kept: bool = False
    unkept: bool = False
    tokens: TokenCount | None = None


class RequestStatus(msgspec.Struct, frozen=True, gc=False):
    """State of one request, as its gateway knows it.

    Attributes:
        state: see `EntryState`.
        seconds: seconds since the request came, or until its outcome.
        failure: why it failed, if it did.
        tenant, user: principal that asked.
        model: name of the requested model.
        tier: index of the tier that it was queued in.
        since: seconds since its outcome; None without one.
        ran: batch run of the outcome, if it came from one.
        version: version whose queue it waited in; empty: the queue for any.
        failed_part: id of the later input that made a request with several inputs fail; else empty.
        part_of: id of the request, if this is its second or a later input; else empty.
    """

    state: EntryState
    seconds: float
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int
    since: float | None = None
    ran: BatchRun | None = None
    version: str = ""
    failed_part: str = ""
    part_of: str = ""


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger.

    Attributes:
        id: UUIDv7 text, or an id that the client chose. Several rows may share it, but never two pending requests.
        user, tenant: principal that asked.
        tier: name of the tier that it was queued in.
        model: name of the requested model.
        status: `completed` or `failed`; `queued` without an outcome.
        created_at, completed_at: Unix times in seconds; without an outcome, the latter is when it will have one at the latest.
        latency_ms: milliseconds from the decoded request to its answer.
        batch_size: number of entries in its last batch; 0 if it never ran.
        worker: id of the worker that ran it last; empty if it never ran.
        version: version that ran it last, or else that it waited for; empty for any.
        error: code of the failure; empty for none.
        requests: number of requests that the row stands for: 1, or more for refused requests of one caller.
        batch_id: id of its last batch, which its rows share; empty if it never ran.
        part_of: id of the request, if this is its second or a later input; else empty.
        tokens: tokens that the input used in the run of the answer; None if unknown.
        input, output: stored only if the ledger is configured to do so.
    """

    id: str
    user: str
    tenant: str
    tier: str
    model: str
    status: str
    created_at: float
    completed_at: float
    latency_ms: float
    batch_size: int = 0
    worker: str = ""
    version: str = ""
    error: str = ""
    requests: int = 1
    batch_id: str = ""
    part_of: str = ""
    tokens: int | None = None
    input: str | None = None
    output: str | None = None
