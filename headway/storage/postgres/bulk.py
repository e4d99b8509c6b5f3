"""Bulk jobs in PostgreSQL. Writers take turns under a lock, so that quotas are kept and a job is claimed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.storage.bulk_rows import BulkRows
from headway.storage.postgres.connection_pair import ConnectionPair

LOCK = 0x4865616477617933
"""Number of the advisory lock under which jobs and files are changed."""


class PostgresBulkStore(BulkRows):
    """Store of bulk jobs in PostgreSQL. See `headway.ports.BulkStore`.

    Arguments:
        url: URL of the database.
    """

    now = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"

    def __init__(self, url: str) -> None:
        self._pair = ConnectionPair(url)

    async def open(self) -> None:
        await self._pair.open()

    async def close(self) -> None:
        await self._pair.close()

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        async with self._pair.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            return await session.fetch(sql, *map(_stored, values))

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        async with self._pair.asking() as session:
            return await session.fetch(sql, *map(_stored, values))


def _stored(value: object) -> object:
    """Value as PostgreSQL takes it, which has no texts with a NUL. A client may ask for such an id; none is one."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
