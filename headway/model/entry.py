"""Entries: inputs on their way to a GPU, the queues where they wait, and the answers that they may share."""

from __future__ import annotations

import enum

import msgspec

from headway.model.identity import Limit
from headway.model.value import Value


class QueueName(msgspec.Struct, frozen=True, gc=False):
    """Name of a queue. Written as `MODEL@VERSION`, or as `MODEL` for the queue for any version."""

    model: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.model}@{self.version}" if self.version else self.model


class DedupKind(enum.Enum):
    """Kinds of answers that requests of a tenant may share. The kind determines which outcomes are kept."""

    TASK = "task"  # Task. Its outcome is fetched by its id. Other entries may follow it (`core.dedup.follower`).
    KEY = "key"  # Idempotency key. Outputs are kept, and so is the model's rejection of an input.
    SAME = "same"  # Identical requests to the same model. Only outputs from the workers' newest code are kept.


class DedupKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name of an answer that an entry may share with other entries of its tenant.

    The first entry with a dedup key is the original, which runs. Until it has an outcome, later entries follow it, and get the
    same outcome. After that, they get the kept outcome, and don't run."""

    kind: DedupKind
    key: str  # Unique within tenant and kind.
    digest: bytes = b""  # Digest of the request; other digests conflict. Empty if the key is enough, or for a follower.
    keep: float = 0.0  # Seconds for which an outcome is kept.
    joins: bool = True  # True to follow an original that has no outcome yet, False to run as well.
    renews: bool = False  # True to run even if an outcome is kept, and then replace that outcome.


Submission = tuple[str, str, int]  # Tenant, id and nonce. They identify a submission at its gateway.


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One input on its way to a GPU, as the gateway submits it to a broker. Fields up to `trace` are stored, in this order. The
    others only matter for admission and packing."""

    id: str  # UUIDv7 string, unique within the tenant.
    model: str
    input: Value
    tier: int  # Index into the configured tiers, from 0 for the highest.
    tenant: str  # Name of the account that is charged.
    gateway: str  # Id of the gateway that holds the client's connection.
    queue_timeout: float  # Seconds that the entry may wait for its first departure.
    timeout: float  # Seconds from the enqueue after which an answer is useless.
    parameters: bytes = b""  # The request's `parameters` as JSON, or empty.
    nonce: int = 0  # Number of the submission, unique within `gateway`. 0 for entries that are submitted once.
    caller: str = ""  # Name of the tenant's user who sent the request, or the client's address if there are no keys.
    weight: int = 1  # What it adds to the weight of its batch, at least 1. Always 1 if batches have no weight limit.
    version: str = ""  # Version in whose queue it waits. Empty for the queue for any version.
    pinned: bool = False  # True if the request names a version, so no other version may answer.
    dedup_keys: tuple[DedupKey, ...] = ()  # Answers that it may share. The first that is kept or awaited is used.
    trace: bytes = b""  # Trace of a sampled request, packed by `headway.core.trace_context`.
    limits: tuple[Limit, ...] = ()  # Rate limits that are charged once, when the entry is admitted or joins.
    digest: bytes = b""  # Digest of the request if the client chose the id. Other requests can't use a kept task's id.
    payer: int = 0  # Nonce of the entry charged for all inputs of its request, which are admitted together; 0 if none.
    count: int = 1  # Number of inputs of its request that are admitted with it, including itself.
    claims: bool = False  # True for a task whose id the client chose. Other models may not use the id then.
    shape: int = 0  # Number shared by entries that may be in the same batch. See `headway.core.rows.shape_number`.

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)

    @property
    def submission(self) -> Submission:
        return self.tenant, self.id, self.nonce


class EntryState(enum.Enum):
    """States of an entry: in the queue, in a batch on a GPU, or finished."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry on which the model failed even when it ran alone, with its last failure."""

    entry: Entry
    error: str
    cause: str
    attempts: int  # Number of times that it was claimed.
    worker: str
    died_at: float  # Unix time in seconds.
    version: str = ""  # Version of the model that the worker ran, or empty if unknown.
    batch_id: str = ""  # See `headway.model.batch.batch_id`.

    def without_input(self) -> DeadLetter:
        return msgspec.structs.replace(self, entry=msgspec.structs.replace(self.entry, input="", parameters=b""))
