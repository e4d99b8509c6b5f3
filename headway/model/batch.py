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
    """A place where one batch at a time can run: a GPU process, or a call to a remote API."""

    worker: str
    model: str
    max_batch: int  # Maximum number of entries in a batch.
    max_weight: int = 0  # Maximum weight of a batch, or 0 if entries aren't weighed.
    runs: ModelReport = ModelReport()
    version: str = ""  # Version whose queue it claims from, or empty for the queue for any.
    helps: bool = False  # True if the slot helps out at a queue that isn't its own.

    @property
    def queue(self) -> QueueName:
        return QueueName(self.model, self.version)


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to run one batch for a limited time."""

    fence: int  # Number that grows with every lease of a queue. A completion with an old fence changes nothing.
    slot: Slot
    entries: Sequence[Entry]
    reason: str  # Why the batch left; see `core.departure.REASONS`.
    granted_at: float  # Broker instant of the claim.
    expires_at: float  # Broker instant at which the lease ends unless it is extended.
    time_left: float  # Seconds from the claim until the first deadline of an entry.
    attempt: int = 1  # Number of this run of the entries, from 1.

    @property
    def batch_id(self) -> str:
        return batch_id(self.slot.worker, self.granted_at)

    @property
    def fill(self) -> float:
        """Share of a full batch that this batch fills, by number or by weight, whichever is larger."""
        slot, fill = self.slot, len(self.entries) / self.slot.max_batch
        if not slot.max_weight:
            return fill
        weight = sum(entry.weight for entry in self.entries)
        return max(fill, min(weight / slot.max_weight, 1.0))  # A heavier entry runs alone, as a full batch.

    @property
    def size(self) -> float:
        """Size that determines the run time. It is the number of entries or, if larger, their weight in places of a full batch."""
        return self.fill * self.slot.max_batch if self.slot.max_weight else len(self.entries)

    @property
    def rows(self) -> int:
        """Number of rows if the entries are tensors, which weigh one per row, otherwise the number of entries."""
        return round(self.size) if isinstance(self.entries[0].input, Tensors) else len(self.entries)


class NoWork(msgspec.Struct, frozen=True, gc=False):
    """Result of a claim without a batch. Claim again at broker instant `until` if it is set, or once the slot is woken."""

    until: float | None


class BatchRun(msgspec.Struct, frozen=True, gc=False):
    """Run of an answered entry's batch. All answers of the batch share this object."""

    worker: str
    size: int  # Number of entries in the batch.
    seconds: float  # Seconds from the claim to the end of the run.
    claimed_at: float  # Broker instant of the claim.
    version: str = ""  # Version of the model that the worker ran, or empty if unknown.
    target: str = ""  # Digest of the target that the worker ran, if that matters. See `ModelReport`.

    @property
    def batch_id(self) -> str:
        return batch_id(self.worker, self.claimed_at)


class ItemResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one input of a batch: its output, or why this input failed."""

    output: Value | None
    error: str | None = None
    fault: bool = False  # True if the target broke its contract rather than rejected the input.
    elsewhere: bool = False  # True if the entry didn't run because it is pinned to another version than the worker's.
    tokens: TokenCount | None = None  # Tokens that the input used, if the target or the API says so.
    # True for a bulk line that must run again because the outputs of its batch were too large together.
    crowded: bool = False
    # Size of an output that was dropped because its batch's outputs were too large together. The entry runs again.
    left_out: int = 0


class Cause(enum.Enum):
    """Reasons why a whole batch fails."""

    RAISED = "raised"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    BAD_OUTPUT = "bad_output"
    REMOTE = "remote"
    REFUSED = "refused"
    LEASE_LOST = "lease_lost"


class BatchFailure(msgspec.Struct, frozen=True):
    """A batch that failed as a whole."""

    cause: Cause
    message: str  # Text of the error, for operators.
    worker: str
    shown: str = ""  # Part of the text that clients may read, or empty for all of it.
    places: tuple[int, ...] = ()  # Places in the batch of the inputs in the call that raised, or empty for all.


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Result of completing a batch: the number of entries that were answered, and of entries that had left before.

    `fenced` is True if nothing was changed, because the lease was no longer valid."""

    answered: int
    departed: int
    fenced: bool = False
