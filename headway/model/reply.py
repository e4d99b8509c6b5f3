"""What became of an entry: an output, or why there is none."""

from __future__ import annotations

import msgspec

from headway.model.batch import BatchRun
from headway.model.entry import DedupKind, EntryState


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
    ran: BatchRun | None = None
    queued: float = 0.0
    attempts: int = 0
    shared: DedupKind | None = None
    kept: bool = False
    nonce: int = 0
    unkept: bool = False


class RequestStatus(msgspec.Struct, frozen=True, gc=False):
    """What a gateway knows of a request.

    Attributes:
        stage: See EntryState.
        seconds: its latency so far.
        failure: why it failed, if it did.
        tenant, user: who asked.
        model: the model asked.
        tier: index of the tier it was queued in.
        since: seconds since it had its outcome; None while it has none.
        ran: the batch that the outcome came from, if it came from one.
    """

    stage: EntryState
    seconds: float
    failure: Failure | None
    tenant: str
    user: str
    model: str
    tier: int
    since: float | None = None
    ran: BatchRun | None = None
