"""Batches: the lease to run one, and the result of the run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from headway.model.entry import Entry, QueueName
from headway.model.fleet import ModelReport
from headway.model.value import Tensors, TokenCount, Value


def batch_id(worker: str, claimed_at: float) -> str:
    """Return the id of a batch. It is unique, because a worker runs one batch at a time."""
    return f"{worker}@{claimed_at:.6f}"


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A place that can run one batch at a time: a GPU process, or a call to a remote API."""

    worker: str
    model: str
    max_batch: int  # Maximum number of entries in a batch.
    max_weight: int = 0  # Maximum weight of a batch, or 0 if entries aren't weighed.
    runs: ModelReport = ModelReport()
    version: str = ""  # Version whose queue it claims from. Empty for the queue for any version.
    helps: bool = False  # True if the slot helps out by claiming from a queue other than its own.

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Permission to run one batch for a limited time."""

    fence: int  # Increases with every lease of a queue. A completion with an outdated fence changes nothing.
    slot: Slot
    entries: Sequence[Entry]
    reason: str  # Why the batch left; see `core.departure.REASONS`.
    granted_at: float  # Broker time of the claim.
    expires_at: float  # Broker time at which the lease expires unless it is extended.
    time_left: float  # Seconds from the claim to the earliest deadline of the entries.
    attempt: int = 1  # How many times the entries have been claimed, including this time.

    @property
    def batch_id(self) -> str:
        return batch_id(self.slot.worker, self.granted_at)

    @property
    def fill(self) -> float:
        """Share of a full batch that this batch fills, by number of entries or by weight, whichever is larger."""
        slot, fill = self.slot, len(self.entries) / self.slot.max_batch
        if not slot.max_weight:
            return fill
        weight = sum(entry.weight for entry in self.entries)
        return max(fill, min(weight / slot.max_weight, 1.0))  # An entry above the limit runs alone, as a full batch.

    @property
    def size(self) -> float:
        """Number of entries or, if larger, `max_batch` times their share of the weight limit. It determines the run time."""
        return self.fill * self.slot.max_batch if self.slot.max_weight else len(self.entries)

    @property
    def rows(self) -> int:
        """Number of rows if the entries are tensors (each row has weight 1), otherwise the number of entries."""
        return round(self.size) if isinstance(self.entries[0].input, Tensors) else len(self.entries)


class NoWork(msgspec.Struct, frozen=True, gc=False):
    """Result of a claim if there is no batch. Claim again when the slot is woken or, if `until` is set, at that broker time."""

    until: float | None


class BatchRun(msgspec.Struct, frozen=True, gc=False):
    """Facts about the run of a batch, shared by the answers to all its entries."""

    worker: str
    size: int  # Number of entries in the batch.
    seconds: float  # Seconds from the claim to the end of the run.
    claimed_at: float  # Broker time of the claim.
    version: str = ""  # Version of the model that the worker ran, or empty if unknown.
    target: str = ""  # Digest of the target's code, if it matters which code ran. See `ModelReport`.

    @property
    def batch_id(self) -> str:
        return batch_id(self.worker, self.claimed_at)


class ItemResult(msgspec.Struct, frozen=True, gc=False):
    """Result for one input of a batch: its output, or why it failed."""

    output: Value | None
    error: str | None = None
    fault: bool = False  # True if the target broke its contract, rather than rejecting the input.
    elsewhere: bool = False  # True if the entry didn't run because it is pinned to a version other than the worker's.
    tokens: TokenCount | None = None  # Tokens that the input used, if the target or the API says so.
    crowded: bool = False  # True for a bulk line that must run again: the outputs of its batch were too large in total.
    left_out: int = 0  # Size of an output dropped because those of its batch were too large. Its entry runs again.


class Cause(enum.Enum):
    """Reasons why an entire batch fails."""

    RAISED = "raised"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    BAD_OUTPUT = "bad_output"
    REMOTE = "remote"
    REFUSED = "refused"
    LEASE_LOST = "lease_lost"


class BatchFailure(msgspec.Struct, frozen=True):
    """Failure of an entire batch."""

    cause: Cause
    message: str  # Error message for operators.
    worker: str
    shown: str = ""  # Part of the message that clients may see. Empty for all of it.
    places: tuple[int, ...] = ()  # Positions in the batch of the inputs of the call that raised. Empty for all inputs.


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Result of completing a batch."""

    answered: int  # Number of entries that were answered.
    departed: int  # Number of entries that had been withdrawn or had expired before.
    fenced: bool = False  # True if nothing changed because the lease was no longer valid.
