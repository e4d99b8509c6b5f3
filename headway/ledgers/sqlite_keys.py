"""API keys in an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from headway.core.rotation import check_new
from headway.errors import StoreCorrupted
from headway.ledgers.key_rows import COLUMNS, IN_ORDER, LATEST, NEXT, SELECT, key_of, row_of
from headway.ledgers.sqlite_file import SqliteFile
from headway.ledgers.sqlite_hand import MEND
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
        self._file = SqliteFile(url, checked=("headway_keys",))

    async def open(self) -> None:
        """See KeyStore."""
        await self._file.open()

    async def add(self, key: Key) -> None:
        """See KeyStore."""

        def work(connection: sqlite3.Connection) -> None:
            check_new(key, _sound(connection.execute(_ALIKE, (key.id, key.replaces))))
            connection.execute(_ADD, row_of(key))

        await self._file.write(work)

    async def get(self, id: str) -> Key | None:
        """See KeyStore."""
        rows = await self._keys(f"{SELECT} WHERE id = ?", id)
        return rows[0] if rows else None

    async def expire(self, id: str, at: float) -> bool:
        """See KeyStore."""
        return await self._file.write(lambda connection: connection.execute(_EXPIRE, (at, id)).rowcount) > 0

    async def keys(self) -> Sequence[Key]:
        """See KeyStore."""
        return await self._keys(IN_ORDER)

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        """See KeyStore."""
        query = f"SELECT {COLUMNS}, revision FROM headway_keys WHERE revision > ? ORDER BY revision"  # noqa: S608

        def work(connection: sqlite3.Connection) -> tuple[int, list[Key]]:
            rows = connection.execute(query, (since,)).fetchall()
            [now] = connection.execute(LATEST).fetchone()
            return now, _sound(rows)

        return await self._file.read(work)

    async def close(self) -> None:
        """See KeyStore."""
        await self._file.close()

    async def _keys(self, query: str, *values: object) -> list[Key]:
        return await self._file.read(lambda connection: _sound(connection.execute(query, values)))


def _sound(rows: Iterable[Any]) -> list[Key]:
    """The keys of rows, which SQLite keeps from being anything but keys.

    Raises:
        StoreCorrupted: one is none, so that the file must be damaged.
    """
    try:
        return [key_of(row) for row in rows]
    except ValueError as exc:
        raise StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}") from None
