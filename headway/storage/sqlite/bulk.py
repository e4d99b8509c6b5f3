"""Bulk jobs in an SQLite file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.storage.bulk_rows import BulkRows
from headway.storage.sqlite.database import SqliteStore


class SqliteBulkStore(SqliteStore, BulkRows):
    """Store of bulk jobs in an SQLite file. See `headway.ports.BulkStore`."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._change(lambda connection: connection.execute(sql, _numbered(values)).fetchall())

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        return await self._query(lambda connection: connection.execute(sql, _numbered(values)).fetchall())


def _numbered(values: Sequence[object]) -> dict[str, object]:
    """Number values from 1, because SQLite takes `$1` for a name."""
    return {str(number): value for number, value in enumerate(values, 1)}
