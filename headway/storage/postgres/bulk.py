"""Bulk jobs in PostgreSQL; a file of its own, as SQLite needs no asyncpg. A lock serialises writers, for exact quotas and claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.storage.bulk_rows import BulkRows
from headway.storage.postgres.database import PostgresStore

LOCK = 0x4865616477617933
"""Number of the advisory lock for changes of jobs and files."""


class PostgresBulkStore(PostgresStore, BulkRows):
    """Store of bulk jobs in PostgreSQL. See `headway.ports.BulkStore`."""

    now = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        async with self._database.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            return await session.fetch(sql, *map(_stored, values))

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        async with self._database.reading() as session:
            return await session.fetch(sql, *map(_stored, values))


def _stored(value: object) -> object:
    """Replace NUL, which PostgreSQL cannot store. A client may look up an id with one, which then is not found."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
