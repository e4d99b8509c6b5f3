"""Rows of the table `headway_keys`: an API key in any of the databases."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headway.model import ApiKey, ModelLimit
from headway.ports import KeyChanges, KeyMark

COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces, model_limits"
"""Columns that make up a key, in the order of `row_of` and `keys_of`."""
NUMBERS = frozenset(("rate", "burst", "created_at", "expires_at"))
"""Columns of numbers with fractions."""
NEXT = """
SELECT 1 + max(revision) FROM (
    SELECT coalesce(max(revision), 0) AS revision FROM headway_keys
    UNION ALL SELECT coalesce(max(revision), 0) FROM headway_key_changes
) AS both_tables
"""
"""Query of the revision for a row that is added or changed now. Both tables are asked, as rows leave both."""
LATEST = """
SELECT revision, mark FROM (
    SELECT revision, mark FROM (SELECT revision, mark FROM headway_key_changes ORDER BY revision DESC LIMIT 1) AS marked
    UNION ALL SELECT coalesce(max(revision), 0), '' FROM headway_keys
) AS both_tables ORDER BY revision DESC, mark DESC LIMIT 1
"""
"""Query of the last change and its mark. A process of an earlier version gives a change no mark."""
MARKS = 10_000
"""Changes whose marks are kept. A reader that is further behind reads all keys again."""
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
"""Query of keys: their columns, the revision, and the mark of the change that gave it, if that is kept."""


def new_mark() -> str:
    """Make a mark that no other change has."""
    return secrets.token_hex(8)


def changes_of(keys: Sequence[ApiKey], rows: Sequence[Sequence[Any]], since: KeyMark, limit: int) -> KeyChanges:
    """Result of `KeyStore.changes`.

    Arguments:
        keys: keys of the rows.
        rows: rows of CHANGES, those after `since` in order.
        since: change after which was asked.
        limit: most rows that were asked for.
    """
    upto = KeyMark(rows[-1][_WIDTH], rows[-1][_WIDTH + 1]) if rows else since
    return KeyChanges(keys, upto, len(rows) == limit)


def row_of(key: ApiKey) -> tuple[object, ...]:
    """Values of a key's columns."""
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces, msgspec.json.encode([msgspec.structs.astuple(one) for one in key.model_limits]).decode(),
    )  # fmt: skip


def keys_of(rows: Iterable[Sequence[Any]]) -> list[ApiKey]:
    """Keys of rows; columns after their own are passed over.

    Raises:
        ValueError: a row makes no sense, as in a damaged file; the text shows nothing of it.
    """
    try:
        sound = msgspec.convert([tuple(row)[:_WIDTH] for row in rows], list[_Row], builtin_types=(bytes,))
        return [_key(*row) for row in sound]
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("the row of a key makes no sense") from None


def _key(
    id: str,
    digest: bytes,
    user: str,
    tenant: str,
    tier: str,
    models: str,
    rate: float | None,
    burst: float | None,
    created_at: float,
    expires_at: float | None,
    replaces: str,
    model_limits: str,
) -> ApiKey:
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
        model_limits=() if model_limits == "[]" else tuple(ModelLimit(*one) for one in _model_limits(model_limits)),
    )
