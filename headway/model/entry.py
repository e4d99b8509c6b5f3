"""One input on its way to a GPU, and what it may have in common with others."""

from __future__ import annotations

import enum

import msgspec

from headway.model.identity import Limit


class DedupKind(enum.Enum):
    """Why several requests of a tenant may have one answer in common, and which answers are kept for later ones."""

    TASK = "task"
    """Asked for by its id later: every outcome is kept. An entry whose id is not the key only waits for the outcome."""
    KEY = "key"
    """Sent again under the same idempotency key: outputs are kept, and the verdict that the model rejects the input."""
    SAME = "same"
    """Asks the same of the same model: only outputs are kept."""


class DedupKey(msgspec.Struct, frozen=True, gc=False):
    """An answer that an entry may have in common with others of its tenant.

    The first entry with a share leads it: it runs. One that comes while the leader has no outcome joins it and gets
    the leader's; one that comes later gets what was kept, without a run.

    Attributes:
        kind: see DedupKind.
        key: unique within tenant and kind.
        digest: of what is asked; under one key, another digest is a conflict. Empty where the key says it all, and of
            one who only waits.
        keep: seconds for which an outcome is kept; 0: not at all.
        joins: whether it joins a leader that has no outcome yet; if not, it runs beside it.
    """

    kind: DedupKind
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
    shares: tuple[DedupKey, ...] = ()
    nonce: int = 0
    digest: bytes = b""
    caller: str = ""

    @property
    def submission(self) -> Submission:
        """What tells this entry from another under the same id, at the gateway that holds it."""
        return self.tenant, self.id, self.nonce


class EntryState(enum.Enum):
    """Where an entry stands: in the queue, in a batch on a GPU, or at its end."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


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
