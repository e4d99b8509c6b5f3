"""One request in the ledger."""

from __future__ import annotations

import msgspec


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request in the ledger.

    Attributes:
        id: UUIDv7 text; what a client chose may be that of several, but not of two that wait.
        user, tenant: who asked.
        tier: name of the tier it was queued in.
        model: the model asked.
        status: `completed` or `failed`.
        created_at, completed_at: Unix time in seconds.
        latency_ms: from the decoded request to its answer.
        batch_size: entries in its last batch; 0 when it never ran.
        worker: where it ran last; empty when it never ran.
        error: code of the failure; empty for none.
        requests: that it stands for: 1, but for those of one caller that were refused, which may have one together.
        input, output: only where the ledger is told to keep them.
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
    error: str = ""
    requests: int = 1
    input: str | None = None
    output: str | None = None
