"""Rows of the ledger."""

from __future__ import annotations

import msgspec


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger.

    Attributes:
        id: UUIDv7 text, or what the client chose: several rows may have that, but never two requests that wait.
        user, tenant: principal that asked.
        tier: name of the tier that it was queued in.
        model: name of the model asked.
        status: `completed` or `failed`; `queued` of a request without an outcome.
        created_at, completed_at: Unix time in seconds; without an outcome, until when there is one.
        latency_ms: milliseconds from the decoded request to its answer.
        batch_size: entries in its last batch; 0 when it never ran.
        worker: id of the worker that ran it last; empty when it never ran.
        version: version of the model that ran it last or, where none did, that it waited for; empty for any.
        error: code of the failure; empty for none.
        requests: number of requests that the row stands for: 1, or more for refused requests of one caller.
        batch_id: id of the last batch that it was in; empty when it never ran. Rows with one id are that batch.
        part_of: id of the request with several inputs of which this is a further one; empty for a request.
        tokens: tokens that the input has used in the run that the answer came from; None where nobody has told.
        input, output: stored only where the ledger is told to keep them.
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
    version: str = ""
    error: str = ""
    requests: int = 1
    batch_id: str = ""
    part_of: str = ""
    tokens: int | None = None
    input: str | None = None
    output: str | None = None
