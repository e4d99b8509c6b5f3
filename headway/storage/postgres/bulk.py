"""Bulk jobs in PostgreSQL. A lock serialises writers, because quotas and claims must be exact."""

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
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            return await session.fetch(sql, *map(_stored, values))

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        async with self.reading() as session:
            return await session.fetch(sql, *map(_stored, values))


def _stored(value: object) -> object:
    """Replace NUL, which PostgreSQL can't store. An id with a NUL that a client looks up isn't found then."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
