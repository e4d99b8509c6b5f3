"""Bulk jobs in an SQLite file; a file of its own beside PostgreSQL's, which needs asyncpg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.storage.bulk_rows import BulkRows
from headway.storage.sqlite.database import SqliteStore


class SqliteBulkStore(SqliteStore, BulkRows):
    """Store of bulk jobs in an SQLite file. See `headway.ports.BulkStore`."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._file.write(lambda connection: connection.execute(sql, _numbered(values)).fetchall())

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._file.read(lambda connection: connection.execute(sql, _numbered(values)).fetchall())


def _numbered(values: Sequence[object]) -> dict[str, object]:
    """Name values `$1`, `$2` and so on, which are names like any other to SQLite."""
    return {str(number): value for number, value in enumerate(values, 1)}
