"""Which API keys may be added to those that are there, as a store asks while nobody else may add one."""

from __future__ import annotations

from collections.abc import Iterable

from headway.model import ApiKey


def check_new(key: ApiKey, alike: Iterable[ApiKey]) -> None:
    """See that a new key is one of its own, and the only one to take another's place: of two rotations at once one loses.

    Arguments:
        key: not yet kept.
        alike: what is kept under its id, and what replaces the same key; others do no harm.

    Raises:
        ValueError: it may not be added; says why.
    """
    for other in alike:
        if other.id == key.id:
            raise ValueError(f"there is a key with the id {key.id!r} already")
        lives = other.expires_at is None or other.expires_at > key.created_at
        if key.replaces and other.replaces == key.replaces and lives:
            raise ValueError(f"{key.replaces} has just been replaced by {other.id}, which lives")
