"""Requests, their options and traces, and their outcomes as a reply, a status, and a row of the ledger."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState
from headway.model.identity import Principal
from headway.model.value import TokenCount, Value

SAMPLED = 1
"""Flag of a trace whose spans are recorded."""
RANDOM = 2
"""Flag of a trace whose id has 7 random bytes at its end, which samplers may use."""


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span of a trace, which its child spans name as their parent.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes.
        flags: sum of SAMPLED and RANDOM.
        state: data of other systems in the trace, as in the header field `tracestate`.
    """

    trace_id: bytes
    span_id: bytes
    flags: int = SAMPLED
    state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


class CarriedTrace(msgspec.Struct, frozen=True, gc=False):
    """Span of a sampled request under which its entry was sent, and the Unix time of sending in nanoseconds."""

    context: TraceContext
    sent_at: int


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that a client sends with its input. One object serves all requests with the same options.

    Attributes:
        timeout: seconds until the answer is worthless.
        tier: index of the highest tier that the client asks for. Its principal may be limited to a lower tier.
        key: idempotency key. A request with a known key isn't run again, but gets the earlier answer.
        task: True if the outcome is kept, to be fetched by the request's id.
        fresh: True to ignore the kept answer to an identical request. The new output is kept unless `unkept`.
        unkept: True if later requests must not use the output.
        chosen: True if the client chose the request's id. If a task with this id is kept, its outcome is the answer.
        origin: name used instead of the user to count culprits. None means the principal's user. If it is empty, the request runs
            even if its input is known to fail.
        whole: digest of the whole request, if this is one of several inputs and has a key. To repeat the key with another whole
            is a conflict.
        version: version of the model that must answer, or empty for any.
        count: for the first of a request's inputs their number, for the others 0.
        way: route or method of the request, as `POST /v1/inference` or `grpc SERVICE/METHOD`.
        trace: the client's span that the request names, if traces are recorded.
        replays: span of the sampled request that this request replays.
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
        id: UUIDv7 text, unique within the tenant while the request is pending.
        model: name of the model, or empty if it isn't known yet.
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
        message: text for the client.
        retry_after: seconds after which a retry makes sense, if known.
        reason: short label for metrics, for example `queue` or `gpu`.
    """

    code: str
    message: str
    retry_after: float | None = None
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The final outcome of an entry. Either `output` or `failure` is set.

    Attributes:
        queued: seconds from the enqueue to the last claim.
        nonce: the entry's nonce. An earlier submission with the same id has another nonce.
        shared: kind of the dedup key by which the outcome came from another entry.
        kept: True if that entry had finished before.
        unkept: True if the outcome should have been kept but is too large. Set by the gateway.
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
        seconds: seconds since the request came, or until its outcome.
        tier: index of the tier in which it was queued.
        since: seconds since the outcome, if there is one.
        version: version whose queue it waited in, or empty for the queue for any.
        failed_part: id of the later input that made a request with several inputs fail.
        part_of: id of the request, if this is its second or a later input.
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
        tier: name of the tier in which it was queued.
        status: `completed` or `failed`, or `queued` without an outcome.
        created_at: Unix time in seconds.
        completed_at: Unix time in seconds of the outcome. Without an outcome, it is the latest time for one.
        latency_ms: milliseconds from the decoded request to its answer.
        batch_size: number of entries in the last batch, or 0 if the request never ran.
        worker: id of the worker of the last run.
        version: version of the last run, or the version that the request waited for. Empty for any.
        error: code of the failure, or empty.
        requests: number of requests that the row stands for. Refused requests of one caller may share a row.
        batch_id: id of the last batch.
        part_of: id of the request, if this is its second or a later input.
        tokens: tokens that the input used in the run of the answer, if known.
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
