"""An API key as a row of the table `headway_keys`, whichever database that is in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headway.model import Key

COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces"
"""The columns that make up a key, in the order of `row_of` and `key_of`."""
NEXT = "(SELECT coalesce(max(revision), 0) + 1 FROM headway_keys)"
"""The revision of a row that is added or changed now."""
LATEST = "SELECT coalesce(max(revision), 0) FROM headway_keys"
SELECT = f"SELECT {COLUMNS} FROM headway_keys"  # noqa: S608
_Row = tuple[str, bytes, str, str, str, str, float | None, float | None, float, float | None, str]
_WIDTH = 11
IN_ORDER = f"{SELECT} ORDER BY created_at, id"


def row_of(key: Key) -> tuple[object, ...]:
    """The values of a key's columns."""
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces,
    )  # fmt: skip


def key_of(row: Iterable[Any]) -> Key:
    """The key of a row; columns after its own are passed over.

    Raises:
        ValueError: the row makes no sense, as in a damaged file; the text shows nothing of it.
    """
    try:
        id, digest, user, tenant, tier, models, rate, burst, created_at, expires_at, replaces = msgspec.convert(
            tuple(row)[:_WIDTH], _Row, builtin_types=(bytes,)
        )
        names = msgspec.json.decode(models, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("the row of a key makes no sense") from None
    return Key(
        id=id,
        digest=digest,
        user=user,
        tenant=tenant,
        tier=tier,
        models=names,
        rate=rate,
        burst=burst,
        created_at=created_at,
        expires_at=expires_at,
        replaces=replaces,
    )
