"""The words of the house: what travels between its parts.

Every type here is plain data. Instants (`…_at`) are seconds on the broker's own clock and mean
nothing outside it; what crosses from a gateway to a broker is therefore a *duration*
(`queue_timeout`, `timeout`), never an instant.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

WARM_UP = "warm-up"
"""The input of the batch that a target must pass before it gets real ones, and by which it is probed later."""


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A rate limit that a request counts towards.

    Attributes:
        id: whose, unique in the fleet: one count is kept under it wherever the requests come in.
        name: what is limited, as clients are told: `key`, `user` or `tier`.
        rate: requests a minute on average.
        burst: requests at once.
    """

    id: str
    name: str
    rate: float
    burst: float


class ShareKind(enum.Enum):
    """Why several requests of a tenant may have one answer in common, and which answers are kept for later ones."""

    TASK = "task"
    """Asked for by its id later: every outcome is kept. An entry whose id is not the key only waits for the outcome."""
    KEY = "key"
    """Sent again under the same idempotency key: outputs are kept, and the verdict that the model rejects the input."""
    SAME = "same"
    """Asks the same of the same model: only outputs are kept."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """An answer that an entry may have in common with others of its tenant.

    The first entry with a share leads it: it runs. One that comes while the leader has no outcome joins it and gets
    the leader's; one that comes later gets what was kept, without a run.

    Attributes:
        kind: see ShareKind.
        key: unique within tenant and kind.
        digest: of what is asked; under one key, another digest is a conflict. Empty where the key says it all, and of
            one who only waits.
        keep: seconds for which an outcome is kept; 0: not at all.
        joins: whether it joins a leader that has no outcome yet; if not, it runs beside it.
    """

    kind: ShareKind
    key: str
    digest: bytes = b""
    keep: float = 0.0
    joins: bool = True


Submission = tuple[str, str, int]
"""Tenant, id and nonce: one submission of one gateway."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One input on its way to a GPU, as the gateway hands it to a broker.

    Attributes:
        id: UUIDv7 text; unique together with `tenant`.
        model: name of the model that must answer.
        input: the text itself.
        tier: index into the configured tiers, 0 is the highest.
        tenant: who pays; fairness and isolation are by tenant.
        gateway: id of the gateway that holds the client's connection.
        queue_timeout: seconds it may wait for its first departure.
        timeout: seconds until its answer is worthless, counted from the enqueue.
        parameters: the request's `parameters` as the text of one JSON object, empty for none.
        limits: what it counts towards, once, when it is admitted or joins.
        shares: answers that it may have in common with others; the first that can be joined, or is kept, decides.
        nonce: number of the submission, unique within `gateway`; 0 for entries that are submitted once.
        digest: of what is asked, where the client chose the id; empty elsewhere. An id whose task is kept stands for what
            that task asked.
        caller: who asks on the tenant's behalf: a user or, where there are no keys, a client's address.
    """

    id: str
    model: str
    input: str
    tier: int
    tenant: str
    gateway: str
    queue_timeout: float
    timeout: float
    parameters: bytes = b""
    limits: tuple[Limit, ...] = ()
    shares: tuple[Share, ...] = ()
    nonce: int = 0
    digest: bytes = b""
    caller: str = ""

    @property
    def submission(self) -> Submission:
        """What tells this entry from another under the same id, at the gateway that holds it."""
        return self.tenant, self.id, self.nonce


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why an entry got no output.

    Attributes:
        code: a code of `headway.errors`, for example `DEADLINE_EXCEEDED`.
        message: what happened, for the client to read.
        retry_after: seconds after which a retry makes sense; None when it does not or is not known.
        reason: short label for metrics, for example `queue` or `gpu`.
    """

    code: str
    message: str
    retry_after: float | None = None
    reason: str = ""


