"""Requests, their options and traces, and their outcomes as a reply, a status, and a row of the ledger."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState
from headway.model.identity import Principal
from headway.model.value import TokenCount, Value

SAMPLED = 1  # Flag of a trace whose spans are recorded.
RANDOM = 2  # Flag of a trace whose id has 7 random bytes at its end, which samplers may use.


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span of a trace, which its child spans name as their parent."""

    trace_id: bytes  # 16 bytes.
    span_id: bytes  # 8 bytes.
    flags: int = SAMPLED  # Sum of SAMPLED and RANDOM.
    state: str = ""  # Data of other systems in the trace, as in the header field `tracestate`.

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


class CarriedTrace(msgspec.Struct, frozen=True, gc=False):
    """Span of a sampled request under which its entry was sent, and the Unix time of sending in nanoseconds."""

    context: TraceContext
    sent_at: int


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that a client sends with its input. One object serves all requests with the same options."""

    timeout: float  # Seconds until the answer is worthless.
    tier: int = 0  # Index of the highest tier that the client asks for. Its principal may be limited to a lower tier.
    key: str = ""  # Idempotency key. A request with a known key isn't run again, but gets the earlier answer.
    task: bool = False  # True if the outcome is kept, to be fetched by the request's id.
    # True to ignore the kept answer to an identical request. The new output is kept unless `unkept`.
    fresh: bool = False
    # True if the client chose the request's id. If a task with this id is kept, its outcome is the answer.
    chosen: bool = False
    # Name used instead of the principal's user to count culprits. If it is empty, the request runs even if its input is
    # known to fail.
    origin: str | None = None
    # Digest of the whole request, if this is one of several inputs and has a key. The same key with another digest is a
    # conflict.
    whole: bytes = b""
    count: int = 1  # Number of the request's inputs, for its first input; 0 for the others.
    version: str = ""  # Version of the model that must answer, or empty for any.
    way: str = ""  # Route or method of the request, as `POST /v1/inference` or `grpc SERVICE/METHOD`.
    trace: TraceContext | None = None  # The client's span that the request names, if traces are recorded.
    replays: TraceContext | None = None  # Span of the sampled request that this request replays.
    unkept: bool = False  # True if later requests must not use the output.


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """Request for the output of one input, as ports hand it to the gateway."""

    principal: Principal
    id: str  # UUIDv7 text, unique within the tenant while the request is pending.
    options: RequestOptions
    model: str = ""  # Name of the model, or empty if it isn't known yet.
    input: Value = ""
    parameters: bytes = b""  # Text of a JSON object, or empty.


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an entry got no output."""

    code: str  # Code of `headway.errors`, for example `DEADLINE_EXCEEDED`.
    message: str  # Text for the client.
    retry_after: float | None = None  # Seconds after which a retry makes sense, if known.
    reason: str = ""  # Short label for metrics, for example `queue` or `gpu`.


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The final outcome of an entry. Either `output` or `failure` is set."""

    id: str
    tenant: str
    output: Value | None = None
    failure: Failure | None = None
    ran: BatchRun | None = None
    queued: float = 0.0  # Seconds from the enqueue to the last claim.
    attempts: int = 0
    nonce: int = 0  # The entry's nonce. An earlier submission with the same id has another nonce.
    shared: DedupKind | None = None  # Kind of the dedup key by which the outcome came from another entry.
    kept: bool = False  # True if that entry had finished before.
    unkept: bool = False  # True if the outcome should have been kept but is too large. Set by the gateway.
    tokens: TokenCount | None = None


class RequestStatus(msgspec.Struct, frozen=True, gc=False):
    """State of one request, as its gateway knows it."""

    state: EntryState
    seconds: float  # Seconds since the request came, or until its outcome.
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int  # Index of its tier.
    since: float | None = None  # Seconds since the outcome, if there is one.
    ran: BatchRun | None = None
    version: str = ""  # Version whose queue it waited in, or empty for the queue for any.
    failed_part: str = ""  # Id of the later input that made a request with several inputs fail.
    part_of: str = ""  # Id of the request, if this is its second or a later input.


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger."""

    id: str  # UUIDv7 text, or an id that the client chose. Several rows may share it, but never two pending requests.
    user: str
    tenant: str
    tier: str  # Name of the tier.
    model: str
    status: str  # `completed` or `failed`, or `queued` without an outcome.
    created_at: float  # Unix time in seconds.
    completed_at: float  # Unix time in seconds of the outcome. Without an outcome, it is the latest time for one.
    latency_ms: float  # Milliseconds from the decoded request to its answer.
    batch_size: int = 0  # Number of entries in the last batch, or 0 if the request never ran.
    worker: str = ""  # Id of the worker of the last run.
    version: str = ""  # Version of the last run, or the version that the request waited for. Empty for any.
    error: str = ""  # Code of the failure, or empty.
    requests: int = 1  # Number of requests that the row stands for. Refused requests of one caller may share a row.
    batch_id: str = ""  # Id of the last batch.
    part_of: str = ""  # Id of the request, if this is its second or a later input.
    tokens: int | None = None  # Tokens that the input used in the run of the answer, if known.
    input: str | None = None  # Stored only if configured, as is `output`.
    output: str | None = None
