"""API keys in PostgreSQL.

A writer holds a lock from taking a revision until its transaction is visible, so a reader never misses a lower revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.key_rotation import check_new
from headway.model import ApiKey
from headway.ports import KeyChanges, KeyMark, KeyStore
from headway.runtime.logger import get_logger
from headway.storage.key_rows import (
    CHANGES,
    COLUMNS,
    IN_ORDER,
    LATEST,
    MARKS,
    NEXT,
    SELECT,
    changes_of,
    keys_of,
    new_mark,
    row_of,
)
from headway.storage.postgres.database import PostgresStore, Session

log = get_logger(__name__)

LOCK = 0x4865616477617932
"""Number of the advisory lock for changes of keys."""

_ALIKE = f"{SELECT} WHERE id = $1 OR (replaces = $2 AND replaces <> '')"
_ADD = f"""
INSERT INTO headway_keys ({COLUMNS}, revision, changed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, extract(epoch FROM now()))
"""  # noqa: S608
_THERE = "SELECT EXISTS (SELECT FROM headway_keys WHERE id = $1)"
_EXPIRE = """
UPDATE headway_keys SET expires_at = least(expires_at, $1), revision = $2, changed_at = extract(epoch FROM now()) WHERE id = $3
"""
_AFTER = f"{CHANGES} WHERE revision > $1 ORDER BY revision LIMIT $2"
_KNOWN = "SELECT EXISTS (SELECT FROM headway_key_changes WHERE revision = $1 AND mark = $2)"
_REMOVE = """
DELETE FROM headway_keys WHERE id IN (
    SELECT id FROM headway_keys WHERE expires_at < $1 AND coalesce(changed_at, created_at) < $1 LIMIT $2
)
"""


class PostgresKeys(PostgresStore, KeyStore):
    """Key store in PostgreSQL. See `headway.ports.KeyStore`."""

    async def add(self, key: ApiKey) -> None:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            check_new(key, _keys_of(await session.fetch(_ALIKE, key.id, key.replaces)))
            await session.execute(_ADD, *row_of(key), await _next(session))

    async def get(self, id: str) -> ApiKey | None:
        async with self.reading() as session:
            row = await session.fetchrow(f"{SELECT} WHERE id = $1", id)
        keys = [] if row is None else _keys_of([row])
        return keys[0] if keys else None

    async def expire(self, id: str, at: float) -> bool:
        async with self.writing() as session:
            await session.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            if not await session.fetchval(_THERE, id):
                return False
            await session.execute(_EXPIRE, at, await _next(session), id)
        return True

    async def keys(self) -> Sequence[ApiKey]:
        async with self.reading() as session:
            return _keys_of(await session.fetch(IN_ORDER))

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        async with self.reading() as session:
            if since.mark and not await session.fetchval(_KNOWN, since.revision, since.mark):
                return None
            rows = await session.fetch(_AFTER, since.revision, limit)
        return changes_of(_keys_of(rows), rows, since, limit)

    async def latest(self) -> KeyMark:
        async with self.reading() as session:
            revision, mark = await session.fetchrow(LATEST)
        return KeyMark(revision, mark)

    async def remove_ended(self, before: float, limit: int) -> int:
        async with self.writing() as session:
            tag: str = await session.execute(_REMOVE, before, limit)
        return int(tag.rpartition(" ")[2])


async def _next(session: Session) -> int:
    revision: int = await session.fetchval(NEXT)
    await session.execute("INSERT INTO headway_key_changes VALUES ($1, $2)", revision, new_mark())
    await session.execute("DELETE FROM headway_key_changes WHERE revision <= $1", revision - MARKS)
    return revision


def _keys_of(rows: Sequence[Any]) -> list[ApiKey]:
    """Return the keys of rows. Skips rows that aren't keys, because somebody may have written them by hand."""
    try:
        return keys_of(rows)
    except ValueError as exc:
        if len(rows) > 1:
            return [key for row in rows for key in _keys_of([row])]
        log.error("a key is refused", key=rows[0]["id"], error=str(exc))
        return []
