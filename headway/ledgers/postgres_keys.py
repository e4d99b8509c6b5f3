"""API keys in PostgreSQL.

Revisions are given out under a lock, which is held until they can be seen: who has read up to one has read all before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
import msgspec

from headway.ledgers.postgres_link import PostgresLink
from headway.model import Key

LOCK = 0x4865616477617932
"""Number of the advisory lock under which keys are changed."""

_COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces"
_NEXT = "(SELECT coalesce(max(revision), 0) + 1 FROM headway_keys)"
_ADD = f"""
INSERT INTO headway_keys ({_COLUMNS}, revision) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {_NEXT})
"""  # noqa: S608
_EXPIRE = f"""
UPDATE headway_keys SET expires_at = least(expires_at, $1), revision = {_NEXT} WHERE id = $2
"""  # noqa: S608
_SELECT = f"SELECT {_COLUMNS} FROM headway_keys"  # noqa: S608
_CHANGES = f"SELECT {_COLUMNS}, revision FROM headway_keys WHERE revision > $1 ORDER BY revision"  # noqa: S608


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
            if await connection.fetchval("SELECT 1 FROM headway_keys WHERE id = $1", key.id):
                raise ValueError(f"there is a key with the id {key.id!r} already")
            await connection.execute(_ADD, *_row(key))

    async def get(self, id: str) -> Key | None:
        """See KeyStore."""
        async with self._link.asking() as connection:
            row = await connection.fetchrow(f"{_SELECT} WHERE id = $1", id)
        return None if row is None else _key(row)

    async def expire(self, id: str, at: float) -> bool:
        """See KeyStore."""
        async with self._link.writing() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            done: str = await connection.execute(_EXPIRE, at, id)
        return done != "UPDATE 0"

    async def keys(self) -> Sequence[Key]:
        """See KeyStore."""
        async with self._link.asking() as connection:
            return [_key(row) for row in await connection.fetch(f"{_SELECT} ORDER BY created_at, id")]

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        """See KeyStore."""
        async with self._link.asking() as connection:
            if rows := await connection.fetch(_CHANGES, since):
                return rows[-1]["revision"], [_key(row) for row in rows]
            now = await connection.fetchval("SELECT coalesce(max(revision), 0) FROM headway_keys")
        return min(now, since), ()  # What was added between the two questions comes with the next.

    async def close(self) -> None:
        """See KeyStore."""
        await self._link.close()


def _row(key: Key) -> tuple[object, ...]:
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces,
    )  # fmt: skip


def _key(row: asyncpg.Record) -> Key:
    return Key(
        id=row["id"],
        digest=row["digest"],
        user=row["user_id"],
        tenant=row["tenant"],
        tier=row["tier"],
        models=msgspec.json.decode(row["models"], type=tuple[str, ...]),
        rate=row["rate"],
        burst=row["burst"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        replaces=row["replaces"],
    )
