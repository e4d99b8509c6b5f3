"""The ledger in PostgreSQL.

Rows are copied in. COPY fails as a whole on a row that is there already; then the same rows go in by an INSERT, which
passes over such rows. A bad row is found before it is sent, or named by the server.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
from asyncpg.pgproto.pgproto import UUID
from msgspec.structs import astuple

from headway.model import LedgerRecord
from headway.storage.postgres.connection import RowRefused
from headway.storage.postgres.connection_pair import ConnectionPair

_TYPES = {
    "id": "uuid",
    "user_id": "text",
    "tenant": "text",
    "tier": "text",
    "model": "text",
    "status": "text",
    "created_at": "timestamptz",
    "completed_at": "timestamptz",
    "latency_ms": "real",
    "batch_size": "smallint",
    "worker": "text",
    "version": "text",
    "error": "text",
    "requests": "integer",
    "batch_id": "text",
    "part_of": "text",
    "tokens": "integer",
    "input": "text",
    "output": "text",
}
_COLUMNS = ", ".join(_TYPES)
_ARRAYS = ", ".join(f"${number}::{type}[]" for number, type in enumerate(_TYPES.values(), 1))
_INSERT = f"""
INSERT INTO headway_requests ({_COLUMNS}) SELECT * FROM unnest({_ARRAYS}) ON CONFLICT DO NOTHING
"""  # noqa: S608
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = $1 ORDER BY completed_at DESC"  # noqa: S608
_PRUNE = """
WITH removed AS (DELETE FROM headway_requests WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM headway_requests WHERE completed_at < $1 ORDER BY completed_at LIMIT $2
)) RETURNING 1) SELECT count(*) FROM removed
"""
"""Statement that removes old rows.

It needs no FOR UPDATE, whose privilege nothing else needs: of two removals one waits.
"""

_from_unix = datetime.fromtimestamp


class PostgresLedger:
    """Ledger in PostgreSQL. See `headway.ports.Ledger`.

    Arguments:
        url: URL of the database.
    """

    def __init__(self, url: str) -> None:
        self._pair = ConnectionPair(url)

    async def open(self) -> None:
        """See Ledger."""
        await self._pair.open()

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        """See Ledger."""
        rows = [_row(record) for record in records]
        try:
            async with self._pair.writing() as session:
                await session.copy("headway_requests", list(_TYPES), rows)
                return
        except RowRefused as exc:
            if not isinstance(exc.__cause__, asyncpg.UniqueViolationError):
                raise
        async with self._pair.writing() as session:
            await session.execute(_INSERT, *zip(*rows, strict=True))

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        """See Ledger."""
        try:
            key = uuid.UUID(id)
        except ValueError:
            return ()
        async with self._pair.asking() as session:
            return [_record(row) for row in await session.fetch(_FIND, key)]

    async def prune(self, before: float, limit: int) -> int:
        """See Ledger."""
        async with self._pair.asking() as session:
            removed = await session.fetchval(_PRUNE, _from_unix(before, UTC), limit)
        return int(removed)

    async def close(self) -> None:
        """See Ledger."""
        await self._pair.close()


def _row(record: LedgerRecord) -> tuple[Any, ...]:
    row = astuple(record)
    return (UUID(row[0]), *row[1:6], _from_unix(row[6], UTC), _from_unix(row[7], UTC), *row[8:])


def _record(row: Sequence[Any]) -> LedgerRecord:
    values = [str(row[0]), *row[1:6], row[6].timestamp(), row[7].timestamp(), *row[8:]]
    return LedgerRecord(**dict(zip(LedgerRecord.__struct_fields__, values, strict=True)))
