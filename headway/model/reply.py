"""Outcomes of an entry: an output, or a failure."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState
from headway.model.value import TokenCount, Value


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Reason for which an entry got no output.

    Attributes:
        code: a code of `headway.errors`, for example `DEADLINE_EXCEEDED`.
        message: what happened, for the client to read.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics, for example `queue` or `gpu`.
    """

    code: str
    message: str
    retry_after: float | None = None
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The one terminal outcome of an entry, addressed to the gateway that waits for it.

    Exactly one of `output` and `failure` is set.

    Attributes:
        tenant: the entry's tenant; the gateway checks it against the pending request.
        queued: seconds from the enqueue to the last claim.
        shared: kind of the dedup key by which the outcome came, when it is another entry's.
        kept: whether the entry that shared it had its outcome before.
        tokens: tokens that the input has used in the run that the outcome came from; None where nobody has told.
        unkept: set by the gateway when the outcome is too large to be kept, although that was asked for.
        nonce: the entry's nonce; the outcome of an earlier submission under the same id has another.
    """

    id: str
    tenant: str
    output: Value | None = None
    failure: Failure | None = None
    ran: BatchRun | None = None
    queued: float = 0.0
    attempts: int = 0
    nonce: int = 0
    shared: DedupKind | None = None
    kept: bool = False
    unkept: bool = False
    tokens: TokenCount | None = None


class RequestStatus(msgspec.Struct, frozen=True, gc=False):
    """State of one request, as its gateway knows it.

    Attributes:
        state: see EntryState.
        seconds: seconds since the request came, or until its outcome.
        failure: why it failed; None when it did not.
        tenant, user: principal that asked.
        model: name of the model asked.
        tier: index of the tier that it was queued in.
        since: seconds since it had its outcome; None while it has none.
        ran: run of the batch that the outcome came from; None when it came from none.
        version: version whose queue it waited in; empty: that for any.
        failed_part: id of the further one of its several inputs for which it failed; empty for none.
        part_of: id of the request with several inputs of which this is a further one; empty for a request.
    """

    state: EntryState
    seconds: float
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int
    since: float | None = None
    ran: BatchRun | None = None
    version: str = ""
    failed_part: str = ""
    part_of: str = ""
