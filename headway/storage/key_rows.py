"""API keys as rows of the table `headway_keys`, for SQLite and PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headway.model import ApiKey, ModelLimit
from headway.ports import KeyChanges, KeyMark

COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces, model_limits"
"""Columns of a key, in the order of `row_of` and `keys_of`."""
NUMBERS = frozenset(("rate", "burst", "created_at", "expires_at"))
"""Columns with fractions."""
NEXT = """
SELECT 1 + max(revision) FROM (
    SELECT coalesce(max(revision), 0) AS revision FROM headway_keys
    UNION ALL SELECT coalesce(max(revision), 0) FROM headway_key_changes
) AS both_tables
"""
"""Query for the next revision. It reads both tables, because rows are removed from either."""
LATEST = """
SELECT revision, mark FROM (
    SELECT revision, mark FROM (SELECT revision, mark FROM headway_key_changes ORDER BY revision DESC LIMIT 1) AS marked
    UNION ALL SELECT coalesce(max(revision), 0), '' FROM headway_keys
) AS both_tables ORDER BY revision DESC, mark DESC LIMIT 1
"""
"""Query for the last change and its mark. Earlier versions of Headway wrote no marks."""
MARKS = 10_000
"""Number of changes that keep their mark. A reader further behind must read all keys again."""
SELECT = f"SELECT {COLUMNS} FROM headway_keys"  # noqa: S608
_Row = tuple[str, bytes, str, str, str, str, float | None, float | None, float, float | None, str, str]
_WIDTH = 12
_models = msgspec.json.Decoder(tuple[str, ...]).decode
_model_limits = msgspec.json.Decoder(list[tuple[str, float, float | None]]).decode
IN_ORDER = f"{SELECT} ORDER BY created_at, id"
CHANGES = f"""
SELECT {COLUMNS}, revision, coalesce(mark, '') AS mark
FROM headway_keys LEFT JOIN headway_key_changes USING (revision)
"""  # noqa: S608
"""Query for keys with their revision, and with its mark if that is still kept."""


def new_mark() -> str:
    """Return a random text that distinguishes a change from any other with the same revision."""
    return secrets.token_hex(8)


def changes_of(keys: Sequence[ApiKey], rows: Sequence[Sequence[Any]], since: KeyMark, limit: int) -> KeyChanges:
    """Make the result of `KeyStore.changes` from the first `limit` rows of CHANGES after `since`."""
    upto = KeyMark(rows[-1][_WIDTH], rows[-1][_WIDTH + 1]) if rows else since
    return KeyChanges(keys, upto, len(rows) == limit)


def row_of(key: ApiKey) -> tuple[object, ...]:
    """Return the values of a key's columns."""
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces, msgspec.json.encode([msgspec.structs.astuple(model_limit) for model_limit in key.model_limits]).decode(),
    )  # fmt: skip


def keys_of(rows: Iterable[Sequence[Any]]) -> list[ApiKey]:
    """Return the keys of rows. Raises ValueError for a row that isn't a key. The error doesn't quote the row."""
    try:
        sound = msgspec.convert([tuple(row)[:_WIDTH] for row in rows], list[_Row], builtin_types=(bytes,))
        return [_key(row) for row in sound]
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("the row of a key makes no sense") from None


def _key(row: _Row) -> ApiKey:
    id, digest, user, tenant, tier, models, rate, burst, created_at, expires_at, replaces, model_limits = row
    return ApiKey(
        id=id,
        digest=digest,
        user=user,
        tenant=tenant,
        tier=tier,
        models=() if models == "[]" else _models(models),
        rate=rate,
        burst=burst,
        created_at=created_at,
        expires_at=expires_at,
        replaces=replaces,
        model_limits=() if model_limits == "[]" else tuple(ModelLimit(*limit) for limit in _model_limits(model_limits)),
    )
