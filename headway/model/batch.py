"""A batch: the right to run it, and what came of the run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from headway.model.entry import Entry

WARM_UP = "warm-up"
"""The input of the batch that a target must pass before it gets real ones, and by which it is probed later."""


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


class NoWork(msgspec.Struct, frozen=True, gc=False):
    """Nothing to run now. `until` is the instant at which to ask again; None: when the bell rings."""

    until: float | None


class BatchRun(msgspec.Struct, frozen=True, gc=False):
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


class ItemResult(msgspec.Struct, frozen=True, gc=False):
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


class Completion(msgspec.Struct, frozen=True, gc=False):
    """What a completion came to: `answered` entries, and how many of the batch had `departed` before.

    `fenced` is True when the lease was no longer valid and nothing was changed.
    """

    answered: int
    departed: int
    fenced: bool = False
