"""API keys in an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from headway.core.rotation import check_new
from headway.ledgers.key_rows import COLUMNS, IN_ORDER, LATEST, NEXT, SELECT, key_of, row_of
from headway.ledgers.sqlite_file import SqliteFile
from headway.model import Key

_ALIKE = f"{SELECT} WHERE id = ? OR (replaces = ? AND replaces <> '')"
_ADD = f"INSERT INTO headway_keys ({COLUMNS}, revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {NEXT})"  # noqa: S608
_EXPIRE = f"""
UPDATE headway_keys SET expires_at = min(coalesce(expires_at, ?1), ?1), revision = {NEXT} WHERE id = ?2
"""  # noqa: S608


class SqliteKeys:
    """See `headway.ports.KeyStore`.

    Arguments:
        url: of the file.
    """

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)

    async def open(self) -> None:
        """See KeyStore."""
        await self._file.open()

    async def add(self, key: Key) -> None:
        """See KeyStore."""

        def work(connection: sqlite3.Connection) -> None:
            check_new(key, map(key_of, connection.execute(_ALIKE, (key.id, key.replaces))))
            connection.execute(_ADD, row_of(key))

        await self._file.write(work)

    async def get(self, id: str) -> Key | None:
        """See KeyStore."""
        rows = await self._rows(f"{SELECT} WHERE id = ?", id)
        return key_of(rows[0]) if rows else None

    async def expire(self, id: str, at: float) -> bool:
        """See KeyStore."""
        return await self._file.write(lambda connection: connection.execute(_EXPIRE, (at, id)).rowcount) > 0

    async def keys(self) -> Sequence[Key]:
        """See KeyStore."""
        return [key_of(row) for row in await self._rows(IN_ORDER)]

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        """See KeyStore."""
        query = f"SELECT {COLUMNS}, revision FROM headway_keys WHERE revision > ? ORDER BY revision"  # noqa: S608
        rows = await self._rows(query, since)
        if rows:
            return rows[-1][-1], [key_of(row) for row in rows]
        [[now]] = await self._rows(LATEST)
        return min(now, since), ()  # What was added between the two questions comes with the next.

    async def close(self) -> None:
        """See KeyStore."""
        await self._file.close()

    async def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return await self._file.read(lambda connection: connection.execute(query, values).fetchall())
