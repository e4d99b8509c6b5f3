"""Batches: the lease to run one, and what came of the run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from headway.model.entry import Entry, QueueName
from headway.model.fleet import ModelReport
from headway.model.value import Tensors, TokenCount, Value


def batch_id(worker: str, claimed_at: float) -> str:
    """Return the id of a batch: a worker runs one at a time, so it and the broker instant of the claim name it, also in the server."""
    return f"{worker}@{claimed_at:.6f}"


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A place where one batch at a time can run: one GPU process, or one call to a remote API.

    Attributes:
        worker: id of the worker.
        model: name of the model that it serves.
        max_batch: most entries in a batch.
        max_weight: most weight of a batch; 0 where entries are not weighed.
        runs: report on the model that it runs.
        version: version whose queue it claims from; empty: the queue for any.
        helps: whether it has its home in another queue, and only helps out in this one.
    """

    worker: str
    model: str
    max_batch: int
    max_weight: int = 0
    runs: ModelReport = ModelReport()
    version: str = ""
    helps: bool = False

    @property
    def queue(self) -> QueueName:
        """Name of the queue that it claims from."""
        return QueueName(self.model, self.version)


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to run one batch for a limited time.

    Attributes:
        fence: number that grows with every lease of a queue; a completion with an old fence changes nothing.
        slot: the slot that owns the lease.
        entries: the batch.
        reason: why the batch left now: `full`, `headway`, `deadline`, `window`, `early` or `retry`.
        granted_at: broker instant of the claim.
        expires_at: broker instant at which the lease ends unless it is extended.
        time_left: seconds from the claim until the first member's deadline.
        attempt: number of the run, as it is counted for all of them; 1 for the first.
    """

    fence: int
    slot: Slot
    entries: Sequence[Entry]
    reason: str
    granted_at: float
    expires_at: float
    time_left: float
    attempt: int = 1

    @property
    def batch_id(self) -> str:
        """Id of the batch; see `batch_id`."""
        return batch_id(self.slot.worker, self.granted_at)

    @property
    def fill(self) -> float:
        """Share of the largest batch that this one fills, by number or by weight, whichever is more."""
        slot, fill = self.slot, len(self.entries) / self.slot.max_batch
        if not slot.max_weight:
            return fill
        weight = sum(entry.weight for entry in self.entries)
        return max(fill, min(weight / slot.max_weight, 1.0))  # What is heavier runs alone, as a full batch.

    @property
    def size(self) -> float:
        """Size as run times go by it: the number of entries, unless they are weighed and more than that by weight."""
        return self.fill * self.slot.max_batch if self.slot.max_weight else len(self.entries)

    @property
    def rows(self) -> int:
        """Rows of its entries, where those are tensors, as they weigh them; else the number of entries. A model takes one kind."""
        return round(self.size) if isinstance(self.entries[0].input, Tensors) else len(self.entries)


class NoWork(msgspec.Struct, frozen=True, gc=False):
    """Answer of a claim that got no batch.

    Attributes:
        until: broker instant at which to claim again; None: when the slot is woken.
    """

    until: float | None


class BatchRun(msgspec.Struct, frozen=True, gc=False):
    """Run of the batch that an answer came from. All answers of the batch share one object.

    Attributes:
        worker: id of the worker that ran it.
        size: entries in the batch.
        seconds: seconds from the claim to the end of the run.
        claimed_at: broker instant of the claim.
        version: version of the model that the worker ran; empty where it told none.
        target: digest of the target that it ran, where that matters; see ModelReport.
    """

    worker: str
    size: int
    seconds: float
    claimed_at: float
    version: str = ""
    target: str = ""

    @property
    def batch_id(self) -> str:
        """Id of the batch; see `batch_id`."""
        return batch_id(self.worker, self.claimed_at)


class ItemResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one input of a batch: its output, or why that one input failed."""

    output: Value | None
    error: str | None = None
    fault: bool = False
    """True when the black box broke its contract, as with an output that cannot be sent.

    False when it rejected the input.
    """
    elsewhere: bool = False
    """True when the entry did not run, as it is pinned to a version that the worker does not run."""
    tokens: TokenCount | None = None
    """Tokens that the input has used, as the target or the remote API tells; None when it does not."""
    crowded: bool = False
    """True for a bulk line whose output was left out, as those of the lines in its batch are too large together; it is to run again."""
    left_out: int = 0
    """Bytes of a request's output that was left out, as those of its batch are too large together; it runs again, apart. 0: it was not."""


class Cause(enum.Enum):
    """Causes for which a whole batch fails."""

    RAISED = "raised"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    BAD_OUTPUT = "bad_output"
    REMOTE = "remote"
    REFUSED = "refused"
    LEASE_LOST = "lease_lost"


class BatchFailure(msgspec.Struct, frozen=True):
    """A batch that failed as a whole.

    Attributes:
        cause: why it failed.
        message: the error's text, for operators.
        worker: id of the worker on which it failed.
        shown: part of the text that a client may read; empty for all of it.
        places: places in the batch of the inputs of the call that raised, where it was cut into several; empty where all are meant.
    """

    cause: Cause
    message: str
    worker: str
    shown: str = ""
    places: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Result of handing in a batch: how many entries were answered, and how many had departed before.

    `fenced` is True when the lease was no longer valid and nothing was changed.
    """

    answered: int
    departed: int
    fenced: bool = False
