"""The ledger in an SQLite file.

A statement writes fifty rows. Python lets other threads run after every statement, so with a statement per row a busy event
loop and the writer would wait for each other once per row.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple

from headway.model import LedgerRecord
from headway.ports import Ledger
from headway.storage.bulk_rows import BulkRows
from headway.storage.open_rows import COLUMNS, open_record, open_row, together
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


ROWS = 50
"""Rows in a statement. Any SQLite takes 999 values."""

_NAMES = (
    "id", "user_id", "tenant", "tier", "model", "status", "created_at", "completed_at", "latency_ms", "batch_size",
    "worker", "version", "error", "requests", "batch_id", "part_of", "tokens", "input", "output",
)  # fmt: skip
_COLUMNS = ", ".join(_NAMES)
_ALL = len(_NAMES)
_WITHOUT_CONTENT = _ALL - 2
"""Number of columns to write if neither input nor output is kept. Every value costs time."""


def _insert(rows: int, width: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT OR IGNORE INTO headway_requests ({', '.join(_NAMES[:width])}) VALUES {', '.join([row] * rows)}"  # noqa: S608


_FULL = {width: _insert(ROWS, width) for width in (_WITHOUT_CONTENT, _ALL)}
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = ? ORDER BY completed_at DESC"  # noqa: S608
_NOTE = f"INSERT OR REPLACE INTO headway_open_requests VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
_FORGET = "DELETE FROM headway_open_requests WHERE id = ? AND tenant = ?"
_FIND_OPEN = "SELECT * FROM headway_open_requests WHERE id = ?"
_PRUNE_OPEN = "DELETE FROM headway_open_requests WHERE due_at < ?"
_PRUNE = """
DELETE FROM headway_requests WHERE (id, tenant, completed_at) IN (
    SELECT id, tenant, completed_at FROM headway_requests WHERE completed_at < ? ORDER BY completed_at LIMIT ?
)
"""


class SqliteLedger(SqliteStore, Ledger):
    """Ledger in an SQLite file. See `headway.ports.Ledger`."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            content = any(record.input is not None or record.output is not None for record in records)
            for start in range(0, len(records), ROWS):
                _write(connection, records[start : start + ROWS], _ALL if content else _WITHOUT_CONTENT)

        await self._change(work)

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_FORGET, [(_key(id), tenant) for tenant, id in ended])
            connection.executemany(_NOTE, [(_key(record.id), *open_row(record)[1:]) for record in records])

        await self._change(work)

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        try:
            key = uuid.UUID(id).bytes
        except ValueError:
            return ()
        ended, waiting = await self._query(
            lambda connection: [connection.execute(sql, (key,)).fetchall() for sql in (_FIND, _FIND_OPEN)]
        )
        still_open = [open_record((str(uuid.UUID(bytes=row[0])), *row[1:])) for row in waiting]
        return together([_record(row) for row in ended], still_open)

    async def prune(self, before: float, limit: int) -> int:
        def work(connection: sqlite3.Connection) -> int:
            connection.execute(_PRUNE_OPEN, (before,))
            return connection.execute(_PRUNE, (before, limit)).rowcount

        return await self._change(work)


def _write(connection: sqlite3.Connection, records: Sequence[LedgerRecord], width: int) -> None:
    values: list[object] = []
    for record in records:
        values.append(_key(record.id))
        values += astuple(record)[1:width]
    connection.execute(_FULL[width] if len(records) == ROWS else _insert(len(records), width), values)


def _key(id: str) -> bytes:
    return bytes.fromhex(id.replace("-", ""))


def _record(row: tuple[Any, ...]) -> LedgerRecord:
    values = str(uuid.UUID(bytes=row[0])), *row[1:]
    return LedgerRecord(**dict(zip(LedgerRecord.__struct_fields__, values, strict=True)))
