"""Entries: inputs on their way to a GPU, the queues where they wait, and the answers that they may share."""

from __future__ import annotations

import enum

import msgspec

from headway.model.identity import Limit
from headway.model.value import Value


class QueueName(msgspec.Struct, frozen=True, gc=False):
    """Name of a queue. As a text it is `MODEL@VERSION`, or `MODEL` for any version."""

    model: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.model}@{self.version}" if self.version else self.model


class DedupKind(enum.Enum):
    """Kinds of answers that requests of a tenant may share. The kind decides which outcomes are kept."""

    TASK = "task"  # Task. Its outcome is fetched later by its id. Other entries may follow it (`core.dedup.follower`).
    KEY = "key"  # Idempotency key. Outputs are kept, and so are the model's rejections of the input.
    SAME = "same"  # Identical request to the same model. Only outputs of the newest code of its workers are kept.


class DedupKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name of an answer that an entry may share with others of its tenant.

    The first entry with a dedup key is the original, which runs. An entry that comes before the original has an outcome
    follows it and gets the same outcome. A later entry gets the kept outcome without a run."""

    kind: DedupKind
    key: str  # Unique within tenant and kind.
    # Digest of the request. Another digest under the same key is a conflict. Empty if the key alone identifies the
    # request, and for an entry that only waits.
    digest: bytes = b""
    keep: float = 0.0  # Seconds for which an outcome is kept.
    joins: bool = True  # True to join an original without an outcome, False to run beside it.
    renews: bool = False  # True to run although an outcome is kept, and to replace that outcome.


Submission = tuple[str, str, int]  # Tenant, id and nonce, which identify a submission at its gateway.


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One input on its way to a GPU, as the gateway hands it to a broker.

    The fields are stored in this order. The fields from `limits` on only matter for admission and packing, and aren't stored."""

    id: str  # UUIDv7 text, unique within the tenant.
    model: str
    input: Value
    tier: int  # Index into the configured tiers, from 0 for the highest.
    tenant: str  # Name of the account that pays.
    gateway: str  # Id of the gateway that holds the client's connection.
    queue_timeout: float  # Seconds that the entry may wait for its first departure.
    timeout: float  # Seconds from the enqueue until an answer is worthless.
    parameters: bytes = b""  # The request's `parameters` as the text of a JSON object, or empty.
    nonce: int = 0  # Number of the submission, unique within `gateway`. 0 for entries that are submitted once.
    caller: str = ""  # Name of the user for whom the tenant asks, or the client's address if there are no keys.
    weight: int = 1  # Part of its batch's weight, at least 1. Always 1 if batches aren't bounded by weight.
    version: str = ""  # Version of the model in whose queue it waits, or empty for the queue for any.
    pinned: bool = False  # True if the request names a version, so that no other may answer.
    # Names of answers that it may share. The first that can be joined, or has a kept outcome, decides.
    dedup_keys: tuple[DedupKey, ...] = ()
    trace: bytes = b""  # Trace of a sampled request, packed by `headway.core.trace_context`.
    limits: tuple[Limit, ...] = ()  # Rate limits that are charged once, when the entry is admitted or joins.
    # Digest of the request, if the client chose the id. The id of a kept task belongs to its digest.
    digest: bytes = b""
    # Nonce of the entry that pays for all inputs of its request, and with which it is admitted or refused. 0 for none.
    payer: int = 0
    count: int = 1  # Number of inputs of its request that are admitted with it, including itself.
    claims: bool = False  # True for a task whose client chose the id. The id then belongs to the model.
    shape: int = 0  # Number shared by entries that may ride together. See `headway.core.rows.shape_number`.

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)

    @property
    def submission(self) -> Submission:
        return self.tenant, self.id, self.nonce


class EntryState(enum.Enum):
    """States of an entry: in the queue, in a batch on a GPU, or at its end."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that made the model fail when it ran alone, with its last failure."""

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
