"""The ledger in an SQLite file.

Rows go in fifty to a statement. Python lets other threads run around every statement, and takes its lock back afterwards:
with a statement for each row, a busy event loop would be interrupted for each, and the writer kept waiting as often.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence

from msgspec.structs import astuple

from headway.ledgers.sqlite_file import SqliteFile
from headway.model import Record

ROWS = 50
"""In one statement; what SQLite has always taken are 999 values in one."""

_COLUMNS = (
    "id, user_id, tenant, tier, model, status, created_at, completed_at, latency_ms, batch_size, worker, error, input, "
    "output"
)
_WIDTH = 14


def _insert(rows: int) -> str:
    row = f"({', '.join('?' * _WIDTH)})"
    return f"INSERT OR IGNORE INTO headway_requests ({_COLUMNS}) VALUES {', '.join([row] * rows)}"  # noqa: S608


_INSERT = _insert(ROWS)
_FIND = f"SELECT {_COLUMNS} FROM headway_requests WHERE id = ? ORDER BY completed_at DESC"  # noqa: S608
_PRUNE = """
DELETE FROM headway_requests WHERE (id, tenant) IN (
    SELECT id, tenant FROM headway_requests WHERE completed_at < ? ORDER BY completed_at LIMIT ?
)
"""


class SqliteLedger:
    """See `headway.ports.Ledger`.

    Arguments:
        url: of the file.
    """

    def __init__(self, url: str) -> None:
        self._file = SqliteFile(url)

    async def open(self) -> None:
        """See Ledger."""
        await self._file.open()

    async def write(self, records: Sequence[Record]) -> None:
        """See Ledger."""

        def work(connection: sqlite3.Connection) -> None:
            for start in range(0, len(records), ROWS):
                _write(connection, records[start : start + ROWS])

        await self._file.write(work)

    async def find(self, id: str) -> Sequence[Record]:
        """See Ledger."""
        try:
            key = uuid.UUID(id).bytes
        except ValueError:
            return ()
        rows = await self._file.read(lambda connection: connection.execute(_FIND, (key,)).fetchall())
        return [_record(row) for row in rows]

    async def prune(self, before: float, limit: int) -> int:
        """See Ledger."""
        return await self._file.write(lambda connection: connection.execute(_PRUNE, (before, limit)).rowcount)

    async def close(self) -> None:
        """See Ledger."""
        await self._file.close()


def _write(connection: sqlite3.Connection, records: Sequence[Record]) -> None:
    values: list[object] = []
    for record in records:
        values += astuple(record)
    for at in range(0, len(values), _WIDTH):
        id: str = values[at]  # type: ignore[assignment]
        values[at] = bytes.fromhex(id.replace("-", ""))
    connection.execute(_INSERT if len(records) == ROWS else _insert(len(records)), values)


def _record(row: tuple[object, ...]) -> Record:
    return Record(**dict(zip(Record.__struct_fields__, (str(uuid.UUID(bytes=row[0])), *row[1:]), strict=True)))  # type: ignore[arg-type]