class Ran(msgspec.Struct, frozen=True, gc=False):
    """The batch that an answer came from; one object shared by all answers of the batch.

    Attributes:
        worker: id of the worker that ran it.
        size: entries in the batch.
        seconds: from the claim to the end of the run.
        claimed_at: broker instant of the claim.
    """

    worker: str
    size: int
    seconds: float
    claimed_at: float


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The one terminal outcome of an entry, addressed to the gateway that waits for it.

    Exactly one of `output` and `failure` is set. `tenant` is carried so that the gateway can check it
    against the request it holds. `queued` is the wait in seconds from enqueue to the last claim. `shared` is the kind of
    the share that the outcome came by, when it is another entry's; `kept` whether that one had it before. `unkept` is
    set by the gateway: the outcome will not be there later, as was asked, because it is too large. `nonce` is the
    entry's: the outcome of an earlier submission under the same id is not this one's.
    """

    id: str
    tenant: str
    output: str | None = None
    failure: Failure | None = None
    ran: Ran | None = None
    queued: float = 0.0
    attempts: int = 0
    shared: ShareKind | None = None
    kept: bool = False
    nonce: int = 0
    unkept: bool = False


class Item(msgspec.Struct, frozen=True, gc=False):
    """What the black box said of one input: its output, or why that one input failed."""

    output: str | None
    error: str | None = None
    fault: bool = False
    """True when the black box broke its contract (a non-string output), False when it judged the input."""


class Cause(enum.Enum):
    """Why a whole batch failed."""

    RAISED = "raised"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    BAD_OUTPUT = "bad_output"
    REMOTE = "remote"
    REFUSED = "refused"
    LEASE_LOST = "lease_lost"


class BatchFailure(msgspec.Struct, frozen=True):
    """A batch that came to nothing.

    Attributes:
        cause: why.
        message: the error's text, for operators.
        worker: where it happened.
        shown: what of the text a client may read; empty for all of it.
    """

    cause: Cause
    message: str
    worker: str
    shown: str = ""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A place where one batch at a time can run: one GPU process, or one call to a remote API."""

    worker: str
    model: str
    max_batch: int


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to run one batch, for a while.

    Attributes:
        fence: grows with every lease of a queue; a completion with an old fence changes nothing.
        slot: whose batch it is.
        entries: the batch.
        reason: why it left now: `full`, `headway`, `deadline`, `window`, `early` or `retry`.
        granted_at: broker instant of the claim.
        expires_at: broker instant at which the lease ends unless it is extended.
        patience: seconds until the first member's deadline, from the claim on.
    """

    fence: int
    slot: Slot
    entries: Sequence[Entry]
    reason: str
    granted_at: float
    expires_at: float
    patience: float


class Wait(msgspec.Struct, frozen=True, gc=False):
    """Nothing to run now. `until` is the instant at which to ask again; None: when the bell rings."""

    until: float | None


class Settled(msgspec.Struct, frozen=True, gc=False):
    """What a completion came to: `answered` entries, and how many of the batch had `departed` before.

    `fenced` is True when the lease was no longer valid and nothing was changed.
    """

    answered: int
    departed: int
    fenced: bool = False


class Stage(enum.Enum):
    """Where an entry stands: in the queue, in a batch on a GPU, or at its end."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What a gateway knows of a request.

    Attributes:
        stage: see Stage.
        seconds: its latency so far.
        failure: why it failed, if it did.
        tenant, user: who asked.
        model: the model asked.
        tier: index of the tier it was queued in.
        since: seconds since it had its outcome; None while it has none.
        ran: the batch that the outcome came from, if it came from one.
    """

    stage: Stage
    seconds: float
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int
    since: float | None = None
    ran: Ran | None = None


class WorkerStatus(enum.Enum):
    """`starting` until its warm-up batch came back; `degraded` and `offline` by missing heartbeats."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    OFFLINE = "offline"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the worker registry.

    Attributes:
        worker_id: unique name, for example `gpu-0`.
        model: what it serves.
        status: see WorkerStatus.
        utilisation: busy share of the last seconds, 0 to 1.
        in_flight: batches running now, 0 or 1.
        last_heartbeat: broker instant.
        restarts: how often its process was replaced.
        pid: process id of the child, 0 for a remote API.
        memory: share of the memory in use that its process lives in, 0 to 1.
        reason: why it is degraded or offline, in words; empty when it is not, or was told to be.
    """

    worker_id: str
    model: str
    status: WorkerStatus
    utilisation: float = 0.0
    in_flight: int = 0
    last_heartbeat: float = 0.0
    restarts: int = 0
    pid: int = 0
    memory: float = 0.0
    reason: str = ""


class Role(enum.Enum):
    """What a process does. `serve` does all three."""

    SERVE = "serve"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLLER = "controller"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the fleet, as it tells of itself.

    Attributes:
        id: unique; a gateway's is the `gateway` of its entries.
        role: what it does.
        host: name of its machine.
        pid: process id there.
        admin: URL of its admin port, as seen from that machine.
        version: of Headway.
        pending: requests that it holds.
        requests_per_second: that it takes in.
        leads: whether it is the leading controller.
        model: that a gateway serves.
        lowest_per_second, higher_per_second: requests that come to a gateway, of the lowest tier and of the others.
        shared: settings in which all of a fleet must agree, by name.
        last_seen: broker instant; set by the broker.
    """

    id: str
    role: Role
    host: str
    pid: int
    admin: str = ""
    version: str = ""
    pending: int = 0
    requests_per_second: float = 0.0
    leads: bool = False
    model: str = ""
    higher_per_second: float = 0.0
    lowest_per_second: float = 0.0
    shared: dict[str, str] = {}
    last_seen: float = 0.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one model can carry.

    Attributes:
        model: whose.
        healthy: slots that serve.
        degraded: slots that were heard of, but not lately, or rest.
        items_per_second: what the healthy slots do at most together, as measured; 0 before the first batch.
        usable_per_second: the same times the target utilisation; 0 while the broker's memory is scarce.
        scarce: the broker's memory is scarce.
        measured_at: broker instant; set by the broker.
    """

    model: str
    healthy: int
    degraded: int
    items_per_second: float
    usable_per_second: float
    scarce: bool = False
    measured_at: float = 0.0


class TierDepth(msgspec.Struct, frozen=True):
    """Depth of one tier of one model's queue, and how long its oldest entry has waited, in seconds."""

    model: str
    tier: int
    depth: int
    oldest_seconds: float


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that made the model fail when it stood alone.

    Attributes:
        entry: the entry as it was enqueued.
        error: what the model said last.
        cause: why the last run failed.
        attempts: how often it was claimed.
        worker: where it failed last.
        died_at: Unix time in seconds.
    """

    entry: Entry
    error: str
    cause: str
    attempts: int
    worker: str
    died_at: float


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks: the result of authentication.

    Attributes:
        user: unique within the tenant.
        tenant: who pays.
        tier: index into the configured tiers.
        limits: what each of its requests counts towards.
        models: the only models it may ask; empty for all.
        key: id of its key, empty where there is none.
    """

    user: str
    tenant: str
    tier: int
    limits: tuple[Limit, ...] = ()
    models: frozenset[str] = frozenset()
    key: str = ""


