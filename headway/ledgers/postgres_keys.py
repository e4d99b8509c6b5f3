"""API keys in PostgreSQL.

Revisions are given out under a lock, which is held until they can be seen: who has read up to one has read all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from headway.core.rotation import check_new
from headway.ledgers.key_rows import COLUMNS, IN_ORDER, LATEST, NEXT, SELECT, key_of, row_of
from headway.ledgers.postgres_link import PostgresLink
from headway.model import Key

log = structlog.get_logger(__name__)

LOCK = 0x4865616477617932
"""Number of the advisory lock under which keys are changed."""

_ALIKE = f"{SELECT} WHERE id = $1 OR (replaces = $2 AND replaces <> '')"
_ADD = f"""
INSERT INTO headway_keys ({COLUMNS}, revision) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {NEXT})
"""  # noqa: S608
_EXPIRE = f"""
UPDATE headway_keys SET expires_at = least(expires_at, $1), revision = {NEXT} WHERE id = $2
"""  # noqa: S608
_CHANGES = f"SELECT {COLUMNS}, revision FROM headway_keys WHERE revision > $1 ORDER BY revision"  # noqa: S608


class PostgresKeys:
    """See `headway.ports.KeyStore`.

    Arguments:
        url: of the database.
    """

    def __init__(self, url: str) -> None:
        self._link = PostgresLink(url)

    async def open(self) -> None:
        """See KeyStore."""
        await self._link.open()

    async def add(self, key: Key) -> None:
        """See KeyStore."""
        async with self._link.writing() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            check_new(key, _sound(await connection.fetch(_ALIKE, key.id, key.replaces)))
            await connection.execute(_ADD, *row_of(key))

    async def get(self, id: str) -> Key | None:
        """See KeyStore."""
        async with self._link.asking() as connection:
            row = await connection.fetchrow(f"{SELECT} WHERE id = $1", id)
        found = [] if row is None else _sound([row])
        return found[0] if found else None

    async def expire(self, id: str, at: float) -> bool:
        """See KeyStore."""
        async with self._link.writing() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            done: str = await connection.execute(_EXPIRE, at, id)
        return done != "UPDATE 0"

    async def keys(self) -> Sequence[Key]:
        """See KeyStore."""
        async with self._link.asking() as connection:
            return _sound(await connection.fetch(IN_ORDER))

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        """See KeyStore."""
        async with self._link.asking() as connection:
            if rows := await connection.fetch(_CHANGES, since):
                return rows[-1]["revision"], _sound(rows)
            now = await connection.fetchval(LATEST)
        return min(now, since), ()  # What was added between the two questions comes with the next.

    async def close(self) -> None:
        """See KeyStore."""
        await self._link.close()


def _sound(rows: Iterable[Any]) -> list[Key]:
    """The keys of rows. One that makes no sense was written by hand: it is no key, and the others are."""
    keys = []
    for row in rows:
        try:
            keys.append(key_of(row))
        except ValueError as exc:
            log.error("a key is refused", key=row["id"], error=str(exc))
    return keys
