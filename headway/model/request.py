"""Requests with their options and traces, and their outcomes: replies, statuses and ledger records."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState
from headway.model.identity import Principal
from headway.model.value import TokenCount, Value

SAMPLED = 1  # Trace flag: the spans are recorded.
RANDOM = 2  # Trace flag: the last 7 bytes of the trace id are random, and samplers may use them.


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span of a trace, to be used as the parent of other spans."""

    trace_id: bytes  # 16 bytes.
    span_id: bytes  # 8 bytes.
    flags: int = SAMPLED  # Sum of SAMPLED and RANDOM.
    state: str = ""  # Other tracing systems' data, as in the `tracestate` header.

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


class CarriedTrace(msgspec.Struct, frozen=True, gc=False):
    """Span under which the entry of a sampled request was sent, and the Unix time of sending in nanoseconds."""

    context: TraceContext
    sent_at: int


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that a client sends with its input. Requests with the same options share one object."""

    timeout: float  # Seconds after which an answer is useless.
    tier: int = 0  # Index of the highest tier that the client asks for. Its principal may be limited to a lower tier.
    key: str = ""  # Idempotency key. A request with a known key isn't run again, but gets the earlier answer.
    task: bool = False  # True if the outcome is kept, to be fetched by the request's id.
    fresh: bool = False  # True to ignore a kept answer to the same request. Unless `unkept`, the new one is then kept.
    chosen: bool = False  # True if the client chose the id. If a task with this id is kept, its outcome is the answer.
    # User to blame for an input that fails, if not the principal's user. If empty, the input runs even if it is known to fail.
    origin: str | None = None
    whole: bytes = b""  # Digest of the request, if it has several inputs and a key. Another digest is a conflict.
    count: int = 1  # Number of the request's inputs. Only its first input has this; the others have 0.
    version: str = ""  # Version of the model that must answer, or empty for any.
    way: str = ""  # Route or method of the request, such as `POST /v1/inference` or `grpc SERVICE/METHOD`.
    trace: TraceContext | None = None  # The client's span, if the request names one and traces are recorded.
    replays: TraceContext | None = None  # Span of the sampled request that this request replays.
    unkept: bool = False  # True if later requests must not use the output.


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """Request for the output of one input, as the ports pass it to the gateway."""

    principal: Principal
    id: str  # UUIDv7 string, unique within the tenant while the request is pending.
    options: RequestOptions
    model: str = ""  # Name of the model, or empty if it isn't known yet.
    input: Value = ""
    parameters: bytes = b""  # JSON object, or empty.


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an entry got no output."""

    code: str  # Code from `headway.errors`, for example `DEADLINE_EXCEEDED`.
    message: str  # Message for the client.
    retry_after: float | None = None  # Seconds after which a retry makes sense, if known.
    reason: str = ""  # Short label for metrics, for example `queue` or `gpu`.


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Final outcome of an entry. Either `output` or `failure` is set."""

    id: str
    tenant: str
    output: Value | None = None
    failure: Failure | None = None
    ran: BatchRun | None = None
    queued: float = 0.0  # Seconds from the enqueue to the last claim.
    attempts: int = 0
    nonce: int = 0  # The entry's nonce. An earlier submission with the same id has another nonce.
    shared: DedupKind | None = None  # If the outcome is that of another entry, the kind of the dedup key they share.
    kept: bool = False  # True if that entry had already finished.
    unkept: bool = False  # True if the outcome should have been kept but is too large. Set by the gateway.
    tokens: TokenCount | None = None


class RequestStatus(msgspec.Struct, frozen=True, gc=False):
    """Status of one request at its gateway."""

    state: EntryState
    seconds: float  # Seconds from the request's arrival until now, or until its outcome.
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int  # Index of its tier.
    since: float | None = None  # Seconds since the outcome, if there is one.
    ran: BatchRun | None = None
    version: str = ""  # Version in whose queue it waited. Empty for the queue for any version.
    failed_part: str = ""  # Id of the later input that caused a request with several inputs to fail.
    part_of: str = ""  # Id of the request, if this is its second or a later input.


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger."""

    id: str  # UUIDv7 string, or an id that the client chose. Several records may share it, but never two pending requests.
    user: str
    tenant: str
    tier: str  # Name of the tier.
    model: str
    status: str  # `completed` or `failed`, or `queued` if there is no outcome yet.
    created_at: float  # Unix time in seconds.
    completed_at: float  # Unix time in seconds of the outcome or, if there is none yet, the latest time for one.
    latency_ms: float  # Milliseconds from decoding the request to its answer.
    batch_size: int = 0  # Number of entries in the last batch, or 0 if the request never ran.
    worker: str = ""  # Id of the worker of the last run.
    version: str = ""  # Version of the last run, or the version that the request waited for. Empty for any.
    error: str = ""  # Code of the failure, or empty.
    requests: int = 1  # Number of requests in this record. Refused requests from one caller may share a record.
    batch_id: str = ""  # Id of the last batch.
    part_of: str = ""  # Id of the request, if this is its second or a later input.
    tokens: int | None = None  # Tokens that the input used in the run that produced the answer, if known.
    input: str | None = None  # Stored only if configured. So is `output`.
    output: str | None = None
