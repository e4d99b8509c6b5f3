"""API keys in an SQLite file.

Changes are read as one JSON text in a single row. Python lets other threads run after every row, so with a row per key the
event loop and the reader would wait for each other hundreds of times.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headway.core.key_rotation import check_new
from headway.errors import StoreCorrupted
from headway.model import ApiKey
from headway.ports import KeyChanges, KeyMark, KeyStore
from headway.storage.key_rows import (
    CHANGES,
    COLUMNS,
    IN_ORDER,
    LATEST,
    MARKS,
    NEXT,
    NUMBERS,
    SELECT,
    changes_of,
    keys_of,
    new_mark,
    row_of,
)
from headway.storage.sqlite.connection_thread import MEND
from headway.storage.sqlite.database import SqliteStore

_ALIKE = f"{SELECT} WHERE id = ? OR (replaces = ? AND replaces <> '')"
_ADD = f"INSERT INTO headway_keys ({COLUMNS}, revision, changed_at) VALUES ({', '.join('?' * 14)})"  # noqa: S608
_THERE = "SELECT 1 FROM headway_keys WHERE id = ?"
_EXPIRE = """
UPDATE headway_keys SET expires_at = min(coalesce(expires_at, ?1), ?1), revision = ?2, changed_at = ?3 WHERE id = ?4
"""
_EXACT = "CASE WHEN {0} IS NOT NULL THEN printf('%!.17g', {0}) END"
"""SQL for all digits of a number. SQLite's JSON has only fifteen."""
_VALUES = ", ".join(
    "hex(digest)" if name == "digest" else _EXACT.format(name) if name in NUMBERS else name
    for name in (*COLUMNS.split(", "), "revision", "mark")
)
_AFTER = f"""
SELECT json_group_array(json_array({_VALUES}))
FROM ({CHANGES} WHERE revision > ? ORDER BY revision LIMIT ?)
"""  # noqa: S608
_Row = tuple[str, str, str, str, str, str, float | None, float | None, float, float | None, str, str, int, str]
_KNOWN = "SELECT 1 FROM headway_key_changes WHERE revision = ? AND mark = ?"
_REMOVE = """
DELETE FROM headway_keys WHERE id IN (
    SELECT id FROM headway_keys WHERE expires_at < ?1 AND coalesce(changed_at, created_at) < ?1 LIMIT ?2
)
"""


class SqliteKeys(SqliteStore, KeyStore):
    """Key store in an SQLite file. See `headway.ports.KeyStore`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, checked=("headway_keys",))

    async def add(self, key: ApiKey) -> None:
        def work(connection: sqlite3.Connection) -> None:
            check_new(key, _keys_of(connection.execute(_ALIKE, (key.id, key.replaces))))
            connection.execute(_ADD, (*row_of(key), _next(connection), time.time()))

        await self._change(work)

    async def get(self, id: str) -> ApiKey | None:
        rows = await self._keys(f"{SELECT} WHERE id = ?", id)
        return rows[0] if rows else None

    async def expire(self, id: str, at: float) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            if not connection.execute(_THERE, (id,)).fetchone():
                return False
            connection.execute(_EXPIRE, (at, _next(connection), time.time(), id))
            return True

        return await self._change(work)

    async def keys(self) -> Sequence[ApiKey]:
        return await self._keys(IN_ORDER)

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        def work(connection: sqlite3.Connection) -> KeyChanges | None:
            if since.mark and not connection.execute(_KNOWN, (since.revision, since.mark)).fetchone():
                return None
            [text] = connection.execute(_AFTER, (since.revision, limit)).fetchone()
            try:
                exact = msgspec.json.decode(text, type=list[_Row], strict=False)
                rows = [(row[0], bytes.fromhex(row[1]), *row[2:]) for row in exact]
            except (msgspec.MsgspecError, ValueError) as exc:
                raise StoreCorrupted(f"the ledger's file is corrupted: the rows of keys make no sense. {MEND}") from exc
            return changes_of(_keys_of(rows), rows, since, limit)

        return await self._query(work)

    async def latest(self) -> KeyMark:
        revision, mark = await self._query(lambda connection: connection.execute(LATEST).fetchone())
        return KeyMark(revision, mark)

    async def remove_ended(self, before: float, limit: int) -> int:
        return await self._change(lambda connection: connection.execute(_REMOVE, (before, limit)).rowcount)

    async def _keys(self, query: str, *values: object) -> list[ApiKey]:
        return await self._query(lambda connection: _keys_of(connection.execute(query, values)))


def _next(connection: sqlite3.Connection) -> int:
    [revision] = connection.execute(NEXT).fetchone()
    connection.execute("INSERT INTO headway_key_changes VALUES (?, ?)", (revision, new_mark()))
    connection.execute("DELETE FROM headway_key_changes WHERE revision <= ?", (revision - MARKS,))
    return int(revision)


def _keys_of(rows: Iterable[Any]) -> list[ApiKey]:
    """Return the keys of rows. Raises StoreCorrupted if a row isn't a key, because the schema only admits keys."""
    try:
        return keys_of(rows)
    except ValueError as exc:
        raise StoreCorrupted(f"the ledger's file is corrupted: {exc}. {MEND}") from None
