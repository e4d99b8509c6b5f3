"""Rows of requests without an outcome, which have a table of their own: it stays small, and the ledger's only grows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.model import LedgerRecord

COLUMNS = ("id", "user_id", "tenant", "tier", "model", "version", "part_of", "created_at", "due_at")
"""Columns of `headway_open_requests`."""


def open_row(record: LedgerRecord) -> tuple[Any, ...]:
    """Row of a record, with its id and Unix times as they are there."""
    own = record.id, record.user, record.tenant, record.tier, record.model
    return *own, record.version, record.part_of, record.created_at, record.completed_at


def open_record(row: Sequence[Any]) -> LedgerRecord:
    """Record of a row; the reverse."""
    id, user, tenant, tier, model, version, part_of, created_at, due_at = row
    return LedgerRecord(
        id=id,
        user=user,
        tenant=tenant,
        tier=tier,
        model=model,
        status="queued",
        created_at=created_at,
        completed_at=due_at,
        latency_ms=0.0,
        version=version,
        part_of=part_of,
    )


def together(ended: Sequence[LedgerRecord], open: Sequence[LedgerRecord]) -> Sequence[LedgerRecord]:
    """Records of one id, those without an outcome last; one whose outcome is there is about to be removed, and left out."""
    last = {record.tenant: record.completed_at for record in reversed(ended)}
    return [*ended, *(one for one in open if last.get(one.tenant, one.created_at) <= one.created_at)]