class Key(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An API key as it is kept: all but the secret.

    Attributes:
        id: the part of the key's text by which it is looked up.
        digest: SHA-256 of the secret.
        user, tenant: whose.
        tier: name of the tier.
        models: the only models it may ask; empty for all.
        rate: requests a minute of this key; None: the key counts towards its user's limit; 0: no limit.
        burst: requests at once; None: ten seconds' worth of the rate.
        created_at: Unix time in seconds.
        expires_at: Unix time from which it is not valid; None: never. A revoked key has expired.
        replaces: id of the key that it was made to replace, empty for none.
    """

    id: str
    digest: bytes
    user: str
    tenant: str
    tier: str
    models: tuple[str, ...] = ()
    rate: float | None = None
    burst: float | None = None
    created_at: float
    expires_at: float | None = None
    replaces: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger.

    Attributes:
        id: UUIDv7 text; what a client chose may be that of several, but not of two that wait.
        user, tenant: who asked.
        tier: name of the tier it was queued in.
        model: the model asked.
        status: `completed` or `failed`.
        created_at, completed_at: Unix time in seconds.
        latency_ms: from the decoded request to its answer.
        batch_size: entries in its last batch; 0 when it never ran.
        worker: where it ran last; empty when it never ran.
        error: code of the failure; empty for none.
        requests: that it stands for: 1, but for those of one caller that were refused, which may have one together.
        input, output: only where the ledger is told to keep them.
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
    error: str = ""
    requests: int = 1
    input: str | None = None
    output: str | None = None
