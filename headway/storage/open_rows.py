"""Requests without an outcome. They have a small table of their own, so that the ledger's table only grows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.model import LedgerRecord

COLUMNS = ("id", "user_id", "tenant", "tier", "model", "version", "part_of", "created_at", "due_at")
"""Columns of `headway_open_requests`."""


def open_row(record: LedgerRecord) -> tuple[Any, ...]:
    """Return the row of a record, with a text id and Unix times."""
    return (
        record.id, record.user, record.tenant, record.tier, record.model, record.version, record.part_of,
        record.created_at, record.completed_at,
    )  # fmt: skip


def open_record(row: Sequence[Any]) -> LedgerRecord:
    """Return the record of a row."""
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
    """Join the records of one id. An open record of an ended request is left out, because its row is about to go."""
    last = {record.tenant: record.completed_at for record in reversed(ended)}
    still_open = (record for record in open if last.get(record.tenant, record.created_at) <= record.created_at)
    return [*ended, *still_open]
