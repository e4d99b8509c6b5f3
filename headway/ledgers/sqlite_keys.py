"""API keys in an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.ledgers.sqlite_file import SqliteFile
from headway.model import Key

_COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces"
_NEXT = "(SELECT coalesce(max(revision), 0) + 1 FROM headway_keys)"
_ADD = f"INSERT INTO headway_keys ({_COLUMNS}, revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {_NEXT})"  # noqa: S608
_EXPIRE = f"""
UPDATE headway_keys SET expires_at = min(coalesce(expires_at, ?1), ?1), revision = {_NEXT} WHERE id = ?2
"""  # noqa: S608
_SELECT = f"SELECT {_COLUMNS} FROM headway_keys"  # noqa: S608


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
            try:
                connection.execute(_ADD, _row(key))
            except sqlite3.IntegrityError:
                raise ValueError(f"there is a key with the id {key.id!r} already") from None

        await self._file.write(work)

    async def get(self, id: str) -> Key | None:
        """See KeyStore."""
        rows = await self._rows(f"{_SELECT} WHERE id = ?", id)
        return _key(rows[0]) if rows else None

    async def expire(self, id: str, at: float) -> bool:
        """See KeyStore."""
        return await self._file.write(lambda connection: connection.execute(_EXPIRE, (at, id)).rowcount) > 0

    async def keys(self) -> Sequence[Key]:
        """See KeyStore."""
        return [_key(row) for row in await self._rows(f"{_SELECT} ORDER BY created_at, id")]

    async def changes(self, since: int) -> tuple[int, Sequence[Key]]:
        """See KeyStore."""
        query = f"SELECT {_COLUMNS}, revision FROM headway_keys WHERE revision > ? ORDER BY revision"  # noqa: S608
        rows = await self._rows(query, since)
        if rows:
            return rows[-1][-1], [_key(row) for row in rows]
        [[now]] = await self._rows("SELECT coalesce(max(revision), 0) FROM headway_keys")
        return min(now, since), ()  # What was added between the two questions comes with the next.

    async def close(self) -> None:
        """See KeyStore."""
        await self._file.close()

    async def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return await self._file.read(lambda connection: connection.execute(query, values).fetchall())


def _row(key: Key) -> tuple[object, ...]:
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces,
    )  # fmt: skip


def _key(row: tuple[Any, ...]) -> Key:
    id, digest, user, tenant, tier, models, rate, burst, created_at, expires_at, replaces, *_ = row
    return Key(
        id=id,
        digest=digest,
        user=user,
        tenant=tenant,
        tier=tier,
        models=msgspec.json.decode(models, type=tuple[str, ...]),
        rate=rate,
        burst=burst,
        created_at=created_at,
        expires_at=expires_at,
        replaces=replaces,
    )
