"""Check of a new API key against a store's keys, while no other can be added. The three kinds of stores share it."""

from __future__ import annotations

from collections.abc import Iterable

from headway.model import ApiKey


def check_new(key: ApiKey, alike: Iterable[ApiKey]) -> None:
    """Check that a new key has an id of its own, and that no other key replaces the same one. Raises ValueError with the reason.

    `alike`: keys with its id, and keys that replace the same one."""
    for other in alike:
        if other.id == key.id:
            raise ValueError(f"there is a key with the id {key.id!r} already")
        lives = other.expires_at is None or other.expires_at > key.created_at
        if key.replaces and other.replaces == key.replaces and lives:
            raise ValueError(f"{key.replaces} has just been replaced by {other.id}, which lives")
