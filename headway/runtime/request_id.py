"""Ids for requests that come without one. `doors.fields.read_id` reads the ids that clients choose."""

from __future__ import annotations

from collections.abc import Callable

import uuid_utils

NewId = Callable[[], str]  # A function like `new_id`.


def new_id() -> str:
    """Return a new request id, a UUIDv7 (RFC 9562) as a string. These ids sort by time."""
    return str(uuid_utils.uuid7())
