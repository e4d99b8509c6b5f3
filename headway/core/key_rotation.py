"""Check of a new API key against the keys of a store, which the three kinds of stores share."""

from __future__ import annotations

from collections.abc import Iterable

from headway.model import ApiKey


def check_new(key: ApiKey, alike: Iterable[ApiKey]) -> None:
    """Check a new key, while no other can be added, against `alike`, which are keys with its id and keys that replace the same one.

    Raises ValueError if its id is taken, or if a valid key replaces the same one."""
    for other in alike:
        if other.id == key.id:
            raise ValueError(f"there is a key with the id {key.id!r} already")
        lives = other.expires_at is None or other.expires_at > key.created_at
        if key.replaces and other.replaces == key.replaces and lives:
            raise ValueError(f"{key.replaces} has just been replaced by {other.id}, which lives")
