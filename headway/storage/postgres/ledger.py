"""The ledger in PostgreSQL.

Rows are written by COPY. It fails as a whole if a row exists already, and then the rows are written again by an INSERT that
skips existing rows. asyncpg or the server names a bad value.
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
from headway.ports import Ledger
from headway.storage.bulk_rows import BulkRows
from headway.storage.open_rows import COLUMNS, open_record, open_row, together
from headway.storage.postgres.database import PostgresStore, RowRefused

LOCK = 0x4865616477617933
"""Number of the advisory lock for changes of jobs and files."""


class PostgresBulkStore(PostgresStore, BulkRows):
    """Store of bulk jobs in PostgreSQL. See `headway.ports.BulkStore`."""

    now = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            return await session.fetch(sql, *map(_stored, values))

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        async with self.reading() as session:
            return await session.fetch(sql, *map(_stored, values))


def _stored(value: object) -> object:
    """Replace NUL, which PostgreSQL can't store. An id with a NUL that a client looks up isn't found then."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


_TYPES = {
    "id": "uuid", "user_id": "text", "tenant": "text", "tier": "text", "model": "text", "status": "text",
    "created_at": "timestamptz", "completed_at": "timestamptz", "latency_ms": "real", "batch_size": "smallint", "worker": "text",
    "version": "text", "error": "text", "requests": "integer", "batch_id": "text", "part_of": "text", "tokens": "integer",
    "input": "text", "output": "text",
}  # fmt: skip
_COLUMNS = ", ".join(_TYPES)
_ARRAYS = ", ".join(f"${number}::{type}[]" for number, type in enumerate(_TYPES.values(), 1))
_INSERT = f"""
INSERT INTO headway_requests ({_COLUMNS}) SELECT * FROM unnest({_ARRAYS}) ON CONFLICT DO NOTHING
"""  # noqa: S608
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = $1 ORDER BY completed_at DESC"  # noqa: S608
_NOTE = f"""
INSERT INTO headway_open_requests ({", ".join(COLUMNS)})
SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::timestamptz[], $9::timestamptz[])
ON CONFLICT (id, tenant) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])}
"""  # noqa: S608
_FORGET = """
DELETE FROM headway_open_requests AS open USING unnest($1::uuid[], $2::text[]) AS gone (id, tenant)
WHERE open.id = gone.id AND open.tenant = gone.tenant
"""
_FIND_OPEN = f"SELECT {', '.join(COLUMNS)} FROM headway_open_requests WHERE id = $1"  # noqa: S608
_PRUNE_OPEN = "DELETE FROM headway_open_requests WHERE due_at < $1"
_PRUNE = """
WITH removed AS (DELETE FROM headway_requests WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM headway_requests WHERE completed_at < $1 ORDER BY completed_at LIMIT $2
)) RETURNING 1) SELECT count(*) FROM removed
"""
"""Removes old rows. FOR UPDATE isn't needed, because the second of two removals waits, and would need another privilege."""

_from_unix = datetime.fromtimestamp


class PostgresLedger(PostgresStore, Ledger):
    """Ledger in PostgreSQL. See `headway.ports.Ledger`."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        rows = [_row(record) for record in records]
        try:
            async with self.writing() as session:
                await session.copy("headway_requests", list(_TYPES), rows)
                return
        except RowRefused as exc:
            if not isinstance(exc.__cause__, asyncpg.UniqueViolationError):
                raise
        async with self.writing() as session:
            await session.execute(_INSERT, *zip(*rows, strict=True))

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        async with self.writing() as session:
            if ended:
                await session.execute(_FORGET, [UUID(id) for _, id in ended], [tenant for tenant, _ in ended])
            if records:
                await session.execute(_NOTE, *zip(*map(_open_row, records), strict=True))

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        try:
            key = uuid.UUID(id)
        except ValueError:
            return ()
        async with self.reading() as session:
            ended = [_record(row) for row in await session.fetch(_FIND, key)]
            waiting = [_open_record(row) for row in await session.fetch(_FIND_OPEN, key)]
        return together(ended, waiting)

    async def prune(self, before: float, limit: int) -> int:
        async with self.reading() as session:
            await session.execute(_PRUNE_OPEN, _from_unix(before, UTC))
            removed = await session.fetchval(_PRUNE, _from_unix(before, UTC), limit)
        return int(removed)


def _row(record: LedgerRecord) -> tuple[Any, ...]:
    row = astuple(record)
    return (UUID(row[0]), *row[1:6], _from_unix(row[6], UTC), _from_unix(row[7], UTC), *row[8:])


def _open_row(record: LedgerRecord) -> tuple[Any, ...]:
    id, *texts, created_at, due_at = open_row(record)
    return UUID(id), *texts, _from_unix(created_at, UTC), _from_unix(due_at, UTC)


def _open_record(row: Sequence[Any]) -> LedgerRecord:
    return open_record([str(row[0]), *tuple(row)[1:7], row[7].timestamp(), row[8].timestamp()])


def _record(row: Sequence[Any]) -> LedgerRecord:
    values = [str(row[0]), *row[1:6], row[6].timestamp(), row[7].timestamp(), *row[8:]]
    return LedgerRecord(**dict(zip(LedgerRecord.__struct_fields__, values, strict=True)))
